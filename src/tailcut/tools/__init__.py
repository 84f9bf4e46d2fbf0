"""What is run from a command line. The tools use the library, and nothing in the library imports them."""
