import sys

from tailcut.tools.cli import main

if __name__ == "__main__":  # workers import this module, too
    sys.exit(main())
