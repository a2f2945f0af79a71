"""`gnomon.watch` in loops of one's own: what drifts is named, what does not is not, and every hook comes off.

On one process time and memory are told, so that the machine's load decides nothing; two processes sleep.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from runtime import watched  # noqa: E402
from runtime.ranks import launch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import gnomon  # noqa: E402
from gnomon.errors import InputError  # noqa: E402
from gnomon.plans import Mesh, Plan, PlanFile, Schedule, Workload, save_plan_file  # noqa: E402
from gnomon.runtime.watch.drift import ExpectedStep, Parts, expected_of, judge, memory_drift  # noqa: E402
from gnomon.runtime.watch.script import main as script_main  # noqa: E402
from gnomon.runtime.watch.watch import Watch, watch  # noqa: E402

pytestmark = pytest.mark.torch

PLAIN = Parts(data_s=0.0, compute_s=0.10, communication_s=0.02, update_s=0.01)
PLAN = Plan(schedule=Schedule(micro_batch_size=1))
EXPECTED = ExpectedStep(parts=PLAIN, high=1.2, memory_bytes=1 << 30, high_bytes=1 << 31, uneven=False)


class Clock:
    """Seconds that pass when the loop says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def spend(self, seconds: float) -> None:
        self.now_s += seconds


class Model(nn.Module):
    """A layer that takes 10 ms forward, and 20 ms backward."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.layer, self.clock, self.forward_s = nn.Linear(4, 4), clock, 0.01
        self.layer.weight.register_hook(lambda gradient: clock.spend(0.02))

    def forward(self, x: Tensor) -> Tensor:
        self.clock.spend(self.forward_s)
        return self.layer(x)


class Loop:
    """A training loop whose time is told."""

    def __init__(self, plan: Any = None, *, told: bool = False) -> None:
        self.clock, self.records, self.out = Clock(), list[dict[str, Any]](), io.StringIO()
        self.model = Model(self.clock)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer.register_step_pre_hook(lambda *_: self.clock.spend(0.002))
        self.load_s, self.told = 0.001, told
        self.leak_bytes, self.held_bytes, self.retries = 0, 1 << 30, 0
        self.watch: Watch = gnomon.watch(
            self.model, self.optimizer, plan, records=self.records.append, out=self.out, clock=self.clock
        )
        self.watch._memory = lambda: self.held_bytes  # type: ignore[method-assign]
        self.watch._count_retries = lambda: self.retries  # type: ignore[method-assign]

    def batches(self, steps: int) -> Iterator[Tensor]:
        for _ in range(steps):
            self.clock.spend(self.load_s)
            yield torch.ones(2, 4)

    def run(self, steps: int) -> Loop:
        for batch in self.watch.data(self.batches(steps)) if self.told else self.batches(steps):
            self.optimizer.zero_grad()
            self.model(batch).square().mean().backward()
            self.optimizer.step()
            self.held_bytes += self.leak_bytes
        return self

    def drift(self) -> str | None:
        return self.records[-1]["drift"]  # type: ignore[no-any-return]


def test_a_steady_loop_drifts_by_nothing_and_its_parts_are_its_own() -> None:
    loop = Loop(told=True).run(60)
    assert {record["drift"] for record in loop.records} == {None}
    last = loop.records[-1]
    assert last["data_s"] == pytest.approx(0.001) and last["loop_s"] == pytest.approx(0.0)
    assert last["compute_s"] == pytest.approx(0.03) and last["update_s"] == pytest.approx(0.002)
    assert last["step_s"] == pytest.approx(0.033) and last["step"] == 60
    assert [record["step"] for record in loop.records] == list(range(2, 61))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"load_s": 0.05}, "data loading"),
        ({"forward_s": 0.05}, "compute"),
        ({"leak_bytes": 4 << 20}, "allocator"),
        ({"retries": 2}, "allocator"),
    ],
)
def test_what_changes_on_the_way_is_named(change: dict[str, Any], name: str) -> None:
    loop = Loop().run(14)
    assert loop.drift() is None
    for field, value in change.items():
        setattr(loop.model if field == "forward_s" else loop, field, value)
    loop.run(40)
    assert loop.drift() == name
    assert f"drifts: {name}" in loop.out.getvalue()


def test_a_loader_that_is_slow_from_the_beginning_is_named_by_the_prediction(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    batch = Workload(global_batch_size=8, seq_len=512)
    save_plan_file(PlanFile(model="gpt2", on="1xh100-sxm", plan=PLAN, workload=batch), path)
    loop = Loop(path)
    expected = loop.watch.expected
    assert expected is not None and expected.parts.compute_s > 0 and expected.parts.data_s == 0
    loop.watch.expected = replace(expected, parts=replace(PLAIN, communication_s=0.0))
    loop.load_s = 0.05
    loop.run(14)
    assert loop.drift() == "data loading" and "expected none" in loop.records[-1]["why"]
    assert loop.records[-1]["expected_step_s"] == pytest.approx(0.11)


def test_accumulated_microbatches_and_evaluations() -> None:
    """Two backwards a step are its compute; what an evaluation takes is no part of a step."""
    loop = Loop()
    for _ in range(14):
        for batch in loop.batches(2):
            loop.model(batch).square().mean().backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        with torch.no_grad():
            loop.model(torch.ones(2, 4))
    last = loop.records[-1]
    assert last["compute_s"] == pytest.approx(0.06) and last["data_s"] == pytest.approx(0.002)
    assert last["step_s"] == pytest.approx(0.064) and loop.drift() is None


def test_hooks_come_off_and_records_are_lines(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = torch.distributed.Work.wait
    with watch(model, optimizer, records=tmp_path / "watch.jsonl", out=None) as watching:
        assert torch.distributed.Work.wait is not before
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert torch.distributed.Work.wait is before
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    lines = [json.loads(line) for line in (tmp_path / "watch.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 3]
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert watching.steps == 3


def test_a_slow_rank_is_named() -> None:
    """Rank 1 sleeps in its forward: both ranks name it, under DDP, where rank 0 waits at the end of the backward, and
    under FSDP2, where it waits for gathers."""
    for _, cases in launch(watched.loops, 2).items():
        for (wrap, slow), (records, restored) in cases.items():
            assert restored
            assert records[-1]["drift"] == "straggler", (wrap, records[-1])
            assert f"rank {slow} takes" in records[-1]["why"] and "in compute" in records[-1]["why"]
            waits = sorted(record["communication_s"] for record in records[3:])
            if records[-1]["rank"] != slow:
                assert waits[len(waits) // 2] > watched.SLOW_S / 2, wrap


def test_a_wait_for_a_collective_is_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait itself takes told time: it is no compute, and where it grows it is named."""
    clock, waits = Clock(), {"seconds": 0.01}
    monkeypatch.setattr(torch.distributed.Work, "wait", lambda work, *args: clock.spend(waits["seconds"]))
    model, records = Model(clock), list[dict[str, Any]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.layer.register_forward_hook(lambda *_: torch.distributed.Work.wait(None))  # type: ignore[arg-type]
    with watch(model, optimizer, records=records.append, out=None, clock=clock) as watching:
        watching._memory = lambda: 1 << 30  # type: ignore[method-assign]
        for step in range(60):
            waits["seconds"] = 0.01 if step < 20 else 0.06
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
    assert records[5]["communication_s"] == pytest.approx(0.01) and records[5]["compute_s"] == pytest.approx(0.03)
    assert records[15]["drift"] is None and records[-1]["drift"] == "communication"


@pytest.mark.parametrize(
    ("late", "name", "why"),
    [
        (replace(PLAIN, compute_s=0.18), "straggler", "rank 1 takes 0.08 s a step longer than the others, in compute"),
        (replace(PLAIN, data_s=0.08), "straggler", "in data loading"),
        (PLAIN, None, ""),
    ],
)
def test_recorded_windows_of_ranks_name_the_slow_one(late: Parts, name: str | None, why: str) -> None:
    """What the ranks of a group told each other; the others wait for the late one."""
    watching = Loop().watch
    others = replace(PLAIN, communication_s=PLAIN.communication_s + late.own_s - PLAIN.own_s)
    watching._judge((PLAIN, PLAIN, PLAIN))
    watching._judge((others, late, others))
    said = watching.record(20, others, 1 << 30)
    assert said["drift"] == name and said["also"] == [] and why in (said["why"] or "")
    watching.close()


def test_what_all_ranks_wait_for_is_communication_and_what_one_has_is_a_straggler() -> None:
    slow_network = replace(PLAIN, communication_s=0.08)
    [drift] = judge([slow_network, slow_network], [PLAIN, PLAIN], EXPECTED)
    assert drift.name == "communication" and drift.excess_s == pytest.approx(0.06)
    loading = replace(PLAIN, data_s=0.06, communication_s=0.02)
    waiting = replace(PLAIN, communication_s=0.08)
    [drift] = judge([waiting, loading, waiting], None, EXPECTED)
    assert drift.name == "straggler" and "rank 1" in drift.why and "in data loading" in drift.why
    assert judge([PLAIN, PLAIN], [PLAIN, PLAIN], EXPECTED) == ()
    within = replace(PLAIN, compute_s=0.115)
    assert judge([within], None, EXPECTED) == ()
    assert [drift.name for drift in judge([replace(PLAIN, compute_s=0.13)], None, EXPECTED)] == ["compute"]
    assert [drift.name for drift in judge([replace(PLAIN, update_s=0.05)], [PLAIN], None)] == ["update"]


def test_stages_of_a_pipeline_are_no_stragglers_until_one_slows_down() -> None:
    uneven = replace(EXPECTED, uneven=True)
    stages = [PLAIN, replace(PLAIN, compute_s=0.05, communication_s=0.07)]
    assert judge(stages, None, uneven) == judge(stages, stages, uneven) == ()
    slower = [replace(PLAIN, compute_s=0.16), replace(PLAIN, compute_s=0.05, communication_s=0.13)]
    assert judge(slower, stages, uneven)[0].name == "straggler"


def test_memory_that_only_warms_up_is_no_leak() -> None:
    gib, mib = 1 << 30, 1 << 20
    assert memory_drift([gib, gib + 64 * mib, gib + 65 * mib, gib + 65 * mib, gib + 64 * mib], 8) is None
    leak = memory_drift([gib, gib + 32 * mib, gib + 64 * mib, gib + 96 * mib], 8)
    assert leak is not None and "4.00 MiB a step" in leak.why
    assert memory_drift([gib], 8, retries=2) is not None
    assert memory_drift([gib], 8, peak=3 * gib, expected=EXPECTED) is not None
    assert memory_drift([gib], 8, peak=gib, expected=EXPECTED) is None


def test_a_predicted_step_is_divided_without_remainder() -> None:
    plan, batch = replace(PLAN, mesh=Mesh(dp_shard=4, tp=2)), Workload(global_batch_size=8, seq_len=512)
    prediction = gnomon.predict("llama-3.1-8b", "8xh100-sxm", plan, batch)
    expected = expected_of(prediction)
    assert expected.parts.step_s == pytest.approx(prediction.step_s) and expected.parts.communication_s > 0
    assert expected.high >= 1 and not expected.uneven


def test_what_cannot_be_watched_is_said() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="wants the torch.nn.Module"):
        watch(print, optimizer)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="wants the torch.optim.Optimizer"):
        watch(model, None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="says nothing of the model"):
        watch(model, optimizer, Plan())  # type: ignore[arg-type]


