"""Settings every test runs under.

The `ci` profile makes Hypothesis repeatable and without deadlines, so that a failure comes from the change at hand and
not from luck or a busy machine. It is the default; `pytest --hypothesis-profile=explore` searches wider, at random.
"""

from __future__ import annotations

import gc
import os

# What collection makes (modules, ten thousand tests) stays to the end: to look through it for garbage, again and again
# as it grows, takes a fifth of collection. `pytest_runtestloop` turns the collector on again.
gc.disable()

# Of torch, here and in processes that tests start; before anything loads it. As many processes run tests as there are
# cores: a second thread would wait for a core, and the first for it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator, Sequence  # noqa: E402
from multiprocessing import forkserver  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402
from once import FOLDER  # noqa: E402

HERE = Path(__file__).parent

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=2000, deadline=None)
settings.load_profile("ci")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Garbage is collected from here on, among what the tests make."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those of the repository as a whole (documentation, mutated files, the site) come first. Among them are the
    longest by themselves, and where one of these begins last, the other processes wait for it."""
    items.sort(key=lambda item: item.path.parent != HERE)


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


@pytest.fixture(autouse=True, scope="session")
def what_the_fork_server_loads() -> Iterator[None]:
    """Whichever test starts the fork server of this process, it loads what the ranks of all later tests need."""
    preload = forkserver.set_forkserver_preload

    def preload_all(modules: Sequence[str]) -> None:
        preload([*modules, "torch._dynamo", "gnomon.runtime.launch.train"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "set_forkserver_preload", preload_all)
        yield
