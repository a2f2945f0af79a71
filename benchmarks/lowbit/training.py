"""What methods that change what is learnt are worth on small models trained here, beside plain ones of as many steps.

    python benchmarks/lowbit/training.py [--only nxm,xtc,ad2,iss] [--steps 400] [--seeds 3] [--write]

A Llama of 2 layers (a teacher of 4), 64 wide, on bytes of Python's standard library (ad2: of 60 thousand of them, as
methods against too little data are for); an LSTM of 2 layers, 96 units each, for iss. Cosine learning rate to 0; loss a
token on held-out text after the last step, each seed and the mean. Every run is `gnomon.runtime.train` of a job as
`gnomon run` makes it, in this process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import mean
from time import process_time

import torch
import torch.distributed as dist

from gnomon.frontend.inputs import CodeModel
from gnomon.frontend.named import build, captured_of
from gnomon.plans import Pass, Plan, Precision, Schedule, Workload
from gnomon.runtime import AdamWSettings, Outcome, Source, TrainingJob, train
from gnomon.runtime.checkpoint.compress import compress
from gnomon.runtime.checkpoint.pretrained import load, model_of
from gnomon.runtime.checkpoint.smaller_lstm import smaller
from gnomon.runtime.launch.train import corpus_of
from gnomon.runtime.optim.learning_rate import LearningRate
from gnomon.storage.integers import Integers

RESULT = Path(__file__).parents[1] / "results" / "lowbit_training.md"
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 128, "vocab_size": 256, "hidden_act": "silu",
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "float32",
}  # fmt: skip
WORDS = """
import torch
from torch import nn
from torch.nn import functional as F


