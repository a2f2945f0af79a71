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
