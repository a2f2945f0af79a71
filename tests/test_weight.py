"""Importing Gnomon stays light: none of torch, pandas and scipy is loaded, installed or not.

Each import runs in a fresh interpreter in which empty packages of those names can be found, so that even an import
guarded by `try` shows. How long it takes is a benchmark's matter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
HEAVY = ("torch", "pandas", "scipy")
TORCH_ROOMS = ("frontend", "compiler", "runtime", "serve")


def heavy_after(statement: str, folder: Path) -> set[str]:
    """Which of HEAVY a fresh interpreter has loaded after `statement`. `folder` receives the empty packages."""
    for name in HEAVY:
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()
    code = f"{statement}\nimport sys\nprint(*(name for name in {HEAVY} if name in sys.modules))"
    paths = os.pathsep.join((str(folder), str(SOURCE)))
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_importing_gnomon_loads_nothing_heavy(tmp_path: Path) -> None:
    assert heavy_after("import gnomon", tmp_path) == set()


def test_importing_every_room_without_torch_loads_nothing_heavy(tmp_path: Path) -> None:
    paths = [path.relative_to(SOURCE).with_suffix("") for path in (SOURCE / "gnomon").rglob("*.py")]
    modules = [".".join(path.parts).removesuffix(".__init__") for path in paths if path.parts[1] not in TORCH_ROOMS]
    light = sorted(module for module in modules if not module.endswith("__main__") and module != "gnomon.watch")
    assert "gnomon.errors" in light
    assert heavy_after("\n".join(f"import {module}" for module in light), tmp_path) == set()


@pytest.mark.parametrize("name", HEAVY)
def test_a_heavy_import_shows_even_when_guarded(name: str, tmp_path: Path) -> None:
    assert heavy_after(f"try:\n    import {name}\nexcept ImportError:\n    pass", tmp_path) == {name}


COLD = ("predict", "llama-3.1-8b", "--on", "4x8xh100-sxm", "--zero", "3", "--global-batch", "128")
"""A prediction of a preset that fits: what most people ask first, and wait for."""
MODULES, DATACLASSES = 297, 282
"""Of Gnomon, that it may load, each a millisecond of processor time. 367 and 336 when they were first counted."""

COUNTED = """
import sys
from dataclasses import is_dataclass
from gnomon.cli import main
status = main(sys.argv[1:])
ours = [name for name in sys.modules if name.split(".")[0] == "gnomon"]
made = {value for name in ours for value in vars(sys.modules[name]).values()
        if isinstance(value, type) and is_dataclass(value) and value.__module__ == name}
print(status, len(ours), len(made), *sorted(sys.modules), file=sys.stderr)
"""


def loaded_by(*words: str) -> tuple[int, int, int, set[str]]:
    """(exit status, modules of Gnomon, its dataclasses, names of all modules) of a command in a fresh interpreter."""
    run = subprocess.run(
        [sys.executable, "-c", COUNTED, *words],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
    )
    status, modules, dataclasses, *names = run.stderr.splitlines()[-1].split()
    return int(status), int(modules), int(dataclasses), set(names)


def test_a_cold_prediction_loads_what_it_reads() -> None:
    status, modules, dataclasses, names = loaded_by(*COLD)
    assert status == 0
    assert modules <= MODULES and dataclasses <= DATACLASSES, (modules, dataclasses)
    rooms = {name.split(".")[1] for name in names if name.startswith("gnomon.")}
    assert not rooms & {"search", "fleet", "serving", "control", "frontend", "compiler", "runtime", "serve"}
    assert {name for name in names if name.startswith("gnomon.formats.")} == {"gnomon.formats.given"}
    assert {name.split(".")[3] for name in names if name.startswith("gnomon.cli.options.")} == {
        "flags", "job", "predict", "serve",
    }  # fmt: skip
    # Of the standard library and numpy: what a careless import brings (OpenSSL, zip files, e-mail).
    assert not names & {
        "numpy.ma",
        "importlib.resources",
        "importlib.metadata",
        "zipfile",
        "email",
        "hashlib",
        "random",
    }


def test_help_loads_neither_numpy_nor_options() -> None:
    _, modules, _, names = loaded_by("compile")  # a mistake: its argument is missing
    assert "numpy" not in names and modules < 25


def test_serving_a_model_loads_nothing_that_trains_one() -> None:
    """Nor sympy, which is half a second: a server's first token waits for its imports."""
    pytest.importorskip("torch")
    run = subprocess.run(
        [sys.executable, "-c", "import gnomon.serve.load, gnomon.serve.engine, sys; print(*sys.modules)"],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
    )
    names = set(run.stdout.split())
    rooms = {name.split(".")[1] for name in names if name.startswith("gnomon.")}
    assert not rooms & {"prediction", "search", "fleet", "frontend", "report", "request"}
    assert not names & {"sympy", "gnomon.runtime.launch", "gnomon.runtime.step", "gnomon.runtime.checkpoint.save"}
