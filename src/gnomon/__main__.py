"""`python -m gnomon`, where the script `gnomon` is not on the path: the same program, with the same exit status.

Leaves out everything else: the command line is `gnomon.cli`.
"""

from __future__ import annotations

import sys

from gnomon.cli import main

if __name__ == "__main__":
    sys.exit(main())
