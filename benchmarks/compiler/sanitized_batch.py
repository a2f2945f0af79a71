"""OpInfo's samples and transformers' tiny models with sanitized kernels, many of them in one library: the long part of
`sanitized.py`, which runs this in three steps.

    sanitized_batch.py gather SUITE FILE      what kernels a suite asks for, by planning alone (nothing is compiled)
    sanitized_batch.py build FILE FOLDER      compiles them, `TOGETHER` in a library
    sanitized_batch.py run SUITE FOLDER       the suite itself; these kernels are found as if they had been compiled

Most of the time of a sanitized kernel is g++'s start, the headers and the link, so one library holds many, each in a
namespace of its own; its text is not touched otherwise. Compiled with -O0: every read and write of the text is checked,
also those that optimisation would leave out. After an error the suite goes on. SUITE: opinfo[:samples] or models.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gnomon.compiler import backend, build
from gnomon.compiler.machine import this_machine

TOGETHER = 24
"""Kernels of one library: more save little, and one that does not compile costs its neighbours."""
INDEX = "index.json"


def suite(words: str) -> Any:
    """The `main` of what is asked for; it reads `sys.argv`."""
    name, _, samples = words.partition(":")
    sys.argv = [name, *(["--samples", samples] if samples else [])]
    if name == "opinfo":
        from compiler import opinfo

        return opinfo.main
    from compiler import transformers_types

    return transformers_types.main


def gather(words: str, file: Path) -> None:
    """Runs a suite without a kernel; writes the sources that it asked for, once each."""
    asked: dict[str, None] = {}

    def none(sources: Sequence[str]) -> list[None]:
        asked.update(dict.fromkeys(sources))
        return [None] * len(sources)

    backend.libraries = none  # type: ignore[assignment]
    began = time.process_time()
    try:
        suite(words)()
    except SystemExit:
        pass
    file.write_text(json.dumps(list(asked)))
    print(f"{len(asked)} kernels, {time.process_time() - began:.0f} CPU s")


def together(sources: Sequence[str]) -> str:
    """One text of many kernels, the nth as `gnomon_kernel_n`."""
    included, parts = dict[str, None](), []
    for number, source in enumerate(sources):
        lines = source.splitlines()
        included.update(dict.fromkeys(line for line in lines if line.startswith("#include")))
        body = "\n".join(line for line in lines if not line.startswith("#include"))
        name = build.FUNCTION
        parts.append(f"#define {name} {name}_{number}\nnamespace k{number} {{\n{body}\n}}\n#undef {name}")
    return "\n".join((*included, *parts))


def compiled(sources: Sequence[str], text: Path, target: Path) -> bool:
    text.write_text(together(sources))
    done = subprocess.run(build.command(text, target, this_machine().isa), capture_output=True, text=True)
    if done.returncode:
        print(f"{text.name} does not compile: {done.stderr[:1000]}")
    return done.returncode == 0


def compile_all(file: Path, folder: Path) -> None:
    """Libraries of all sources, and which kernel lies where."""
    sources, index = json.loads(file.read_text()), list[tuple[str, str, int]]()
    folder.mkdir(parents=True, exist_ok=True)
    for start in range(0, len(sources), TOGETHER):
        these = sources[start : start + TOGETHER]
        target = folder / f"kernels{start}.so"
        if target.exists() or compiled(these, folder / f"kernels{start}.cpp", target):
            index += [(source, str(target), number) for number, source in enumerate(these)]
    (folder / INDEX).write_text(json.dumps(index))
    print(f"{len(index)} of {len(sources)} kernels compiled")


def run(words: str, folder: Path) -> None:
    """The suite with these kernels; one that is not among them is compiled by itself with the same flags."""
    libraries: dict[str, ctypes.CDLL] = {}
    for source, path, number in json.loads((folder / INDEX).read_text()):
        library = libraries.setdefault(path, ctypes.CDLL(path))
        function = getattr(library, f"{build.FUNCTION}_{number}")
        function.restype = ctypes.c_int
        build._loaded[build.key_of(source)] = function
    before = len(build._loaded)
    try:
        suite(words)()
    finally:
        print(f"{before} kernels were there, {len(build._loaded) - before} were compiled beside them", file=sys.stderr)


def main() -> None:
    step, *words = sys.argv[1:]
    if step == "gather":
        gather(words[0], Path(words[1]))
    elif step == "build":
        compile_all(Path(words[0]), Path(words[1]))
    else:
        run(words[0], Path(words[1]))


if __name__ == "__main__":
    main()
