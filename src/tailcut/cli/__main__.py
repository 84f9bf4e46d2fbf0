import sys

from tailcut.cli import main

if __name__ == "__main__":  # workers import this module again
    sys.exit(main())