def test_the_plan_file_of_one_s_own_module_is_taken(tmp_path: Path) -> None:
    """As the docs say: the plan names the code, and the watch predicts it."""
    path = tmp_path / "own.toml"
    path.write_text(
        'schema = "gnomon.planfile/1"\n'
        'model = "frontend.project:build(idx=int64[batch,seq], targets=int64[batch,seq])"\n'
        'on = "1xcpu-process"\nstack = "gnomon"\n[workload]\nglobal_batch_size = 4\nseq_len = 16\n'
        "[plan]\nschedule = {micro_batch_size = 4}\n"
        'precision = {param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32"}\n'
    )
    model = torch.nn.Linear(2, 2)
    with watch(model, torch.optim.SGD(model.parameters(), 0.1), path, out=None) as watching:
        assert watching.expected is not None and watching.expected.parts.step_s > 0


def test_a_job_file_of_another_program_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predicted on the machine that the loop runs on, as `gnomon.predict` reads the file."""
    monkeypatch.setattr("gnomon.runtime.watch.watch.machine", lambda module: "1x1xh100-sxm")
    path = tmp_path / "sft.yaml"
    path.write_text(
        "model_name_or_path: Qwen/Qwen2.5-0.5B\nstage: sft\ndo_train: true\nfinetuning_type: lora\nlora_rank: 8\n"
        "cutoff_len: 512\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 2\nbf16: true\n"
    )
    model = torch.nn.Linear(2, 2)
    with watch(model, torch.optim.SGD(model.parameters(), 0.1), path, out=None) as watching:
        assert watching.expected is not None
        assert watching.expected.parts.step_s == pytest.approx(gnomon.predict(str(path), "1x1xh100-sxm").step_s)


def _loop(model: nn.Module, batch: Tensor, steps: int = 16, accumulate: int = 1) -> tuple[Watch, str]:
    out = io.StringIO()
    optimizer = torch.optim.AdamW(model.parameters())
    with watch(model, optimizer, out=out) as watching:
        for _ in watching.data(range(steps)):
            for _ in range(accumulate):
                model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return watching, out.getvalue()


def test_without_a_plan_the_loop_is_captured_and_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gnomon.runtime.watch.expect.machine", lambda module: "1xcpu-process")
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 50))
    watching, said = _loop(model, torch.zeros(4, 6, dtype=torch.long), accumulate=3)
    assert said.count("captured, and predicted on") == 1 and "no plan was given" not in said
    assert watching.expected is not None and watching.expected.parts.step_s > 0
    assert watching._seen is None, "the batch is kept no longer than it is needed"


@pytest.mark.parametrize("machine", ["not calibrated", "nameless"])
def test_without_a_plan_it_is_said_why_nothing_more_is_known(
    machine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if machine == "nameless":
        monkeypatch.setattr("gnomon.runtime.watch.expect.machine", lambda module: "1xno-such-device")
    else:
        monkeypatch.setenv("GNOMON_HOME", str(tmp_path))
    watching, said = _loop(nn.Linear(2, 2), torch.ones(1, 2))
    why = "no-such-device" if machine == "nameless" else "run gnomon calibrate"
    assert said.count("no plan was given") == 1 and why in said
    assert watching.expected is None


SCRIPT = """
import sys, torch
from torch import nn
if __name__ == "__main__":
    discriminator, model = nn.Linear(4, 4), nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(int(sys.argv[1])):
        x = torch.randint(0, 10, (2, 3))
        discriminator(torch.ones(1, 4))
        nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_script_is_watched_without_an_edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, records = tmp_path / "train.py", tmp_path / "steps.jsonl"
    script.write_text(SCRIPT)
    monkeypatch.setattr("sys.argv", ["pytest"])
    monkeypatch.setattr("sys.path", ["", *sys.path])
    assert script_main(["--records", str(records), str(script), "14"]) == 0
    steps = [json.loads(line)["step"] for line in records.read_text().splitlines()]
    assert steps == list(range(2, 14)), "from the second update that is seen, which is the script's third"
    assert script_main([str(tmp_path / "missing.py")]) == 2
