"""`python -m mpispeed`: the command line."""

import sys

from mpispeed.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