class Words(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.embed = nn.Embedding(256, 48)
        self.one = nn.LSTM(48, first, batch_first=True)
        self.two = nn.LSTM(first, second, batch_first=True)
        self.head = nn.Linear(second, 256)

    def forward(self, ids, labels):
        x = self.two(self.one(self.embed(ids))[0])[0]
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def build(first=96, second=96):
    return Words(first, second)
"""
Row = tuple[str, list[float], str]
"""(what, loss of each seed, what the run says of it)."""


@contextmanager
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Bench:
    """Jobs in a folder."""

    def __init__(self, folder: Path, steps: int, seeds: int) -> None:
        self.folder, self.steps, self.seeds = folder, steps, seeds
        for name, layers in (("base", 2), ("deep", 4)):
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
        (folder / "words_of_lstms.py").write_text(WORDS)
        sys.path.insert(0, str(folder))
        os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        (folder / "small").mkdir()
        (folder / "small" / "text.txt").write_text(Path(argparse.__file__).read_text()[:60_000])

    def job(self, passes: tuple[Pass, ...], seed: int, **more: object) -> TrainingJob:
        plan = Plan(
            schedule=Schedule(micro_batch_size=16, passes=passes),
            precision=Precision(param="fp32", compute="fp32", master="none"),
        )
        steps = int(str(more.pop("steps", self.steps)))
        rate = LearningRate(shape="cosine", warmup_steps=min(20, steps // 4), total_steps=steps)
        given = TrainingJob(
            graph=model_of(self.folder / "base").graph,
            plan=plan,
            workload=Workload(global_batch_size=16, seq_len=64),
            steps=steps,
            seed=seed,
            quiet=True,
            settings=AdamWSettings(lr=3e-3, rate=rate),
        )
        return replace(given, **more)  # type: ignore[arg-type]

    def run(self, job: TrainingJob) -> Outcome:
        with alone():
            return train(job)

    def row(self, what: str, passes: Callable[[], tuple[Pass, ...]], **more: object) -> Row:
        losses, said = [], ""
        for seed in range(self.seeds):
            outcome = self.run(self.job(passes(), seed, **dict(more)))
            loss = outcome.records[-1].validation_loss
            assert loss is not None
            losses.append(loss)
            said = "; ".join(outcome.notes)
        print(f"{what:60} {mean(losses):.4f}  {' '.join(f'{x:.4f}' for x in losses)}  {said}", flush=True)
        return what, losses, said

    def teacher(self) -> Path:
        target = self.folder / "teacher"
        if not target.exists():
            graph = model_of(self.folder / "deep").graph
            done = self.run(self.job((), 0, graph=graph, steps=2 * self.steps, export=(target, self.folder / "deep")))
            print(f"teacher of 4 layers: {done.records[-1].validation_loss:.4f}", flush=True)
        return target


def given(name: str, **params: object) -> Pass:
    return Pass(name=name, params=tuple(params.items()))  # type: ignore[arg-type]


def nxm(bench: Bench) -> list[Row]:
    rows = [bench.row("dense", lambda: ())]
    for pattern in ("2:4", "4:16"):
        end = 1 - 0.6 / bench.steps
        for what, params in (
            ("one-shot magnitude after the last step", {"rho": 0.0, "mask_at": end}),
            ("one-shot magnitude at 70 % of the steps, then trained", {"rho": 0.0}),
            ("nxm_admm", {}),
        ):
            rows.append(
                bench.row(f"{pattern}, {what}", lambda p=params, n=pattern: (given("nxm_admm", pattern=n, **p),))
            )
    return rows


def xtc(bench: Bench) -> list[Row]:
    teacher, rows = str(bench.teacher()), [bench.row("2 layers, dense, from random numbers", lambda: ())]
    rows.append(rounded_afterwards(bench, teacher))
    for weights in ("none", "ternary", "binary"):
        for what, more in (("", {}), (", no teacher's answers (share 0)", {"share": 0.0})):
            rows.append(
                bench.row(
                    f"2 of the teacher's layers, weights {weights}{what}",
                    lambda w=weights, m=more: (given("xtc", teacher=teacher, layers="1,3", weights=w, **m),),
                )
            )
    return rows


def rounded_afterwards(bench: Bench, teacher: str) -> Row:
    """The same layers, trained whole and rounded to ternary once at the end, as `gnomon compress --bits ternary`."""
    losses = []
    for seed in range(bench.seeds):
        whole, out = (bench.folder / f"{name}-{seed}" for name in ("whole", "rounded"))
        passes = (given("xtc", teacher=teacher, layers="1,3", weights="none", share=0.0),)
        job = bench.job(passes, seed, export=(whole, bench.folder / "base"))
        bench.run(job)
        compress(whole, out, Integers(bits=2, group=64, ternary=True), "rtn")
        batch = corpus_of(job).validation_batch(0, sequences=16, seq_len=64)
        assert isinstance(batch, dict)
        losses.append(float(load(out).output(batch).detach()) / batch["labels"].numel())
    what = "2 of the teacher's layers, ternary by rounding after the last step"
    print(f"{what:60} {mean(losses):.4f}", flush=True)
    return what, losses, ""


def ad2(bench: Bench) -> list[Row]:
    teacher, few = str(bench.teacher()), bench.folder / "small"
    source = Source(path=few, cache=bench.folder / "tokens")
    known = {"teacher": teacher, "share": 1.0}
    student = given("xtc", layers="1,3", weights="none", **known)
    rows = [bench.row("few bytes, taught", lambda: (student,), data=source)]
    for radius, weight in ((0.03, 0.3), (0.1, 1.0), (0.3, 1.0)):
        rows.append(
            bench.row(
                f"few bytes, taught, ad2 with radius {radius}, weight {weight}",
                lambda r=radius, w=weight: (student, given("ad2", radius=r, weight=w, **known)),
                data=source,
            )
        )
    return rows


def iss(bench: Bench) -> list[Row]:
    def code(first: int, second: int) -> dict[str, object]:
        name = f"of_{first}_{second}"  # a function of the module's own for each pair of sizes
        sys.modules.pop("words_of_lstms", None)
        with (bench.folder / "words_of_lstms.py").open("a") as file:
            file.write(f"\n\ndef {name}():\n    return Words({first}, {second})\n")
        text = f"words_of_lstms:{name}(ids=int64[batch,seq],labels=int64[batch,seq])"
        asked = CodeModel.parse(text)
        return {"code": text, "graph": captured_of(asked, build(asked, real=True, seed=0)).graph}

    quick = AdamWSettings(lr=1e-2, rate=LearningRate(shape="cosine", warmup_steps=20, total_steps=bench.steps))
    whole = {**code(96, 96), "settings": quick}
    rows = [bench.row("LSTM of 96 and 96 units", lambda: (), **whole)]
    for decay in (1.0, 3.0, 6.0):
        target = bench.folder / f"iss-{decay}"
        export = {"export": (target, bench.folder)} if bench.seeds == 1 else {}
        rows.append(bench.row(f"iss, decay {decay:g}", lambda d=decay: (given("iss", decay=d),), **whole, **export))
        if export:
            rows.append(timed(bench, target))
            first, second = json.loads((target / "iss.json").read_text())["lstms"].values()
            same = {**code(first[0], second[0]), "settings": quick}
            rows.append(bench.row(f"LSTM of {first[0]} and {second[0]} units from the first step", lambda: (), **same))
    return rows


def timed(bench: Bench, target: Path) -> Row:
    """CPU-seconds of a forward of the smaller module over those of the whole one, in turn."""
    asked = CodeModel.parse("words_of_lstms:build(ids=int64[batch,seq],labels=int64[batch,seq])")
    whole, small = (build(asked, real=True, seed=0) for _ in range(2))
    small, ids = smaller(small, target), torch.randint(0, 256, (8, 64))
    took: dict[str, list[float]] = {"whole": [], "small": []}
    with torch.no_grad():
        for _ in range(15):
            for name, module in (("whole", whole), ("small", small)):
                before = process_time()
                for _ in range(5):
                    module(ids, ids)
                took[name].append(process_time() - before)
    ratio = sorted(a / b for a, b in zip(took["small"], took["whole"], strict=True))[7]
    print(f"  CPU-seconds of a forward over the whole one's: {ratio:.2f}", flush=True)
    return f"  its forward over the whole one's, CPU-seconds: {ratio:.2f}", [], ""


PARTS: dict[str, Callable[[Bench], list[Row]]] = {"nxm": nxm, "xtc": xtc, "ad2": ad2, "iss": iss}


def text(found: dict[str, list[Row]], steps: int, seeds: int, command: str) -> str:
    lines = [
        "# Methods that change what is learnt, on small models",
        "",
        f"`{command}`, {date.today()}, torch {torch.__version__} on {platform.machine()}, one thread. Loss a",
        f"token (nats) on held-out bytes after {steps} steps of 16 x 64 tokens: the mean of {seeds} seeds, and each.",
        "",
    ]
    for part, rows in found.items():
        lines += [f"## {part}", "", "| run | mean | each | what the last run says |", "| --- | --- | --- | --- |"]
        for what, losses, said in rows:
            shown = f"{mean(losses):.4f}" if losses else ""
            said = said.replace(str(tempfile.gettempdir()), "").split("/")[-1] if "/" in said else said
            lines.append(f"| {what} | {shown} | {', '.join(f'{x:.4f}' for x in losses)} | {said} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="lowbit-training-"))
    try:
        bench = Bench(folder, options.steps, options.seeds)
        found = {part: PARTS[part](bench) for part in options.only.split(",")}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.write:
        command = " ".join(["python benchmarks/lowbit/training.py", *sys.argv[1:]])
        RESULT.write_text(text(found, options.steps, options.seeds, command))


if __name__ == "__main__":
    main()
