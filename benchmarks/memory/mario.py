"""Mario on every schedule that it rewrites: `python benchmarks/memory/mario.py`.

First predicted: step and memory of Llama 3.2 1B over 4 A100 without recomputation, with all of it, and with Mario. Then
run: the small Llama of `peaks.py` on two processes of this machine, the most bytes of tensors on each rank in the third
step, counted op by op however busy the machine is, beside the prediction, and how far ranks are apart. Writes
results/mario.md. `--predicted` leaves the runs out. Left out: measured step times (`runtime/how_right.py --methods`).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import gnomon
from gnomon import orders
from gnomon.plans import Mesh, Pass, Plan, Saved, Schedule, Workload
from gnomon.prediction import together
from gnomon.request.runnable import read_runnable_model
from gnomon.runtime.processes.launch import launch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "runtime")]
from how_right import CONFIGS, FP32, WORK  # noqa: E402
from peaks import MIB, count, machine  # noqa: E402

RESULTS = Path(__file__).resolve().parents[1] / "results" / "mario.md"
GIB = 2**30
SCHEDULES = (
    "one_f_one_b",
    "interleaved_one_f_one_b",
    "zero_bubble_h1",
    "interleaved_zero_bubble",
    "zero_bubble_v",
    "v_half",
    "v_min",
)
LARGE = Workload(global_batch_size=8, seq_len=8192)


def ways(name: str, base: Plan) -> dict[str, Plan]:
    """Without recomputation, with all of it, with Mario."""
    order = orders.find(name)
    virtual = 1 if 1 in order.stages else 2
    schedule = Schedule(name=name, micro_batch_size=1, virtual_stages=virtual, placement=order.placement)
    plain = replace(base, schedule=schedule)
    return {
        "none": plain,
        "full": replace(plain, saved=Saved(preset="full")),
        "mario": replace(plain, schedule=replace(schedule, passes=(Pass(name="mario"),))),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """One plan on two processes, by rank."""

    name: str
    way: str
    predicted: tuple[float, ...]
    counted: tuple[int, ...]


def counts(folder: Path) -> Iterator[Counted]:
    """Of every schedule, without recomputation and with Mario."""
    path = folder / "llama.json"
    path.write_text(json.dumps(CONFIGS["llama"]))
    graph = read_runnable_model(str(path))[0]
    for name in SCHEDULES:
        for way, plan in ways(name, Plan(mesh=Mesh(pp=2), precision=FP32)).items():
            if way == "full":
                continue
            guess = gnomon.predict(graph, machine(2), plan, WORK, "gnomon")
            by_rank = {m.ranks[0]: size for m, size in zip(guess.memory, together(guess), strict=True)}
            counted = launch(count, 2, str(path), plan)
            ranks = sorted(by_rank)
            yield Counted(
                name=name,
                way=way,
                predicted=tuple(by_rank[rank] for rank in ranks),
                counted=tuple(counted[rank] for rank in ranks),
            )
            print(name, way, file=sys.stderr, flush=True)


def lines(rows: list[Counted]) -> Iterator[str]:
    """The page."""
    yield "# Mario on every schedule that it rewrites"
    yield ""
    yield f"`python benchmarks/memory/mario.py`, {datetime.now(UTC):%Y-%m-%d}."
    yield ""
    yield (
        "Predicted: Llama 3.2 1B, pp 4 over 4 A100 80 GB, 8 microbatches of one sequence of 8,192 tokens, Gnomon's "
        "runtime. Steps as a ratio to no recomputation; GiB of the fullest rank, and between it and the least full one."
    )
    yield ""
    yield "| schedule | step | full | Mario | GiB | full | Mario | apart | full | Mario |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    base = Plan(mesh=Mesh(pp=4))
    for name in SCHEDULES:
        guesses = [
            gnomon.predict("llama-3.2-1b", "1x4xa100-sxm-80gb", plan, LARGE, "gnomon")
            for plan in ways(name, base).values()
        ]
        peaks = [[rank.peak_bytes / GIB for rank in guess.memory] for guess in guesses]
        step = guesses[0].step_s
        cells = [f"{step:.2f} s", *(f"{guess.step_s / step:.2f}" for guess in guesses[1:])]
        cells += [f"{max(of):.1f}" for of in peaks] + [f"{max(of) - min(of):.1f}" for of in peaks]
        yield f"| {name} | {' | '.join(cells)} |"
    if not rows:
        return
    yield ""
    yield (
        f"Run: a Llama of 4 layers of 256 in fp32, pp 2 on two processes of this machine, {WORK.global_batch_size} "
        f"microbatches of one sequence of {WORK.seq_len} tokens. MiB of tensors at most on ranks 0 and 1, predicted "
        "and counted, and how far the two are apart."
    )
    yield ""
    yield "| schedule | recomputation | predicted | counted | off at most | apart, predicted | counted |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        off = max(abs(p / c - 1) for p, c in zip(row.predicted, row.counted, strict=True))
        pairs = [" ".join(f"{size / MIB:.1f}" for size in of) for of in (row.predicted, row.counted)]
        apart = [f"{(max(of) - min(of)) / MIB:.1f}" for of in (row.predicted, row.counted)]
        yield f"| {row.name} | {row.way} | {pairs[0]} | {pairs[1]} | {off:.1%} | {apart[0]} | {apart[1]} |"


def main() -> int:
    """Predicts, counts, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predicted", action="store_true", help="without runs")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = "\n".join(lines([] if options.predicted else list(counts(Path(folder)))))
    options.output.write_text(page + "\n")
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
