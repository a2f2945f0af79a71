"""Logical workers on processes that come and go: how soon a kill -9 is noticed and made good; what taking turns costs.

    python benchmarks/faults/elastic.py               # 20 kills and 4 pairs of runs; results/elastic.md
    python benchmarks/faults/elastic.py --kills 2 --pairs 1
    python benchmarks/faults/elastic.py --kills 0 --pairs 0 --kernels 5    # determinism D2

Kills: a small llama as four logical workers on three processes. One process is killed at a time that nobody chose; the
others must go on in the same processes. "noticed" is from the kill to the last survivor's error, "going" until all
train again with its workers, by the wall clock of one machine. Equal: every loss is, bit by bit, that of one process
that nobody killed. Turns: one process with four logical workers of one microbatch each beside one process that runs the
same four microbatches as one rank, in CPU seconds of the process a step, interleaved. The difference is the switch:
each worker's gradient is parked and added to another. Kernels: steps of one process with this processor's own kernels,
with torch's for AVX2 as an older processor has them, and with those of D2, in CPU seconds, interleaved; and their
losses.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import threading
import time
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from statistics import median

import torch

from gnomon.methods.easyscale import Observation, place_workers
from gnomon.models.llama import LlamaConfig, llama
from gnomon.plans import Mesh, Plan, Precision, Schedule, Workload
from gnomon.runtime import Executor, Source, TrainingJob
from gnomon.runtime.launch.logical_workers import LogicalWorkers
from gnomon.runtime.launch.run import run
from gnomon.runtime.launch.train import corpus_of
from gnomon.runtime.processes import instruction_sets
from gnomon.runtime.processes.launch import launch

FP32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")
SMALL = LlamaConfig(
    name="bytes", num_layers=2, hidden_size=32, num_heads=2, num_kv_heads=2, head_dim=16, ffn_size=64, vocab_size=256
)
LARGE = replace(SMALL, num_layers=4, hidden_size=256, num_heads=4, num_kv_heads=4, head_dim=64, ffn_size=1024)
WORKERS = Plan(mesh=Mesh(dp_replicate=4), schedule=Schedule(num_microbatches=1), precision=FP32)
RANK = Plan(schedule=Schedule(num_microbatches=4), precision=FP32)
STEPS = 3


def job(data: Path, folder: Path) -> TrainingJob:
    plan = place_workers(WORKERS, Observation(processes=3))
    work = Workload(global_batch_size=8, seq_len=32)
    source = Source(path=data, cache=data.parent / "tokens")
    return TrainingJob(
        graph=llama(SMALL), plan=plan, workload=work, steps=10**6, data=source, quiet=True, checkpoints=folder
    )


def losses(given: TrainingJob) -> list[float]:
    """The loss of each step in one process with all workers."""
    workers = LogicalWorkers(given.graph, given.plan, given.workload, seed=given.seed, settings=given.settings)
    workers.place((0,) * 4)
    corpus = corpus_of(given)
    steps = range(1, given.steps + 1)
    batches = (corpus.batch(step, seed=given.seed, sequences=8, seq_len=32) for step in steps)
    return [workers.total_loss(workers.step(batch)) for batch in batches]


def changes(folder: Path) -> list[dict[str, float]]:
    path = folder / ".job" / "state.json"
    made = json.loads(path.read_text())["changes"] if path.exists() else []
    return made if made and made[-1]["going_at"] is not None else made[:-1]


def kill(number: int, given: TrainingJob) -> tuple[float, float, list[float]]:
    """(noticed after, going after, losses) of one kill."""
    chance, at = random.Random(number), [0.0]
    assert given.checkpoints is not None
    folder = given.checkpoints

    def act() -> None:
        while not changes(folder):
            time.sleep(0.01)
        time.sleep(chance.random())
        name = f"gnomon rank {chance.randrange(3)}"
        pid = next(process.pid for process in active_children() if process.name == name)
        assert pid is not None
        at[0] = time.time()
        os.kill(pid, signal.SIGKILL)
        while len(changes(folder)) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=act)
    thread.start()
    outcome = run(given)
    thread.join()
    last = changes(folder)[-1]
    return last["noticed_at"] - at[0], last["going_at"] - at[0], [record.loss for record in outcome.records]


def turns(pairs: int) -> list[float]:
    """Ratios of CPU seconds a step: four logical workers to one rank with their microbatches."""
    graph, work = llama(LARGE), Workload(global_batch_size=16, seq_len=128)
    workers, rank = LogicalWorkers(graph, WORKERS, work), Executor(graph, RANK, work)
    workers.place((0,) * 4)
    batch = torch.randint(0, 256, (16, 129), generator=torch.Generator().manual_seed(0))

    def seconds(executor: Executor) -> float:
        began = time.process_time()
        for _ in range(STEPS):
            executor.step(batch)
        return (time.process_time() - began) / STEPS

    for executor in (workers, rank):
        executor.step(batch)
    return [seconds(workers) / seconds(rank) for _ in range(pairs)]


def with_kernels(kind: str) -> tuple[float, list[float]]:
    """(CPU seconds a step, losses) of a process with these kernels: `own`, `avx2`, or `D2`."""
    if kind == "D2":
        instruction_sets.compute_with(instruction_sets.MOST)
    elif kind != "own":
        os.environ[instruction_sets.CAPABILITY] = kind
        os.environ["ONEDNN_MAX_CPU_ISA"] = kind.upper()
    workers = LogicalWorkers(llama(LARGE), WORKERS, Workload(global_batch_size=16, seq_len=128))
    workers.place((0,) * 4)
    batch = torch.randint(0, 256, (16, 129), generator=torch.Generator().manual_seed(0))
    losses, seconds = [float(workers.step(batch).loss)], []
    for _ in range(STEPS):
        began = time.process_time()
        losses.append(float(workers.step(batch).loss))
        seconds.append(time.process_time() - began)
    return median(seconds), losses


def kernels(rounds: int) -> None:
    """Prints what determinism D2 costs."""
    told = [{kind: launch(with_kernels, 1, kind)[0] for kind in ("own", "avx2", "D2")} for _ in range(rounds)]
    for kind in ("avx2", "D2"):
        ratios = [one[kind][0] / one["own"][0] for one in told]
        shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"CPU seconds a step with {kind} kernels to those with own: median {median(ratios):.2f} of {shown}")
    for kind in ("own", "avx2", "D2"):
        print(f"losses with {kind} kernels: {', '.join(map(repr, told[0][kind][1]))}")
        assert all(one[kind][1] == told[0][kind][1] for one in told), "another process, other bits"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--kernels", type=int, default=3)
    options = parser.parse_args()
    if options.kills:
        kills(options.kills)
    if options.pairs:
        ratios = launch(turns, 1, options.pairs)[0]
        shown = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"\nCPU seconds of four logical workers to those of one rank: median {median(ratios):.3f} of {shown}")
    if options.kernels:
        kernels(options.kernels)


def kills(count: int) -> None:
    """Prints how soon kills are noticed and made good."""
    noticed, going, equal = [], [], 0
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "text"
        data.mkdir()
        for i in range(60):
            (data / f"{i}.txt").write_text(f"the loss goes down, line {i % 7} of the text. " * 40)
        collected = [kill(number, job(data, Path(name) / f"{number}")) for number in range(count)]
        most = replace(job(data, Path(name) / "x"), steps=max(len(seen) for _, _, seen in collected), checkpoints=None)
        undisturbed = launch(losses, 1, most)[0]
    for one, other, seen in collected:
        noticed.append(one)
        going.append(other)
        equal += seen == undisturbed[: len(seen)]
    print("| kills | noticed, median | worst | all train again, median | worst | equal |\n|---|---|---|---|---|---|")
    print(
        f"| {len(collected)} | {median(noticed) * 1e3:.0f} ms | {max(noticed) * 1e3:.0f} ms "
        f"| {median(going) * 1e3:.0f} ms "
        f"| {max(going) * 1e3:.0f} ms | {equal} |"
    )


if __name__ == "__main__":
    main()
