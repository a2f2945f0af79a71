"""The command line: `gnomon predict`, `plan`, `fit`, `explain`, `launch`, `check`, `run`, `serve`, `generate`,
`bench-serve`, `scale`, `checkpoint`, `compress`, `parity`, `compare`, `report`, `calibrate`, `validate`, `compile`,
`export`, `catalogue` and `fleet`.

`main(argv)` parses, runs one command and returns the exit status: 0 done (for `predict` and `explain`: and it fits); 1
a prediction was made and the plan does not fit in memory, or no machines are as fast as asked; 2 the request cannot be
read or carried out; 3 a mistake of ours; 130 interrupted. A command's module is loaded when it is called, so that help
and errors come at once. Leaves out all knowledge of models and machines.
"""

from __future__ import annotations

import errno
import gc
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from shutil import get_terminal_size

from gnomon import orders
from gnomon.cli.options import parse, parser
from gnomon.cli.serving import refuse_servers
from gnomon.cli.terminal import broken
from gnomon.errors import GnomonError
from gnomon.late import load_late

FITS, DOES_NOT_FIT, BAD_REQUEST, OUR_MISTAKE, INTERRUPTED = 0, 1, 2, 3, 130

ORDERS = "GNOMON_ORDERS"
"""Variable with files of pipeline schedules (`orders.add`) added to those of `gnomon.orders`, divided as in PATH."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What the system says of a place that takes no more."""
UNREADABLE = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ELOOP)
"""What it says of a name that no file has, or that may not be read: files name other files."""
LONGEST, MOST_SAID = 80, 2000
"""Letters of a name, and of an error that nobody foresaw, that are printed."""


COLLECTED = 50_000, 20, 50
"""New objects after which cycles are looked for, and how often older ones are: frozen values, of which a search makes
millions, have none. Python's own 700 take a search of GPT-3 175B 6% more time and as much memory, 2026-11-29."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status of a command line; `argv` without the program's name, default the process's own."""
    if argv is None:
        gc.disable()  # what is loaded lives as long as the process: looking through it is a tenth of a small command
    arguments = _from_input(list(sys.argv[1:] if argv is None else argv))
    if sys.stderr is None:  # started with it closed, as `2>&-` does
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    if sys.stdout is None:
        return _failed("gnomon: cannot write the output: standard output is closed; open it or send it to a file", 2)
    _write_what_can_be_written()
    try:
        for path in filter(None, os.environ.get(ORDERS, "").split(os.pathsep)):
            orders.add(path)
    except GnomonError as error:
        return _failed(f"gnomon: {ORDERS}: {error}", BAD_REQUEST)
    if not arguments:
        parser().print_help(sys.stderr)
        return BAD_REQUEST
    try:
        name, options = parse(arguments)
    except SystemExit as error:  # argparse has printed help, the version or what is wrong
        return int(error.code or 0)
    except KeyboardInterrupt:
        return _failed("gnomon: interrupted", INTERRUPTED)
    try:
        refuse_servers(options)
        # By name, so that `gnomon --help` does not load numpy and the models.
        command: Callable[[object], int] = load_late(f"gnomon.cli.{name.replace('-', '_')}:run")
        if argv is None:
            gc.freeze()
            gc.set_threshold(*COLLECTED)
            gc.enable()
        with _as_wide_as_the_terminal():
            status = command(options)
        sys.stdout.flush()
    except GnomonError as error:
        return _failed(f"gnomon: {error}", BAD_REQUEST)
    except BrokenPipeError:  # the reader has had enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return FITS
    except OSError as error:
        if error.errno in UNREADABLE and error.filename is not None:
            return _failed(f"gnomon: cannot read {_short(str(error.filename))}: {error.strerror}", BAD_REQUEST)
        if error.errno not in FULL:
            return _mistake(error, arguments)
        with suppress(OSError):  # what is left in the buffer would fail again at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _failed(f"gnomon: cannot write the output: {error.strerror}", BAD_REQUEST)
    except KeyboardInterrupt:
        return _failed("gnomon: interrupted", INTERRUPTED)
    except Exception as error:
        return _mistake(error, arguments)
    return status


def _from_input(arguments: list[str]) -> list[str]:
    """`--from -`, with no format between, is `-`: a job that is pasted, whose format is recognised. What follows
    `--args` is its value, though it begins with a dash."""
    if "--args" in arguments[:-1]:
        at = arguments.index("--args")
        arguments = [*arguments[:at], f"--args={arguments[at + 1]}", *arguments[at + 2 :]]
    for at, (word, following) in enumerate(zip(arguments, arguments[1:], strict=False)):
        if word == "--from" and following == "-" and (arguments[at + 2 : at + 3] or ["--"])[0].startswith("--"):
            return [*arguments[:at], *arguments[at + 1 :]]
    return arguments


def _mistake(error: Exception, arguments: Sequence[str]) -> int:
    """What to report of an error that nobody foresaw."""
    command = " ".join(["gnomon", *arguments])
    return _failed(
        f"gnomon: a mistake in Gnomon itself: {type(error).__name__}: {str(error)[:MOST_SAID]}\n"
        f"Please report it with this line: {command}\n"
        f"GNOMON_DEBUG=1 shows where it happened.",
        OUR_MISTAKE,
    )


def _short(text: str) -> str:
    """The beginning of what is too long for a message, quoted."""
    return repr(text if len(text) <= LONGEST else f"{text[:LONGEST]}…")


def _write_what_can_be_written() -> None:
    """Letters that the terminal's encoding has not become `?`, in place of an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _as_wide_as_the_terminal() -> AbstractContextManager[None]:
    """Lines take the width that COLUMNS says, or that of the terminal; 80 columns where there is neither."""
    if not (sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()):
        return nullcontext()
    wide: Callable[[int], AbstractContextManager[None]] = load_late("gnomon.report.tables:as_wide_as")
    return wide(get_terminal_size().columns)


def _failed(message: str, status: int) -> int:
    """Print the message (with GNOMON_DEBUG=1 the traceback before it) and return the status."""
    if os.environ.get("GNOMON_DEBUG", "0") not in ("", "0"):
        traceback.print_exc()
    print(broken(message, sys.stderr), file=sys.stderr)
    return status
