"""`python -m hlo_tools` is the `hlo-tools` command."""

import sys

from hlo_tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
