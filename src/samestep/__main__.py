"""`python -m samestep`."""

from __future__ import annotations

import sys

from samestep.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
