"""What uneven stages, recomputation by stage and uneven replication gain, and how often their searches miss the best.

    python benchmarks/search/uneven.py [models|memory|random|dapple|equal|paper] …

Prints the tables of results/uneven.md. models: pipelines of a fixed plan, equal stages against the best cut.
memory: the best preset for all layers that fits against recomputation by stage. random: the cut that is found
against predicting every cut, on small random pipelines (tests/search/cuts.py). dapple: the planner against every
cut, number of replicas and place on small cases, and against data parallelism. equal: the planner against pipelines
of equal stages and replicas. paper: the planner on the paper's own measured models
(tests/search/dapple_profiles.py) against its published plans.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from search import cuts, dapple_profiles, test_dapple

from gnomon.errors import GnomonError
from gnomon.hardware import parse_cluster
from gnomon.models.gpt import gpt
from gnomon.models.presets import model
from gnomon.plans import (
    Mesh,
    Optimizer,
    Plan,
    Precision,
    Saved,
    Schedule,
    Workload,
    layer_presets,
    stage_layers,
)
from gnomon.prediction import predict
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.search.stages.cut import Search, equal
from gnomon.search.stages.dapple import Prices, cuts_of, dapple, equal_splits
from gnomon.search.stages.recompute import Least
from gnomon.search.stages.repredict import Trials

UNLIMITED = 10**18

PIPELINES: tuple[tuple[str, str, Mesh, int, int], ...] = (
    ("gpt2", "1x4xh100-sxm", Mesh(pp=4), 32, 1024),
    ("gpt2-xl", "1x8xh100-sxm", Mesh(pp=8), 64, 1024),
    ("llama-3.2-1b", "1x4xh100-sxm", Mesh(pp=4), 32, 4096),
    ("gemma-2-2b", "1x4xh100-sxm", Mesh(pp=4), 32, 4096),
    ("gemma-2-9b", "1x8xh100-sxm", Mesh(pp=4, tp=2), 64, 4096),
    ("gemma-2-27b", "2x8xh100-sxm", Mesh(pp=4, tp=4), 64, 4096),
    ("t5-small", "1x4xh100-sxm", Mesh(pp=4), 32, 512),
    ("flan-t5-base", "1x4xh100-sxm", Mesh(pp=4), 32, 512),
    ("bert-large", "1x4xa100-sxm-80gb", Mesh(pp=4), 64, 512),
    ("qwen2.5-7b", "1x8xh100-sxm", Mesh(pp=4, tp=2), 64, 4096),
    ("llama-3.1-8b", "1x8xh100-sxm", Mesh(pp=8), 64, 4096),
    ("mixtral-8x7b", "4x8xh100-sxm", Mesh(pp=4, dp_shard=8, ep=8), 256, 4096),
    ("deepseek-v3", "32x8xh100-sxm", Mesh(pp=8, dp_shard=32, ep=32), 1024, 4096),
    ("gpt3-175b", "8x8xa100-sxm-80gb", Mesh(pp=8, tp=8), 64, 2048),
)
"""Model, cluster, mesh, global batch, sequence length; microbatches of one sequence."""

SCHEDULES: tuple[tuple[str, int], ...] = (
    ("one_f_one_b", 1), ("zero_bubble_h1", 1), ("interleaved_one_f_one_b", 2), ("zero_bubble_v", 2),
)  # fmt: skip

MEMORY: tuple[tuple[str, str, Mesh, int, int, int, int], ...] = (
    ("gpt3-175b", "64x8xa100-sxm-80gb", Mesh(pp=8, tp=8, dp_shard=8), 512, 2048, 2, 1),
    ("llama-3.1-70b", "8x8xh100-sxm", Mesh(pp=4, tp=4, dp_shard=4), 128, 8192, 1, 1),
    ("llama-3.1-405b", "64x8xh100-sxm", Mesh(pp=16, tp=8, dp_shard=4), 256, 8192, 1, 1),
    ("deepseek-v3", "128x8xh100-sxm", Mesh(pp=16, dp_shard=64, ep=64), 4096, 4096, 1, 1),
    ("llama-3.1-8b", "1x8xh100-sxm", Mesh(pp=4, tp=2), 64, 8192, 4, 1),
    ("gemma-2-9b", "2x8xa100-sxm-40gb", Mesh(pp=4, tp=4), 64, 4096, 2, 1),
)
"""Model, cluster, mesh, global batch, sequence length, sequences of a microbatch, ZeRO stage."""


def work_of(name: str, batch: int, seq: int) -> Workload:
    """The workload; T5's encoder reads as many tokens as its decoder."""
    sizes = (("enc_seq", seq),) if "t5" in name else ()
    return Workload(global_batch_size=batch, seq_len=seq, sizes=sizes)


