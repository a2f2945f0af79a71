"""A checkpoint goes on under any plan and number of processes as if nothing had happened, and is whole or not there."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime import parity, resharded  # noqa: E402
from runtime.one_process import alone  # noqa: E402
from runtime.ranks import launch  # noqa: E402

from gnomon.errors import InputError, RunError  # noqa: E402
from gnomon.models.llama import llama  # noqa: E402
from gnomon.runtime import Executor  # noqa: E402
from gnomon.runtime.checkpoint.convert import convert  # noqa: E402
from gnomon.runtime.checkpoint.files import problems_of  # noqa: E402
from gnomon.runtime.checkpoint.load import load  # noqa: E402
from gnomon.runtime.checkpoint.lock import FolderLock  # noqa: E402
from gnomon.runtime.checkpoint.pieces import boxes  # noqa: E402
from gnomon.runtime.checkpoint.record import RECORD, newest  # noqa: E402
from gnomon.runtime.checkpoint.save import Saver, save  # noqa: E402

pytestmark = pytest.mark.torch


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_are_the_range(shape: list[int], data: st.DataObject) -> None:
    """Element by element and in order; never more than two a dim, and one."""
    size = int(np.prod(shape))
    low = data.draw(st.integers(0, size))
    high = data.draw(st.integers(low, size))
    numbers = np.arange(size).reshape(shape)
    actual = list(boxes(shape, low, high))
    parts = [numbers[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))].flatten() for box in actual]
    assert [n for part in parts for n in part.tolist()] == list(range(low, high))
    assert len(actual) <= 2 * len(shape) - 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def written(folder: Path) -> dict[str, parity.Curve]:
    return launch(resharded.write, 2, folder)[0]


@pytest.mark.parametrize("world_size", resharded.READERS)
def test_training_goes_on_under_another_plan(world_size: int, folder: Path, written: dict[str, parity.Curve]) -> None:
    """ZeRO 3 on two to one process, pp to dp and ZeRO 1, tp to pp …: losses and norms of the plain model to 1e-9."""
    want, _ = parity.plain(parity.CONFIG, steps=resharded.STEPS)
    curves = launch(resharded.read, world_size, folder, world_size)[0]
    assert len(curves) == len(resharded.WRITERS) * len(resharded.READERS[world_size])
    for (writer, _), curve in curves.items():
        np.testing.assert_allclose([*written[writer], *curve], want, rtol=1e-9, atol=0)


def test_another_batch_or_a_broken_file_is_said(folder: Path, written: dict[str, parity.Curve], tmp_path: Path) -> None:
    message = launch(resharded.refused, 1, folder / "1f1b", tmp_path)[0]
    assert "another model, precision or batch" in message[0]
    assert "is whole" in message[1] and "has 0 bytes and was written with" in message[1] and "remove" in message[1]


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    """One rank, after a step."""
    with alone():
        plan = replace(parity.PLANS["one device"], precision=parity.FP64)
        made = Executor(llama(parity.CONFIG), plan, parity.WORKLOAD, seed=7, settings=parity.SETTINGS)
        made.step(parity.batch(0))
        yield made
        made.leave()


@pytest.fixture(scope="module")
def two(executor: Executor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of steps 1 and 2, which hold the same."""
    folder = tmp_path_factory.mktemp("two")
    for step in (1, 2):
        save(folder, executor, step, identity={"seed": "7", "data": "books"})
    return folder


