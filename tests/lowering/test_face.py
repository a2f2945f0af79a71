"""What `gnomon.lowering` offers: every schedule and every method, so that nobody needs to know in which file it is."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path

import gnomon.lowering as face

FOLDER = Path(str(face.__file__)).parent
PARTS = {
    "edit",
    "insertions",
    "norm",
    "optimizer",
    "shared",
    "skips",
    "tensor_sums",
    "workers",
}
"""Modules that `lower` and the methods are made of; who writes a pass imports from them by name."""


def test_every_schedule_and_method_is_offered() -> None:
    offered = {value for value in vars(face).values() if inspect.isfunction(value)}
    modules = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}
    assert modules >= PARTS
    for name in sorted(modules - PARTS):
        module = import_module(f"gnomon.lowering.{name}")
        own = [f for f in vars(module).values() if inspect.isfunction(f) and f.__module__ == module.__name__]
        assert any(f in offered for f in own), f"nothing of schedules/{name}.py is in gnomon.lowering"
