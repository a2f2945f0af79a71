"""`python -m gnomon.frontend.script ANSWER DEVICES SCRIPT [ARGUMENTS]`: runs the script to its first step.

Writes ANSWER as JSON: what was found, or `{"error": …}`. Leaves out everything else.
"""

from __future__ import annotations

import json
import runpy
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

from gnomon.errors import GnomonError
from gnomon.frontend.script.answer import answer
from gnomon.frontend.script.hub import patched_imports
from gnomon.frontend.script.machine import pretended
from gnomon.frontend.script.seen import SEEN, NotHere, Stop
from gnomon.frontend.script.step import watched


def main() -> None:
    """Run, and write the answer."""
    path, devices, script, *arguments = sys.argv[1:]
    SEEN.devices = int(devices)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    warnings.simplefilter("ignore")
    found: dict[str, Any]
    try:
        with patched_imports(), pretended(SEEN.devices), watched():
            ended = _ended(script)
        found = {"error": ended} if ended else answer()
    except NotHere as error:
        found = {"error": str(error)}
    except GnomonError as error:
        found = {"error": f"{Path(script).name} came to {SEEN.stopped_at}, and its model cannot be read: {error}"}
    Path(path).write_text(json.dumps(found), encoding="utf-8")


def _ended(script: str) -> str:
    """Why a script ended before its first step; empty where it was stopped there."""
    name = Path(script).name
    try:
        runpy.run_path(script, run_name="__main__")
    except Stop:
        return ""
    except SystemExit as end:
        if end.code not in (None, 0):
            return f"{name} ended with status {end.code} before its first step; its last line is above"
    except (NotHere, KeyboardInterrupt):
        raise
    except BaseException as error:
        traceback.print_exc()
        at = traceback.extract_tb(error.__traceback__)
        own = next((f for f in reversed(at) if Path(f.filename).name == name), at[-1])
        message = " ".join(str(error).split())[:300]
        return f"{name}, line {own.lineno}: {type(error).__name__}: {message}; it is run without GPU and network"
    return f"{name} ended before a first step: no Trainer.train() and no optimizer.step() after a backward"


main()
