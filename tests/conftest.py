"""Settings every test runs under.

The `ci` profile makes Hypothesis repeatable and without deadlines, so that a failure comes from the change at hand and
not from luck or a busy machine. It is the default; `pytest --hypothesis-profile=explore` searches wider, at random.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings
from once import FOLDER

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=2000, deadline=None)
settings.load_profile("ci")


@pytest.fixture(autouse=True, scope="session")
def no_home_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What this machine's user measured on it (`gnomon calibrate`, `gnomon plan --try`) is not for tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GNOMON_HOME", str(tmp_path_factory.mktemp("gnomon-home")))
        yield


@pytest.fixture(autouse=True, scope="session")
def folder_of_what_is_made_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of all processes of this run (`once`): those of pytest-xdist have folders of their own below one."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "once"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(folder))
        yield
