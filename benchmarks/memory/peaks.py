"""Predicted against counted peak memory: `python benchmarks/memory/peaks.py`.

Each job is a small model under a plan, on real processes of this machine. A `LiveBytes` in each counts every tensor
from the op that makes it until it is freed, from before the model exists; the figure is the most in the third step,
however busy the machine is. Beside it what `gnomon predict` says that tensors take on that rank, without the
allocator's rounding and libraries' workspaces. Where something is offloaded it is what device and host hold at the
same time (`prediction.together`), which on a CPU are one memory. Writes
results/peaks.md. `--only` picks jobs by a word. Left out: what kernels allocate inside, and GPUs
(`runtime/on_gpu.py`, `runtime/offload_on_gpu.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import patch

import torch

import gnomon
from gnomon.hardware import Cluster, parse_cluster
from gnomon.plans import Plan, PlanFile
from gnomon.prediction import host_memory, together
from gnomon.request.runnable import read_runnable_model
from gnomon.runtime.parameters.files import ParameterFile
from gnomon.runtime.processes.launch import launch
from gnomon.runtime.watch.layer_bytes import LiveBytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runtime"))
from how_right import CONFIGS, METHOD_MODELS, WORK, methods, parallel_methods, plans  # noqa: E402

RESULTS = Path(__file__).resolve().parents[1] / "results" / "peaks.md"
MIB = 2**20
LIMIT = 0.05


def jobs() -> Iterator[tuple[str, str, Plan]]:
    """(model, name of the plan, plan)."""
    for model in CONFIGS:
        for name, plan in plans():
            yield model, name, plan
    for model in METHOD_MODELS:
        for name, plan in (*methods(), *parallel_methods()):
            yield model, name, plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The rank of a job whose prediction is furthest off."""

    model: str
    plan: str
    rank: int
    predicted: float
    """Bytes."""
    counted: int
    host: float
    """Bytes on the host at most."""

    @property
    def off(self) -> float:
        return self.predicted / self.counted - 1


def count(path: str, plan: Plan) -> int:
    """In a rank: the most bytes that its tensors took in the third step."""
    graph, live = read_runnable_model(path)[0], LiveBytes(torch.device("cpu"))
    file = PlanFile(model=path, on=f"local:{plan.world_size}", stack="gnomon", workload=WORK, plan=plan)
    ids = torch.randint(0, 256, (WORK.global_batch_size, WORK.seq_len + 1))
    with live, read_beside(live), gnomon.prepare(graph, file, device="cpu") as job:
        job.step(ids)
        job.step(ids)
        live.again()
        job.step(ids)
        return live.most


@contextmanager
def read_beside(live: LiveBytes) -> Iterator[None]:
    """Parameters that a thread reads from a disk count too."""
    read = ParameterFile.read

    def counted(file: ParameterFile) -> torch.Tensor:
        value = read(file)
        live.add(value)
        return value

    with patch.object(ParameterFile, "read", counted):
        yield


def row(model: str, name: str, plan: Plan, folder: Path) -> Row:
    """One job."""
    path = folder / f"{model}.json"
    path.write_text(json.dumps(CONFIGS[model]))
    graph = read_runnable_model(str(path))[0]
    guess = gnomon.predict(graph, machine(plan.world_size), plan, WORK, "gnomon")
    counted = launch(count, plan.world_size, str(path), plan)
    host = host_memory(guess).bytes / plan.world_size
    rows = []
    for memory, tensors in zip(guess.memory, together(guess), strict=True):
        rank = memory.ranks[0]
        rows.append(Row(model=model, plan=name, rank=rank, predicted=tensors, counted=counted[rank], host=host))
    return max(rows, key=lambda one: abs(one.off))


def machine(processes: int) -> Cluster:
    """This one, with a disk of some speed, on which no byte depends."""
    cluster = parse_cluster(f"local:{processes}")
    (group,) = cluster.groups
    node = replace(group.node, disk_read_bytes_per_s=1e9, disk_write_bytes_per_s=1e9)
    return replace(cluster, groups=(replace(group, node=node),))


def main() -> int:
    """Counts, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a word of `model plan`, as in 'gpt2' or 'zero 3'")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows, refused = list[Row](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for model, name, plan in jobs():
            if options.only not in f"{model} {name}":
                continue
            try:
                rows.append(row(model, name, plan, Path(folder)))
            except gnomon.errors.GnomonError as error:
                refused.append(f"{model}, {name}: {error}")
                print(refused[-1], file=sys.stderr, flush=True)
                continue
            last = rows[-1]
            print(f"{model}, {name}: {last.predicted / MIB:.1f} MiB predicted, {last.counted / MIB:.1f} counted "
                  f"({last.off:+.1%})", flush=True)  # fmt: skip
    options.output.write_text("\n".join(lines(rows, refused)) + "\n")
    return 0


def lines(rows: list[Row], refused: list[str]) -> Iterator[str]:
    """The page."""
    off = sorted(abs(one.off) for one in rows)
    yield "# Predicted and counted peak memory"
    yield ""
    yield (
        f"`python benchmarks/memory/peaks.py`, {datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}. fp32, batches "
        f"of {WORK.global_batch_size} sequences of {WORK.seq_len} tokens. MiB of tensors on the rank that is furthest "
        "off, in the third step. Where something is offloaded, device and host are one memory, and predicted is what "
        "they hold at the same time; `host` is the most of that alone."
    )
    yield ""
    if off:
        yield (
            f"{len(rows)} jobs: {off[len(off) // 2]:.1%} off in the median, {off[-1]:.1%} at worst; "
            f"{sum(one > LIMIT for one in off)} by more than {LIMIT:.0%}."
        )
    yield ""
    yield "| model | plan | rank | MiB predicted | host | counted | off |"
    yield "|---|---|---|---|---|---|---|"
    for one in rows:
        host = f"{one.host / MIB:.1f}" if one.host else ""
        yield (
            f"| {one.model} | {one.plan} | {one.rank} | {one.predicted / MIB:.1f} | {host} | {one.counted / MIB:.1f} | "
            f"{one.off:+.1%} |"
        )
    for why in refused:
        yield f"\nNot run: {why}"


if __name__ == "__main__":
    sys.exit(main())
