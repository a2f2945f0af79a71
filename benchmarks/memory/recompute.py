"""Recomputation chosen tensor by tensor against presets in the same memory: `python benchmarks/memory/recompute.py`.

Predicted: models and plans on GPUs; for the peak that each preset takes, the least recomputation within that peak.
Run: a Llama of 34M parameters on this machine, one process of one thread, the plans in turn; CPU-seconds as ratios, and
activations held at their peak, counted row by row. Presets: Megatron-LM's `selective` (inside of attention) and `full`,
and torchtitan's selective by op: attention and every second matmul are kept (torchtitan models/common, `_save_list`).
Writes results/recompute.md. Exits with 1 where a preset is faster in the prediction. `--host` writes
results/recompute_host.md in its place: what tensors on the host gain where copies overlap with compute, predicted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from platform import python_version

from gnomon.graph import Graph
from gnomon.hardware import parse_cluster
from gnomon.models.llama import LlamaConfig, llama
from gnomon.models.presets import graph_of
from gnomon.plans import Layout, Mesh, Optimizer, Plan, Precision, Saved, SavedRule, Schedule, Workload
from gnomon.plans.select import format_layers
from gnomon.prediction import Prediction, predict
from gnomon.search.checkpointing import least_recompute
from gnomon.software import stack

RESULTS = Path(__file__).resolve().parents[1] / "results" / "recompute.md"
HOST = RESULTS.with_name("recompute_host.md")
GIB = 2**30


def by_op(graph: Graph) -> Saved:
    """torchtitan's: the output of attention and of every second matmul is kept, all else recomputed."""
    rules: list[SavedRule] = []
    repeated = [layer for layer in graph.layers() if layer.call.first is not None]
    for block in dict.fromkeys(layer.call.block for layer in repeated):
        ops = graph.block(block).ops
        matmuls = [op.path for op in ops if op.kind in ("linear", "grouped_linear")]
        kept = [op.path for op in ops if op.kind == "attention"]
        names = tuple(name for path in kept for name in (path, f"{path}:*")) + tuple(matmuls[::2])
        for calls in format_layers([layer for layer in repeated if layer.call.block == block]):
            rules += [SavedRule(calls=calls, action="recompute"), SavedRule(calls=calls, tensors=names)]
    return Saved(rules=tuple(rules))


def cases() -> Iterator[tuple[str, Graph, str, Plan, Workload]]:
    """(plan in words, model, cluster, plan, workload)."""
    one = Schedule(name="one_f_one_b", micro_batch_size=1)
    sp = Layout(sequence_parallel=True)
    for model, cluster, seq in (
        ("llama-3.1-8b", "8xa100-sxm-80gb", 8192),
        ("llama-2-13b", "8xa100-sxm-80gb", 4096),
        ("qwen3-8b", "8xh100-sxm", 16384),
        ("gemma-2-9b", "8xh100-sxm", 8192),
        ("mixtral-8x7b", "8xh100-sxm", 4096),
    ):
        graph, work = graph_of(model), Workload(global_batch_size=32, seq_len=seq)
        pipelined = Plan(mesh=Mesh(pp=4, dp_shard=2), schedule=one)
        plans = {
            "ZeRO 3": Plan(mesh=Mesh(dp_shard=8), schedule=one, optimizer=Optimizer(zero=3)),
            "tp 4, ZeRO 1": Plan(mesh=Mesh(dp_shard=2, tp=4), schedule=one, layout=sp, optimizer=Optimizer(zero=1)),
            "pp 4, 1F1B": pipelined,
            "pp 4, zero bubble": replace(pipelined, schedule=replace(one, name="zero_bubble_h1")),
        }
        for name, plan in plans.items():
            yield name, graph, cluster, plan, work


def peak(prediction: Prediction) -> int:
    return max(rank.peak_bytes for rank in prediction.memory)


def predicted() -> tuple[list[str], bool]:
    """Rows of the table, and whether no preset was faster."""
    rows, good = [], True
    for name, graph, cluster, plan, work in cases():
        machines = parse_cluster(cluster)
        for preset, saved in (
            ("selective", Saved(preset="selective")),
            ("by op", by_op(graph)),
            ("full", Saved(preset="full")),
        ):
            made = predict(graph, machines, replace(plan, saved=saved), work)
            began = time.process_time()
            least = least_recompute(made, peak(made))
            seconds = time.process_time() - began
            assert least is not None
            good &= least.prediction.step_s <= made.step_s * 1.0001
            rows.append(
                f"| {graph.name} | {cluster} | {name} | {preset} | {peak(made) / GIB:.1f} | {made.step_s:.2f} | "
                f"{least.prediction.step_s:.2f} | {least.prediction.step_s / made.step_s - 1:+.1%} | {seconds:.1f} |"
            )
            print(rows[-1], flush=True)
    return rows, good


