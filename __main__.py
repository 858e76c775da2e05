"""`python -m ringslab` is the command `ringslab`."""

import sys

from .tools.main import main

if __name__ == "__main__":
    sys.exit(main())
