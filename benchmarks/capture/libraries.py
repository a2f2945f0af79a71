"""Models of other libraries than transformers: captured, priced, planned, proved and run as in `transformers_types`.

`python benchmarks/capture/libraries.py [--only timm,own] [--rows rows.jsonl] -o results.md` prints a line a model of
timm, torchvision, diffusers, torch-geometric, x-transformers, litgpt, torchtitan and of no library (`library_models`).
A library that cannot be imported is a line with the reason; they are no dependencies of Gnomon (`pip install --no-deps
timm torchvision diffusers torch-geometric x-transformers litgpt torchtitan` beside torch, and what these ask for).
Models are small and have random values; each is done in a process of its own, with a limit of CPU seconds. `parameters`
is whether the Graph has as many as the module, less those that its forward does not read. Left out: data, and training
recipes of the libraries.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

LIMITS = (120.0, 12.0)
"""CPU seconds and GiB of a model."""
LIBRARIES = ("torch", "timm", "torchvision", "diffusers", "torch-geometric", "x-transformers", "litgpt", "torchtitan")


def row(name: str, build: Callable[[], Any], told: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """What became of one model."""
    import torch

    from benchmarks.capture.transformers_types import _said, caught

    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        module, example = build()
    except Exception as error:
        return {"type": name, "captured": False, "built": False, "errors": [f"build: {_said(error)}"]}
    try:
        return caught(name, "small", module.eval(), example, True, told)
    except Exception as error:
        return {"type": name, "captured": False, "errors": [_said(error)]}


def _child(name: str, build: Callable[[], Any], pipe: Any) -> None:
    import os
    import resource
    import warnings

    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_CPU, (int(LIMITS[0]), int(LIMITS[0]) + 5))
    resource.setrlimit(resource.RLIMIT_AS, (int(LIMITS[1] * 2**30),) * 2)
    with open(os.devnull, "w") as nowhere:
        sys.stderr = nowhere
        pipe.send(row(name, build, pipe.send) | {"done": True})


def versions() -> str:
    """Of the libraries that are here."""
    said = []
    for name in LIBRARIES:
        try:
            said.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            said.append(f"{name} is not installed")
    return ", ".join(said)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="beginnings of names, with commas between")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--rows", type=Path, help="where rows are kept, so that a second run goes on")
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[2]))
    import benchmarks.capture.trained  # noqa: F401
    import gnomon.runtime.checks.prove  # noqa: F401
    from benchmarks.capture.library_models import declared, models
    from benchmarks.capture.transformers_types import heard
    from benchmarks.capture.types_table import table
    from gnomon.request import verbs  # noqa: F401

    declared()
    rows = (
        [json.loads(line) for line in given.rows.read_text().splitlines()] if given.rows and given.rows.exists() else []
    )
    done, context = {held["type"] for held in rows}, get_context("fork")
    for name, build in models():
        if name in done or (given.only and not name.startswith(tuple(given.only.split(",")))):
            continue
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(name, build, theirs))
        process.start()
        theirs.close()
        rows.append(heard(mine, process, name, LIMITS[0]))
        process.kill()
        process.join()
        print(f"{name}: {'captured' if rows[-1]['captured'] else rows[-1]['errors']}", file=sys.stderr, flush=True)
        if given.rows:
            with given.rows.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print(versions())
    page = table(rows, len(rows)).replace("types of AutoModel", "models", 1).replace("| type |", "| model |", 1)
    print(page)
    if given.output:
        given.output.write_text(page + "\n")


if __name__ == "__main__":
    main()