def with_host() -> Iterator[str]:
    """Rows: in a tenth and in half of the memory between recomputing everything and nothing."""
    one = Plan(schedule=Schedule(micro_batch_size=1), optimizer=Optimizer(kind="sgd"))
    for model, cluster, seq in (
        ("llama-3.2-1b", "1xa100-sxm-40gb", 4096),
        ("llama-3.2-1b", "1xa100-sxm-40gb", 16384),
        ("llama-3.2-1b", "1xh100-sxm", 16384),
        ("llama-3.2-1b", "1xgh200-96gb", 16384),
    ):
        graph, machines, work = graph_of(model), parse_cluster(cluster), Workload(global_batch_size=4, seq_len=seq)
        none, full = (
            predict(graph, machines, replace(one, saved=saved), work) for saved in (Saved(), Saved(preset="full"))
        )
        for share in (0.1, 0.5):
            limit = int(peak(full) + share * (peak(none) - peak(full)))
            began = time.process_time()
            found = [least_recompute(none, limit, offload=offload) for offload in (False, True)]
            seconds = time.process_time() - began
            without, there = (least.prediction for least in found if least is not None)
            gain = there.step_s / without.step_s - 1
            yield (
                f"| {graph.name} | {cluster} | {seq} | {share:.0%} | {none.step_s:.3f} | {full.step_s:.3f} | "
                f"{without.step_s:.3f} | {there.step_s:.3f} | {gain:+.1%} | {seconds:.0f} |"
            )


def host_page() -> Iterator[str]:
    yield "# Tensors on the host in place of recomputation"
    yield ""
    yield f"`python benchmarks/memory/recompute.py --host`, {datetime.now(UTC):%Y-%m-%d}, Python {python_version()}."
    yield ""
    yield (
        "Predicted for a program whose copies overlap with compute, in a share of the memory between recomputing "
        "everything (full) and nothing. Batches of 4 sequences. Gnomon's own runtime copies on the computing stream."
    )
    yield ""
    yield "| model | GPU | tokens | memory | nothing s | full s | without the host s | with it s | against | CPU-s |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in with_host():
        print(row, flush=True)
        yield row
    yield ""


def run(steps: int) -> list[str]:
    """Rows of what ran here."""
    import torch

    import gnomon
    from gnomon.runtime.watch.measure import CLASSES, Recorder

    torch.set_num_threads(1)
    graph = llama(
        LlamaConfig(
            name="llama-34m", num_layers=10, hidden_size=512, num_heads=8, num_kv_heads=8, head_dim=64, ffn_size=1408,
            vocab_size=2048,
        )
    )  # fmt: skip
    fp32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")
    base = Plan(schedule=Schedule(name="one_f_one_b", num_microbatches=2), precision=fp32)
    work, ids = Workload(global_batch_size=4, seq_len=256), torch.arange(4 * 257).view(4, 257) * 7 % 2048
    own = stack("gnomon")
    plans = {"nothing recomputed": base}
    for preset, saved in (("by op", by_op(graph)), ("full", Saved(preset="full"))):
        plans[preset] = replace(base, saved=saved)
        made = gnomon.predict(graph, "local:1", plans[preset], work, own)
        least = least_recompute(made, peak(made))
        assert least is not None
        plans[f"integer programme, memory of {preset}"] = least.prediction.plan
    jobs, spent, held = {}, dict[str, list[float]](), dict[str, int]()
    for name, plan in plans.items():
        jobs[name] = gnomon.prepare(graph, plan, workload=work, seed=3)
        jobs[name].step(ids)
        recorder = Recorder(memory=True)
        jobs[name].executor.step(ids, recorder)
        held[name] = max(levels[CLASSES.index("activations")] for _, levels in recorder.levels)
    for _ in range(steps):
        for name, job in jobs.items():
            began = time.process_time()
            job.step(ids)
            spent.setdefault(name, []).append(time.process_time() - began)
    rows, first = [], next(iter(spent))
    for name, seconds in spent.items():
        ratios = [a / b for a, b in zip(seconds, spent[first], strict=True)]
        forecast = gnomon.predict(graph, "local:1", plans[name], work, own)
        activations = forecast.memory[0].by_class["activations"]
        rows.append(
            f"| {name} | {statistics.median(seconds):.3f} | {statistics.median(ratios):.3f} | "
            f"{held[name] / 2**20:.1f} | {activations / 2**20:.1f} |"
        )
        print(rows[-1], flush=True)
    states = [job.state_dict() for job in jobs.values()]
    equal = all(torch.equal(value, state[key]) for state in states[1:] for key, value in states[0].items())
    rows.append("")
    rows.append(
        f"Parameters after {steps + 2} steps are {'the same to the bit' if equal else 'NOT the same'} under all."
    )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=9, help="timed steps of each plan")
    parser.add_argument("--host", action="store_true", help="what tensors on the host gain")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if options.host:
        (options.output or HOST).write_text("\n".join(host_page()))
        return 0
    rows, good = predicted()
    ran = run(options.steps)
    gains = [float(row.split("|")[8].strip().rstrip("%")) for row in rows]
    text = [
        "# Recomputation tensor by tensor against presets",
        "",
        f"`python benchmarks/memory/recompute.py`, {datetime.now(UTC):%Y-%m-%d}, Python {python_version()}.",
        "",
        "Predicted: the least recomputation that fits in the peak that a preset takes. Step against the preset: "
        f"{statistics.median(gains):+.1f} % in the median, {min(gains):+.1f} at best, {max(gains):+.1f} at worst.",
        "",
        "| model | GPUs | plan | preset | peak GiB | its step s | step s | against it | CPU-s of the choice |",
        "|---|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        "Run here, one process of one thread, interleaved: CPU-seconds of a step, their ratio to recomputing nothing, "
        "activations at their peak as counted and as predicted.",
        "",
        "| recomputed | CPU-s | ratio | MiB held | MiB predicted |",
        "|---|---|---|---|---|",
        *ran,
        "",
    ]
    (options.output or RESULTS).write_text("\n".join(text))
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
