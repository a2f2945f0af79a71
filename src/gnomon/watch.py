"""`python -m gnomon.watch SCRIPT`: see `gnomon.runtime.watch.script`. In Python `gnomon.watch` is the verb, a function.

This file is only ever run: imported as a module it would stand in the verb's place.
"""

from gnomon.late import load_late

if __name__ != "__main__":
    raise ImportError("gnomon.watch is a function; write `import gnomon` and call gnomon.watch(model, optimizer)")

raise SystemExit(load_late("gnomon.runtime.watch.script:main")())