def flipped(path: Path, at: int) -> None:
    """Turns a byte of a file over."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0xFF
    path.write_bytes(raw)


def parameters(executor: Executor) -> torch.Tensor:
    """All that a checkpoint holds, in one."""
    ((held, adam),) = executor.parameters()
    assert adam.first is not None and adam.second is not None
    return torch.cat([held.shard, adam.first, adam.second])


@pytest.mark.parametrize("seed", range(12))
def test_damage_anywhere_is_found_and_the_checkpoint_before_is_taken(
    seed: int, executor: Executor, two: Path, tmp_path: Path
) -> None:
    """Of the newest one: a byte of any file turned over, or a file cut off, emptied or gone."""
    drawn, folder, message = random.Random(seed), tmp_path / "copy", list[str]()
    shutil.copytree(two, folder)
    before = parameters(executor).clone()
    victim = drawn.choice(sorted((folder / "step-000002").iterdir()))
    size = victim.stat().st_size
    match seed % 4:
        case 0 | 1:
            flipped(victim, drawn.randrange(size))
        case 2:
            victim.write_bytes(victim.read_bytes()[: drawn.randrange(size)])
        case _:
            victim.unlink()
    executor.stages[0].own_parameters[0].shard.add_(1)
    assert load(folder, executor, say=message.append) == 1
    assert torch.equal(parameters(executor), before)
    damage, resumed = message
    assert "step-000002" in damage and damage.endswith("taking the checkpoint before it")
    assert resumed.startswith("resumed after step 1, from ") and "step-000001" in resumed
    assert problems_of(folder / "step-000002") and not problems_of(folder / "step-000001")


def test_when_none_is_whole_a_run_does_not_begin_anew_in_silence(executor: Executor, two: Path, tmp_path: Path) -> None:
    shutil.copytree(two, tmp_path / "copy")
    for step in ("step-000001", "step-000002"):
        (tmp_path / "copy" / step / RECORD).write_text("{")
    assert newest(tmp_path / "copy") is None
    with pytest.raises(InputError, match=r"no checkpoint in .* is whole .*gnomon.json is damaged or cut off"):
        load(tmp_path / "copy", executor, say=lambda line: None)
    assert load(tmp_path / "nowhere", executor) == 0


def test_nothing_in_a_checkpoint_is_unpickled(executor: Executor, two: Path, tmp_path: Path) -> None:
    """Neither torch's metadata nor what stands in place of our own files; paths lead to no other folder."""

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (tmp_path / "was here",))  # type: ignore[return-value]

    folder = tmp_path / "copy"
    shutil.copytree(two, folder)
    evil = pickle.dumps(Evil())
    (folder / "step-000001" / ".metadata").write_bytes(evil)
    for file in (folder / "step-000002").iterdir():
        file.write_bytes(evil)
    assert load(folder, executor, say=lambda line: None) == 1
    assert not (tmp_path / "was here").exists()
    message = json.loads((two / "step-000002" / RECORD).read_text())
    message["files"][0]["name"] = "../step-000001/" + message["files"][0]["name"]
    (folder / "step-000002" / RECORD).write_text(json.dumps(message))
    assert "its checksum is of other contents" in problems_of(folder / "step-000002")[0]


def test_a_run_goes_on_only_from_its_own_settings(executor: Executor, two: Path) -> None:
    same = {"seed": "7", "data": "books"}
    assert load(two, executor, identity=same) == 2
    with pytest.raises(InputError, match=r"seed was 7 and is 8; data was books and is web.*--override seed,data"):
        load(two, executor, identity={"seed": "8", "data": "web"}, override=())
    assert load(two, executor, identity={"seed": "8", "data": "books"}, override=("seed",)) == 2


def test_a_checkpoint_is_of_the_moment_it_was_begun(executor: Executor, tmp_path: Path) -> None:
    """Training goes on while it is written; the two newest are kept."""
    began, saver = parameters(executor).clone(), Saver(tmp_path, executor, keep=2)
    for step in (1, 2, 3):
        saver.start(step)
    executor.stages[0].own_parameters[0].shard.add_(1)
    assert saver.finish() == tmp_path / "step-000003" and saver.finish() is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]
    saver.close()
    load(tmp_path, executor)
    assert torch.equal(parameters(executor), began)


def test_parameters_that_are_no_numbers_are_not_kept(executor: Executor, two: Path, tmp_path: Path) -> None:
    shutil.copytree(two, tmp_path / "copy")
    executor.stages[0].own_parameters[0].shard[3] = float("nan")
    with pytest.raises(RunError, match="not finite after step 3: training diverged .*step-000002 is whole"):
        save(tmp_path / "copy", executor, 3)
    assert load(tmp_path / "copy", executor) == 2
    assert torch.isfinite(parameters(executor)).all()


def test_two_runs_do_not_share_a_folder(executor: Executor, tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    lock.take()
    with pytest.raises(InputError, match="another run writes checkpoints to"):
        Saver(tmp_path, executor)
    lock.free()
    Saver(tmp_path, executor).close()


@pytest.mark.parametrize("name", resharded.WRITERS)
def test_converting_to_its_own_plan_gives_the_same_files(
    name: str, folder: Path, written: dict[str, parity.Curve], tmp_path: Path
) -> None:
    """What ranks hold, as it is worked out without them, is what real ranks wrote: byte by byte."""
    plan = replace(parity.PLANS[name], precision=parity.FP64)
    source = folder / name / "step-000001"
    done = convert(source, tmp_path, llama(parity.CONFIG), plan, parity.WORKLOAD)
    for file in source.iterdir():
        assert file.read_bytes() == (done / file.name).read_bytes()


def test_a_rank_s_file_that_is_a_link_out_of_its_checkpoint_is_not_read(two: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(two / "step-000002", tmp_path / "copy")
    file = copy / "rank-00000.safetensors"
    file.rename(tmp_path / "elsewhere.safetensors")
    file.symlink_to(tmp_path / "elsewhere.safetensors")
    [problem] = problems_of(copy)
    assert f"{file} is a link out of its checkpoint, to {tmp_path / 'elsewhere.safetensors'}" in problem
