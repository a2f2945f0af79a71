"""`python -m gnomon`, where the script `gnomon` is not on the path: the same program, with the same exit status.

Leaves out everything else: the command line is `gnomon.cli`.
"""

from __future__ import annotations

import sys

try:
    from gnomon.cli import main
except KeyboardInterrupt:  # while the modules are loaded, before `main` can answer it
    sys.stderr.write("gnomon: interrupted\n")
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(main())
