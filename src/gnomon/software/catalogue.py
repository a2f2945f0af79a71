"""The stacks on record: what named programs do, read from the TOML files next to this module.

`stack(name)` returns the `Stack` of a program at the version that its file names, or of a user's own `.toml` file;
`stacks()` lists the names. Every field that is set has a source and a date in its file, and what is not known stays
None. Leaves out what a job switches: the readers in `formats` change a record by what the job's own file says.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from gnomon import schema
from gnomon.errors import CatalogueError, nearest
from gnomon.software.record import Stack

ALIASES = {
    "megatron": "megatron-lm",
    "nemo": "megatron-bridge",
    "fsdp": "torchtitan",
    "fsdp1": "llm-foundry",
    "fsdp2": "torchtitan",
    "composer": "llm-foundry",
}
"""Other names -> names of records."""


@cache
def stacks() -> tuple[str, ...]:
    """Names of the stacks on record, sorted."""
    return tuple(sorted(path.stem for path in (Path(__file__).parent / "stacks").glob("*.toml")))


def stack(name: str) -> Stack:
    """The record of a program, or a file of one, as in `mine.toml`. CatalogueError with the nearest names if there is
    none; InputError for a file that cannot be read."""
    # With a folder before it a name is a file's, there or not: what is wrong is then said of the file.
    if name.endswith(".toml") and (Path(name).is_file() or Path(name).name != name):
        return schema.load_file(Stack, name)
    known = ALIASES.get(name, name)
    if known not in stacks():
        raise CatalogueError(
            f"no stack {name!r} is on record{nearest(name, [*stacks(), *ALIASES])}; known: {', '.join(stacks())}"
        )
    return _read(known)


@cache
def _read(name: str) -> Stack:
    return schema.load_packaged(Stack, Path(__file__).parent / "stacks" / f"{name}.toml")
