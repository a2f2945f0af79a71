"""Documents packed into rows train as they do in rows of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime import parity  # noqa: E402
from runtime.one_process import alone  # noqa: E402
from torch import Tensor  # noqa: E402

from gnomon.errors import PlanError  # noqa: E402
from gnomon.graph import Graph  # noqa: E402
from gnomon.models.gpt import GptConfig, gpt  # noqa: E402
from gnomon.models.llama import llama  # noqa: E402
from gnomon.models.numerics import Numerics, Rotary, with_numerics  # noqa: E402
from gnomon.plans import Plan, Saved, Schedule, Workload  # noqa: E402
from gnomon.runtime import Executor  # noqa: E402
from gnomon.runtime.data.packing import packing_of  # noqa: E402

pytestmark = pytest.mark.torch

LENGTHS = ((5, 7), (3, 4, 5))
"""Of the documents of two rows."""
SEQ = 12


@pytest.fixture(scope="module", autouse=True)
def process() -> Iterator[None]:
    with alone():
        yield


def packed_and_apart() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same documents in two rows, and each in a row of its own, filled up with what counts for nothing."""
    generator = torch.Generator().manual_seed(3)
    packed: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "documents": []}
    single: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    for row in LENGTHS:
        for column in packed.values():
            column.append([])
        for number, length in enumerate(row):
            ids = torch.randint(0, 32, (length + 1,), generator=generator).tolist()
            packed["input_ids"][-1] += ids[:-1]
            packed["labels"][-1] += ids[1:]
            packed["documents"][-1] += [number] * length
            single["input_ids"].append(ids[:-1] + [0] * (SEQ - length))
            single["labels"].append(ids[1:] + [-1] * (SEQ - length))
    one, other = ({name: torch.tensor(rows) for name, rows in batch.items()} for batch in (packed, single))
    return one, other


def learned() -> Graph:
    """Learned positions in place of rotary ones."""
    config = GptConfig(name="g", num_layers=2, hidden_size=16, num_heads=4, vocab_size=32, max_positions=SEQ)
    return gpt(config)


MODELS = {
    "rotary": lambda: llama(replace(parity.CONFIG, num_layers=2, vocab_size=32)),
    "varied": lambda: llama(replace(parity.VARIED, num_layers=2, vocab_size=32)),
    "learned positions": learned,
}


def after_one_step(graph: Graph, saved: Saved, batch: dict[str, Tensor]) -> list[Tensor]:
    rows = len(batch["input_ids"])
    plan = Plan(schedule=Schedule(num_microbatches=1), precision=parity.FP64, saved=saved)
    executor = Executor(graph, plan, Workload(global_batch_size=rows, seq_len=SEQ), settings=parity.SETTINGS)
    result = executor.step(batch)
    actual = [result.loss, result.grad_norm, executor.stages[0].own_parameters[0].shard]
    executor.leave()
    return actual


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("preset", ["none", "selective", "full"])
def test_packed_documents_train_as_separate_ones(model: str, preset: str) -> None:
    packed, single = packed_and_apart()
    graph, saved = MODELS[model](), Saved(preset=preset)  # type: ignore[arg-type]
    got, want = (after_one_step(graph, saved, batch) for batch in (packed, single))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    mixed = after_one_step(graph, saved, {name: x for name, x in packed.items() if name != "documents"})
    assert abs(float(mixed[0] - want[0])) > 1e-6, "without `documents` tokens see those before them in the row"


def test_positions_begin_again_at_each_document() -> None:
    packing = packing_of({"documents": torch.tensor([[0, 0, 1, 1, 1, 2]])})
    assert packing is not None
    assert packing.positions.tolist() == [[0, 1, 0, 1, 2, 0]]
    assert packing.mask(window=2, causal=True)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    assert packing_of({"input_ids": torch.zeros(1, 2)}) is None


def test_a_batch_that_does_not_fit_the_model_is_refused() -> None:
    graph = MODELS["rotary"]()
    executor = Executor(
        graph,
        Plan(schedule=Schedule(num_microbatches=1), precision=parity.FP64),
        Workload(global_batch_size=2, seq_len=SEQ),
    )
    packed, _ = packed_and_apart()
    with pytest.raises(PlanError, match="reads labels, which the batch has not"):
        executor.step({"input_ids": packed["input_ids"]})
    with pytest.raises(PlanError, match=r"input_ids has shape \(2, 11\)"):
        executor.step(packed | {"input_ids": packed["input_ids"][:, 1:]})
    executor.leave()


def test_what_a_batch_has_and_the_model_does_not_read_is_refused() -> None:
    """It was dropped; what says what the model does anyway may stay."""
    graph = MODELS["rotary"]()
    executor = Executor(
        graph,
        Plan(schedule=Schedule(num_microbatches=1), precision=parity.FP64),
        Workload(global_batch_size=2, seq_len=SEQ),
    )
    packed, _ = packed_and_apart()
    batch = {name: packed[name] for name in ("input_ids", "labels")}
    seen, places = torch.ones(2, SEQ, dtype=torch.int64), torch.arange(SEQ).expand(2, SEQ)
    usual = executor.step(batch | {"attention_mask": seen, "position_ids": places}).loss
    assert torch.isfinite(usual)
    hidden = seen.clone()
    hidden[0, -2:] = 0
    for more in ({"attention_mask": hidden}, {"position_ids": places % 5}):
        with pytest.raises(PlanError, match=f"the batch has {next(iter(more))}, which .* does not read: give"):
            executor.step(batch | more)
    executor.leave()


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_packed_documents_whose_angles_depend_on_the_row_are_refused(scaling: str) -> None:
    """The angles of a document were those of the whole row."""
    rotary = Rotary(
        scaling=scaling, scaling_factor=2.0, original_length=8, short_factors="1.0 1.0", long_factors="2.0 4.0"
    )
    packed, _ = packed_and_apart()
    for original, wrong in ((8, True), (SEQ, False)):
        graph = with_numerics(MODELS["rotary"](), Numerics(rotary=replace(rotary, original_length=original)))
        executor = Executor(
            graph,
            Plan(schedule=Schedule(num_microbatches=1), precision=parity.FP64),
            Workload(global_batch_size=2, seq_len=SEQ),
        )
        if wrong:
            with pytest.raises(PlanError, match=f"rows hold several documents, and rotary angles of type {scaling}"):
                executor.step(packed)
        else:
            assert torch.isfinite(executor.step(packed).loss)
        executor.leave()
