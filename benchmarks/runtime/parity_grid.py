"""Plans of several axes over several architectures against the plain model: `python benchmarks/runtime/parity_grid.py`.

Each case is a model in small under a plan on 1, 2 or 4 processes; what `gnomon parity` compares (every activation,
gradient, loss, gradient norm and updated parameter over three steps in fp64, to 1e-9) is compared. Prints one line a
case and writes results/runtime_parity.md. Exits with 1 where anything differs. Left out: speed, GPUs, other dtypes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from platform import python_version
from traceback import format_exc

import torch
import torch.distributed as dist

from gnomon.errors import GnomonError
from gnomon.models.presets import model
from gnomon.models.tiny import tiny
from gnomon.plans import Layout, Mesh, Optimizer, Plan, Saved, Schedule, Workload
from gnomon.runtime.checks.parity import FP64, Small, compare
from gnomon.runtime.processes.launch import launch

RESULTS = Path(__file__).resolve().parents[1] / "results" / "runtime_parity.md"
DENSE = ("llama-3.1-8b", "qwen3-8b", "gemma-2-9b", "gpt2", "mistral-7b")
MIXED = ("mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b")
SP = Layout(sequence_parallel=True)
MESHES = {
    1: (Mesh(),),
    2: (
        Mesh(pp=2), Mesh(dp_replicate=2), Mesh(dp_shard=2), Mesh(tp=2), Mesh(cp=2),
        Mesh(dp_shard=2, ep=2), Mesh(cp=2, ep=2), Mesh(tp=2, ep=2), Mesh(dp_shard=2, etp=2),
    ),
    4: (
        Mesh(pp=2, dp_shard=2), Mesh(pp=2, tp=2), Mesh(pp=2, cp=2), Mesh(dp_shard=2, tp=2), Mesh(dp_shard=2, cp=2),
        Mesh(cp=2, tp=2), Mesh(dp_replicate=2, dp_shard=2), Mesh(cp=4), Mesh(dp_shard=2, cp=2, ep=4),
        Mesh(cp=2, tp=2, ep=2), Mesh(pp=2, dp_shard=2, ep=2), Mesh(dp_shard=2, tp=2, ep=2, etp=2),
        Mesh(dp_shard=4, ep=2),
    ),
}  # fmt: skip
"""By number of processes; expert axes are for mixtures only."""
SCHEDULES = ("one_f_one_b", "zero_bubble_h1", "gpipe")
CONTEXTS = ("ring", "all_gather", "ulysses")


def cases() -> Iterator[tuple[str, Small]]:
    """(name, job) of each: every mesh with three models of each family; schedule, ZeRO stage, attention and
    recomputation go round."""
    turn = 0
    for meshes in MESHES.values():
        for mesh in meshes:
            models = MIXED if mesh.ep * mesh.etp > 1 else DENSE
            for name in (models * 2)[turn % len(models) :][:3]:
                turn += 1
                zero = turn % 4 if mesh.dp_shard * mesh.cp > 1 else 0
                layout = Layout(sequence_parallel=mesh.tp > 1, context=CONTEXTS[turn % 3])  # type: ignore[arg-type]
                if mesh.tp * mesh.cp > 1 and name == "deepseek-v3":
                    layout = Layout(sequence_parallel=mesh.tp > 1, context="ring")
                plan = Plan(
                    mesh=mesh,
                    schedule=Schedule(name=SCHEDULES[turn % 3], num_microbatches=2),
                    layout=layout,
                    optimizer=Optimizer(zero=zero),  # type: ignore[arg-type]
                    saved=Saved(preset=("none", "selective", "full")[turn % 3]),  # type: ignore[arg-type]
                    precision=FP64,
                )
                ways = mesh.tp * (mesh.cp if layout.context == "ulysses" else 1)
                graph = tiny(model(name), tp=ways, ep=mesh.ep, layers=2)
                work = Workload(global_batch_size=2 * max(mesh.data_ranks, 1), seq_len=16)
                text = f"{name}, {mesh.describe()}, {plan.schedule.name}, zero {zero}, {plan.saved.preset} recompute"
                yield (
                    text + (f", {layout.context}" if mesh.cp > 1 else ""),
                    Small(graph=graph, plan=plan, workload=work),
                )


def run(world: int, most: int) -> list[tuple[str, str, float, int]]:
    """(case, what is wrong, largest difference, tensors compared) of all cases of so many processes."""
    collected = []
    for name, job in list(case for case in cases() if case[1].plan.world_size == world)[:most]:
        try:
            result = compare(job)
            text = (name, result.first and f"{result.first} is off by {result.off:.1e}", result.largest, result.tensors)
        except GnomonError as error:
            text = (name, f"refused: {error}", 0.0, 0)
        except Exception:
            print(name, format_exc(), flush=True)
            raise
        collected.append(text)
        if dist.get_rank() == 0:
            print(f"{text[1] or 'equal'}: {name} ({text[2]:.0e}, {text[3]} tensors)", flush=True)
    return collected


def main() -> int:
    """Runs and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=1000, help="cases of each number of processes")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    began, rows = time.monotonic(), list[tuple[str, str, float, int]]()
    for world in MESHES:
        rows += launch(run, world, world, options.most)[0]
        write(options.output, rows, time.monotonic() - began)
    return int(any(message and not message.startswith("refused") for _, message, _, _ in rows))


def write(path: Path, rows: list[tuple[str, str, float, int]], seconds: float) -> None:
    """The file, whole after each number of processes."""
    equal = [row for row in rows if not row[1]]
    refused = [row for row in rows if row[1].startswith("refused")]
    wrong = [row for row in rows if row[1] and row not in refused]
    largest = max((row[2] for row in equal), default=0.0)
    lines = [
        "# Plans against the plain model",
        "",
        f"`python benchmarks/runtime/parity_grid.py`, {datetime.now(UTC):%Y-%m-%d}, Python {python_version()}, torch "
        f"{torch.__version__}, CPU and gloo on 2 shared cores, {seconds:.0f} s.",
        "",
        f"{len(rows)} plans: {len(equal)} equal to 1e-9 over three steps in fp64 (largest difference {largest:.1e}, "
        f"{sum(row[3] for row in equal):,} tensors and values), {len(wrong)} wrong, {len(refused)} refused.",
        "",
        "| plan | result | largest difference | compared |",
        "|---|---|---|---|",
        *(f"| {name} | {message or 'equal'} | {off:.1e} | {count} |" for name, message, off, count in rows),
    ]
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
