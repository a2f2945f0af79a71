"""Products with sparse weights beside torch's and beside dense ones in the same precision; the choice among kernels.

    python benchmarks/lowbit/sparse.py [--sizes 4096x4096] [--rows 1,8,32,128] [--rounds 5] [--minutes 4.5]
        [--no-grid] [--write]

One thread; milliseconds of CPU of a call, medians with the least and the most beside, in turn in one process; for each
goal the median of the ratios within a round. The bound is max(bytes / bandwidth, operations / peak) with what
`kernels.py` says of the machine. The grid: what was chosen beside the fastest of all kernels, over shapes, shares that
are kept and rows, and the share from which on the whole matrix is faster, predicted and measured. In portions, as
`kernels.py` has them: the same command goes on.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import warnings
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from kernels import BYTES_PER_S, OPS_PER_S, Portions, measured, portion
from torch.nn import functional as F

from gnomon.compiler.kernels import stored, stored_choice, stored_sparse
from gnomon.compiler.machine import this_machine
from gnomon.compiler.tiles.tile_cost import rates
from gnomon.storage.names import storage_of
from gnomon.storage.sparse import Sparse
from gnomon.storage.unstructured import Unstructured

RESULT = Path(__file__).parents[1] / "results" / "lowbit_sparse.md"
PEAK = {"fp32": 116e9, **OPS_PER_S}
OURS = (
    "fp32", "bf16", "int8", "int4-g64", "2:4", "4:16", "2:4-bf16", "4:16-bf16", "2:4-int8", "4:16-int8", "0.9",
    "0.9-int8", "block:16x16:0.9",
)  # fmt: skip
GOALS = (
    *((name, rows, "dense", 2.0) for name in OURS if name[:3] in ("2:4", "4:1") for rows in (1, 8)),
    ("0.9", 1, "torch CSR (F.linear)", 4.0),
    ("0.9", 8, "torch CSR (F.linear)", 4.0),
    ("0.9", 1, "torch CSR @ x", 4.0),
    ("0.9", 8, "torch CSR @ x", 4.0),
    ("0.9-int8", 1, "int4-g64", 1.0),
    ("block:16x16:0.9", 1, "torch BSR", 2.0),
    ("block:16x16:0.9", 8, "torch BSR", 2.0),
    ("block:16x16:0.9", 128, "torch BSR", 2.0),
)  # fmt: skip
"""(ours, rows, peer, peer's time over ours); dense: torch's and ours in the same precision."""
GRID = (("bf16", (2048, 2048)), ("int8", (4096, 1024)), ("fp32", (1024, 2048)))
SHARES, GRID_ROWS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9), (1, 8)
Call = Callable[[torch.Tensor], Any]


def value_of(name: str) -> str:
    storage = storage_of(name)
    return storage.value if isinstance(storage, Sparse) else name


def kept_of(weight: torch.Tensor) -> dict[str, tuple[Any, Any]]:
    """(storage, arrays) of ours by name. Of any mask the largest are kept, by a threshold."""
    out: dict[str, tuple[Any, Any]] = {}
    for name in OURS:
        storage: Any = storage_of(name)
        if isinstance(storage, Unstructured):
            least = float(weight.abs().flatten()[:: max(1, weight.numel() >> 20)].quantile(1 - storage.kept))
            storage, mask = storage.of_zeros(np.where(weight.abs().numpy() >= least, weight.numpy(), np.float32(0)))
            out[name] = storage, storage.of_mask(weight.numpy(), mask)
        else:
            out[name] = storage, storage.narrow(weight.numpy())
    return out


def calls_of(
    weight: torch.Tensor, kept: dict[str, tuple[Any, Any]], rows: int
) -> tuple[dict[str, Call], dict[str, Any]]:
    """(calls by name, ours packed)."""
    shape = (weight.shape[0], weight.shape[1])
    calls: dict[str, Call] = {}
    packed: dict[str, Any] = {}
    for name in OURS:
        how: Any = name if name in ("fp32", "bf16") else "int8"
        packed[name] = one = stored.repack(kept[name][1], kept[name][0], shape, how, rows)
        calls[name] = partial(lambda one, x: stored.linear(x, one), one)
    half = weight.bfloat16()
    calls["torch fp32"] = lambda x: F.linear(x, weight)
    calls["torch bf16"] = lambda x: F.linear(x.bfloat16(), half)
    torch.backends.quantized.engine = "fbgemm"
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight.clone()
    calls["torch int8"] = torch.ao.quantization.quantize_dynamic(
        torch.nn.Sequential(layer), {torch.nn.Linear}, dtype=torch.qint8
    )
    for kind, name in (("CSR", "0.9"), ("BSR", "block:16x16:0.9")):
        storage, arrays = kept[name]
        wide = torch.from_numpy(storage.widen(arrays, shape))
        made = wide.to_sparse_csr() if kind == "CSR" else wide.to_sparse_bsr((16, 16))
        calls["torch CSR (F.linear)" if kind == "CSR" else "torch BSR"] = partial(
            lambda made, x: F.linear(x, made), made
        )
        if kind == "CSR":
            calls["torch CSR @ x"] = partial(lambda made, x: (made @ x.t()).t(), made)
    return calls, packed


def bound_ms(name: str, n: int, k: int, m: int) -> float:
    storage = storage_of(name)
    share = stored_choice.density_of(storage) if isinstance(storage, Sparse) else 1.0
    peak = PEAK.get(value_of(name), PEAK["int8"])
    return 1e3 * max(storage.bytes((n, k)) / BYTES_PER_S, 2 * n * k * m * share / peak)


def measure_table(size: str, rows: list[int], rounds: int, portions: Portions) -> bool:
    """Measures what is missing of a size; False where the time was over before."""
    n, k = (int(one) for one in size.split("x"))
    weight, kept = torch.randn(n, k, generator=torch.Generator().manual_seed(0)) * 0.02, None
    for m in rows:
        if portions.of(portion(size, m)) is not None:
            continue
        if portions.is_over:
            return False
        kept = kept or kept_of(weight)
        calls, packed = calls_of(weight, kept, m)
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(m))
        took = measured({name: partial(call, x) for name, call in calls.items()}, rounds, 0.02)
        taken = {name: one.choice.form for name, one in packed.items() if one.choice is not None}
        portions.keep(portion(size, m), {"took": took, "taken": taken})
    return True


def table(size: str, rows: list[int], portions: Portions) -> list[str]:
    n, k = (int(one) for one in size.split("x"))
    found: dict[tuple[str, int], list[float]] = {}
    taken: dict[tuple[str, int], str] = {}
    lines: list[str] = []
    for m in rows:
        one = portions.of(portion(size, m))
        found |= {(name, m): times for name, times in one["took"].items()}
        taken |= {(name, m): kind for name, kind in one["taken"].items()}
    lines += [f"\n## {n} x {k}\n", f"| | {' | '.join(f'{m} rows' for m in rows)} |", "|---|" + "---|" * len(rows)]
    for name in dict.fromkeys(name for name, _ in found):
        cells = []
        for m in rows:
            took = found[name, m]
            text = f"{median(took):.2f} ({min(took):.2f}-{max(took):.2f})"
            if name in OURS:
                least = bound_ms(name, n, k, m)
                text += f", {median(took) / least:.1f} times {least:.2f}"
            cells.append(text + (f", {taken[name, m]}" if (name, m) in taken else ""))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["\n| | rows | beside | beside / ours | goal | |", "|---|---|---|---|---|---|"]
    for name, m, peer, goal in GOALS:
        for other in (f"torch {value_of(name)}", value_of(name)) if peer == "dense" else (peer,):
            if m in rows:
                ratio = median(b / a for a, b in zip(found[name, m], found[other, m], strict=True))
                met = "met" if ratio >= goal else "missed"
                lines.append(
                    f"| {name} | {m} | {other}{' (ours)' if other in OURS else ''} | {ratio:.2f} | {goal} | {met} |"
                )
    return lines


def measure_grid(rounds: int, portions: Portions) -> bool:
    """Shares of one precision and one number of rows at a time; as `measure_table`."""
    for value, shape in GRID:
        dense = torch.randn(shape, generator=torch.Generator().manual_seed(1)).numpy()
        where = np.random.default_rng(2).random(shape)
        for rows in GRID_ROWS:
            if portions.of(f"grid {value} {rows}") is not None:
                continue
            if portions.is_over:
                return False
            portions.keep(f"grid {value} {rows}", [
                _case(value, shape, rows, dense, where < share, rounds) for share in SHARES
            ])  # fmt: skip
    return True


def _case(value: str, shape: tuple[int, int], rows: int, dense: Any, mask: Any, rounds: int) -> dict[str, Any]:
    """What was chosen and predicted, and the least milliseconds of each kernel, measured after the choice."""
    storage = storage_of(f"0.9{'' if value == 'fp32' else f'-{value}'}")
    assert isinstance(storage, Sparse)
    storage, mask = storage.of_zeros(np.where(mask, dense, np.float32(0)))
    arrays = storage.of_mask(dense, mask)
    choice: Any = stored.repack(arrays, storage, shape, rows=rows).choice
    kinds = (*stored_sparse.kinds_of(storage, shape), "dense")
    every: Any = {kind: stored.as_kind(arrays, storage, shape, kind, rows) for kind in kinds}
    x = torch.randn(rows, shape[1])
    took = measured({kind: partial(stored.linear, x, one) for kind, one in every.items()}, rounds, 0.01)
    least = {kind: min(times) for kind, times in took.items()}
    return {"taken": choice.form, "predicted": choice.predicted[choice.form], "least": least}


def grid(portions: Portions) -> list[str]:
    """The choice, over shapes, shares and rows; and where the whole matrix becomes faster."""
    lines = [
        "\n## What is chosen\n",
        "`chosen`: fastest / chosen, in milliseconds of CPU measured again after the choice.\n",
        "| | shape | rows | kept | taken | predicted ms | measured ms (all) | chosen |",
        "|---|---|---|---|---|---|---|---|",
    ]
    scores, crossings = [], []
    for value, shape in GRID:
        for rows in GRID_ROWS:
            curve: list[tuple[float, float, float]] = []
            for share, case in zip(SHARES, portions.of(f"grid {value} {rows}"), strict=True):
                least = case["least"]
                score = min(least.values()) / least[case["taken"]]
                scores.append(score)
                curve.append((share, min(v for kind, v in least.items() if kind != "dense"), least["dense"]))
                lines.append(
                    f"| {value} | {shape[0]} x {shape[1]} | {rows} | {share:.0%} | {case['taken']} | "
                    f"{1e3 * case['predicted']:.3f} | "
                    f"{', '.join(f'{one} {least[one]:.3f}' for one in sorted(least, key=least.__getitem__))} | "
                    f"{score:.2f} |"
                )
            crossings.append((value, shape, rows, _predicted_crossing(value, shape, rows), _crossing(curve)))
    below = sum(score < 0.98 for score in scores)
    lines += [
        f"\n{len(scores)} cases: {len(scores) - below} at 0.98 of the fastest or better, the worst at "
        f"{min(scores):.2f}.\n",
        "| | shape | rows | whole is faster from (predicted) | measured | points apart |",
        "|---|---|---|---|---|---|",
    ]
    for value, shape, rows, said, saw in crossings:
        lines.append(
            f"| {value} | {shape[0]} x {shape[1]} | {rows} | {said:.0%} | {saw:.0%} | {100 * abs(said - saw):.0f} |"
        )
    return lines


def _crossing(curve: list[tuple[float, float, float]]) -> float:
    """The share at which the best sparse kernel takes as long as the whole, between those that were measured."""
    before = curve[0]
    for point in curve[1:]:
        if point[1] > point[2]:
            low, high = before[1] / before[2], point[1] / point[2]
            return before[0] + (point[0] - before[0]) * min(1.0, max(0.0, (1 - low) / (high - low)))
        before = point
    return 1.0


def _predicted_crossing(value: str, shape: tuple[int, int], rows: int) -> float:
    for share in np.arange(0.05, 1.0, 0.01):
        storage = storage_of(f"{1 - share:.2f}"[:4] + ("" if value == "fp32" else f"-{value}"))
        assert isinstance(storage, Sparse)
        said = stored_choice.predicted(storage, shape, rows, rates(), this_machine())
        if min(said, key=lambda kind: said[kind]) == "dense":
            return float(share)
    return 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="4096x4096,14336x4096", help="outputs x inputs")
    parser.add_argument("--rows", default="1,8,32,128")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=4.5, help="after which no other portion is begun")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "gnomon" / "lowbit-peers")
    parser.add_argument("--no-grid", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"to {RESULT.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Sparse")
    lines = [
        "# Products with sparse weights\n",
        f"{date.today()}, `python {' '.join(['benchmarks/lowbit/sparse.py', *sys.argv[1:]])}`, {this_machine().model} "
        f"({platform.machine()}, {this_machine().isa.name}), one thread, torch {torch.__version__}, load average "
        f"{os.getloadavg()[0]:.1f}. Milliseconds of CPU of a call: median (least-most), of ours how many times the "
        "bound, and the kernel that was taken.",
    ]
    portions = Portions(options.folder, Path(__file__), f"{options.rounds} rounds", options.minutes)
    sizes, rows = options.sizes.split(","), [int(one) for one in options.rows.split(",")]
    with torch.no_grad():
        done = all(measure_table(size, rows, options.rounds, portions) for size in sizes)
        done = done and (options.no_grid or measure_grid(options.rounds, portions))
    if not done:
        raise SystemExit(f"{len(portions.found)} portions are measured; the same command goes on")
    for size in sizes:
        lines += table(size, rows, portions)
    if not options.no_grid:
        lines += grid(portions)
    print("\n".join(lines))
    if options.write:
        RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
