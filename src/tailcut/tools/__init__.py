"""What is run from a command line. Above the library: nothing in it imports a tool."""