def models() -> None:
    """Equal stages against the best cut, for each model and schedule."""
    print(
        "| model | pipeline | schedule | equal s | best s | gain % | layers | predicted of all cuts | shown best | s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    gains = []
    for name, on, mesh, batch, seq in PIPELINES:
        graph, cluster, work = model(name), parse_cluster(on), work_of(name, batch, seq)
        for schedule, virtual in SCHEDULES:
            placed = "v" if schedule == "zero_bubble_v" else "loop"
            order = Schedule(name=schedule, micro_batch_size=1, virtual_stages=virtual, placement=placed)  # type: ignore[arg-type]
            try:
                before = predict(graph, cluster, Plan(mesh=mesh, schedule=order, optimizer=Optimizer(zero=1)), work)
            except GnomonError as error:
                print(f"| {name} | {mesh.describe()} | {schedule} | {str(error)[:60]} | | | | | | |")
                continue
            clock = time.process_time()
            trials = Trials(before)
            rows = before.structure.program.num_rows
            search = Search(trials, Least(trials, UNLIMITED, "none"), budget=max(8, min(120, 60_000 // rows)))
            outcome = search.run()
            assert outcome is not None
            gain = 1 - outcome.trial.step_s / before.step_s
            gains.append(gain)
            proven = "yes" if outcome.cuts.proven else "no"
            print(
                f"| {name} | {mesh.describe()} | {schedule} | {before.step_s:.4f} | {outcome.trial.step_s:.4f} | "
                f"{100 * gain:.1f} | {' '.join(map(str, outcome.counts))} | {outcome.cuts.predicted} of "
                f"{outcome.cuts.every:,} | {proven} | {time.process_time() - clock:.1f} |",
                flush=True,
            )
    print(f"\n{len(gains)} pipelines: gain {100 * min(gains):.1f} % at the worst, "
          f"{100 * statistics.median(gains):.1f} % in the median, {100 * max(gains):.1f} % at the best; "
          f"{sum(g < 0 for g in gains)} slower than equal stages")  # fmt: skip


def memory() -> None:
    """One preset for all layers against recomputation by stage."""
    print("| model | plan | best preset that fits | s | by stage s | gain % | layers of each stage recomputed |")
    print("|---|---|---|---|---|---|---|")
    gains = []
    for name, on, mesh, batch, seq, micro, zero in MEMORY:
        graph, cluster, work = model(name), parse_cluster(on), work_of(name, batch, seq)
        limit = int(0.92 * min(g.node.device.memory_bytes for g in cluster.groups))
        collected = {}
        for preset in ("none", "selective", "full"):
            plan = Plan(
                mesh=mesh,
                schedule=Schedule(micro_batch_size=micro),
                optimizer=Optimizer(zero=zero),  # type: ignore[arg-type]
                saved=Saved(preset=preset),  # type: ignore[arg-type]
            )
            collected[preset] = predict(graph, cluster, plan, work)
        fits = {p: entry.step_s for p, entry in collected.items() if max(r.peak_bytes for r in entry.memory) <= limit}
        trials = Trials(collected["none"])
        trial = Least(trials, limit, "stage").fit(equal(len(trials.counted), trials.num_stages))
        told = f"{mesh.describe()}, {micro} x {seq} tokens"
        if trial is None:
            print(f"| {name} | {told} | none | | does not fit | | |")
            continue
        preset = min(fits, key=lambda p: fits[p]) if fits else ""
        gain = 1 - trial.step_s / fits[preset] if fits else float("nan")
        gains += [gain] if fits else []
        presets = layer_presets(trial.plan, graph)
        layers = [sum(presets.get(layer.label) == "full" for layer in part) for part in stage_layers(trial.plan, graph)]
        print(f"| {name} | {told} | {preset or 'none fits'} | {fits[preset] if fits else float('nan'):.3f} | "
              f"{trial.step_s:.3f} | {100 * gain:.1f} | {' '.join(map(str, layers))} |", flush=True)  # fmt: skip
    print(f"\ngain {100 * min(gains):.1f} % at the worst, {100 * statistics.median(gains):.1f} % in the median")


def random_cases(count: int = 200) -> None:
    """The best cut that is found against predicting all."""
    print("| budget | pipelines | shown best | missed | worst miss % | cuts predicted | of |")
    print("|---|---|---|---|---|---|---|")
    for budget in (8, 120):
        misses, proven, wrong, done, total = [], 0, 0, 0, 0
        for seed in range(count):
            case = cuts.pipeline(seed)
            trials = Trials(case.prediction)
            result = Search(trials, Least(trials, UNLIMITED, "none"), budget=budget).run()
            assert result is not None
            every = list(cuts.every_cut(len(trials.counted), trials.num_stages))
            best = min(
                trials.of(cut, trials.recut.plain(cut, case.prediction.plan.saved.preset)).step_s for cut in every
            )
            if result.trial.step_s > best:
                misses.append(result.trial.step_s / best - 1)
                wrong += result.cuts.proven
            proven, done, total = proven + result.cuts.proven, done + result.cuts.predicted, total + len(every)
        assert not wrong, "a cut was said to be the best that is not"
        print(f"| {budget} | {count} | {proven} | {len(misses)} | {100 * max(misses, default=0.0):.2f} | {done} | "
              f"{total} |", flush=True)  # fmt: skip


def planner() -> None:
    """DAPPLE's planner against all plans of small cases, and against data parallelism."""
    print("| cluster | vocabulary | all plans | best of all s | found s | off % | found |")
    print("|---|---|---|---|---|---|---|")
    off = []
    for on in ("2x2xa100-sxm-80gb", "3x1xa100-sxm-80gb", "1x4xh100-sxm", "4x1xv100-sxm-32gb"):
        for vocab in (1024, 32768, 131072):
            graph, cluster = gpt(test_dapple.model(vocab)), parse_cluster(on)
            half = Precision(param="fp16", compute="fp16") if "v100" in on else Precision()
            work, base = Workload(global_batch_size=24, seq_len=512), Plan(precision=half)
            replicas = dapple(graph, cluster, work, base=base, counts=(6,))
            prices = Prices(graph, cluster, work, base, 6, PLAIN_STACK)
            steps = []
            for pieces in test_dapple.every(prices, 4):
                try:
                    steps.append(predict(graph, cluster, prices.plan(pieces), work).step_s)
                except GnomonError:
                    continue
            assert replicas.best is not None
            off.append(replicas.best.step_s / min(steps) - 1)
            print(f"| {on} | {vocab:,} | {len(steps)} | {min(steps):.5f} | {replicas.best.step_s:.5f} | "
                  f"{100 * off[-1]:.2f} | {cuts_of(replicas.best)} |", flush=True)  # fmt: skip
    print(f"\noff {100 * max(off):.2f} % at the worst, {100 * statistics.median(off):.2f} % in the median\n")
    print("| model | cluster | data parallel s | found s | gain % | (layers, replicas) | predicted | s |")
    print("|---|---|---|---|---|---|---|---|")
    for name, on, batch, seq in (("bert-large", "4x1xv100-sxm-32gb", 32, 512), ("gpt2", "4x1xv100-sxm-32gb", 32, 1024),
                                 ("gpt2-xl", "2x2xa100-sxm-40gb", 16, 1024)):  # fmt: skip
        half = Precision(param="fp16", compute="fp16") if "v100" in on else Precision()
        clock = time.process_time()
        replicas = dapple(model(name), parse_cluster(on), work_of(name, batch, seq), base=Plan(precision=half))
        alone = replicas.parallel
        told = "" if alone is None else f"{alone.step_s:.4f}" + ("" if alone.fits else ", does not fit")
        if replicas.best is None:
            print(f"| {name} | {on} | {told} | nothing fits | | | {replicas.predicted} | |")
            continue
        print(f"| {name} | {on} | {told} | {replicas.best.step_s:.4f} | {100 * replicas.gain:.1f} | "
              f"{cuts_of(replicas.best)} | "
              f"{replicas.predicted} | {time.process_time() - clock:.1f} |", flush=True)  # fmt: skip


HEAVY = (
    ("gpt2", "1x4xh100-sxm", 32, 1024), ("llama-3.2-1b", "1x4xh100-sxm", 32, 4096),
    ("gemma-2-2b", "1x4xh100-sxm", 32, 4096), ("gpt2", "4x1xv100-sxm-32gb", 32, 1024),
    ("llama-3.2-1b", "4x1xa100-sxm-80gb", 32, 4096), ("bert-large", "4x1xa100-sxm-80gb", 32, 512),
    ("gemma-2-2b", "2x4xh100-sxm", 64, 4096),
    ("bert-large", "16x8xv100-sxm-16gb", 2048, 128), ("gpt2", "16x8xh100-sxm", 2048, 1024),
    ("llama-3.2-1b", "16x8xh100-sxm", 1024, 2048), ("gemma-2-2b", "16x8xh100-sxm", 1024, 2048),
    ("qwen2.5-7b", "16x8xa100-sxm-80gb", 512, 4096), ("llama-3.1-8b", "16x8xa100-sxm-80gb", 512, 4096),
)  # fmt: skip
"""Model with a heavy head or embedding, cluster, global batch, sequence length."""


def against_equal() -> None:
    """The planner against the best pipeline of equal layers and replicas, with 4, 8 or 16 microbatches."""
    print("| model | cluster | best equal split s | stages, microbatches | found s | gain % | (layers, replicas) |")
    print("|---|---|---|---|---|---|---|")
    for name, on, batch, seq in HEAVY:
        graph, cluster, work, counts = model(name), parse_cluster(on), work_of(name, batch, seq), (4, 8, 16)
        half = Precision(param="fp16", compute="fp16") if "v100" in on else Precision()
        base = Plan(precision=half, saved=Saved(preset="selective"))
        equal_s, shape = float("inf"), ""
        for count in counts:
            prices = Prices(graph, cluster, work, base, count, PLAIN_STACK)
            for pieces in equal_splits(prices):
                try:
                    made = predict(graph, cluster, prices.plan(pieces), work)
                except GnomonError:
                    continue
                if made.tightest.fits and made.step_s < equal_s:
                    equal_s, shape = made.step_s, f"{len(pieces)}, {count}"
        replicas = dapple(graph, cluster, work, base=base, counts=counts).best
        assert replicas is not None and replicas.step_s <= equal_s
        print(f"| {name} | {on} | {equal_s:.4f} | {shape} | {replicas.step_s:.4f} | "
              f"{100 * (1 - replicas.step_s / equal_s):.1f} | {cuts_of(replicas)} |", flush=True)  # fmt: skip


PUBLISHED = {
    "ResNet-50": ("DP", "DP", "DP"),
    "VGG-19": ("DP", "DP", "15:1 (13:6)"),
    "GNMT-16": ("8:8 (9:7)", "8:8 (9:7)", "straight"),
    "BERT-48": ("8:8 (23:25)", "straight", "straight"),
    "XLNet-36": ("8:8 (18:18)", "8:8 (18:18)", "straight"),
    "AmoebaNet-36": ("8:8 (24:12)", "11:5 (27:9)", "11:5 (27:9)"),
}
"""Plans of the paper's table of planning results on clusters A, B and C: replicas of each stage (layers of each)."""


def published() -> None:
    """The paper's models as measured by its authors: its plans, ours of the same kinds, and the programme's."""
    print("| model | cluster | published | s by our closed form | best of its kinds | s | programme | s | core-s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for profile in dapple_profiles.PROFILES:
        for config, plan in zip("ABC", PUBLISHED[profile.name], strict=True):
            kinds = dapple_profiles.of_paper(profile, config)
            theirs, clock = kinds[plan.partition(" ")[0]], time.process_time()
            kind = min(kinds, key=lambda name: kinds[name].seconds)
            result = dapple_profiles.best(profile, config)
            clock = time.process_time() - clock
            row = [profile.name, config, plan, f"{theirs.seconds:.3f}", _shape(kinds[kind])]
            row += [f"{kinds[kind].seconds:.3f}", _shape(result), f"{result.seconds:.3f}", f"{clock:.1f}"]
            print(f"| {' | '.join(row)} |", flush=True)


def _shape(plan: dapple_profiles.Planned) -> str:
    """`8:8 (23:25)`."""
    if len(plan.replicas) == 1:
        return "DP"
    if len(plan.replicas) > 6:
        return f"{len(plan.replicas)} stages of {min(plan.replicas)} to {max(plan.replicas)}"
    return f"{':'.join(map(str, plan.replicas))} ({':'.join(map(str, plan.layers))})"


TABLES = {
    "models": models,
    "memory": memory,
    "random": random_cases,
    "dapple": planner,
    "equal": against_equal,
    "paper": published,
}


def main() -> None:
    """Prints the tables asked for, or all."""
    print(time.strftime("%Y-%m-%d"))
    for name in sys.argv[1:] or TABLES:
        print(f"\n## {name}\n")
        TABLES[name]()


if __name__ == "__main__":
    main()
