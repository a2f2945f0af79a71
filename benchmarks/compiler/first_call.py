"""What the first call of a model takes by backend "gnomon", in parts: CPU seconds, with empty caches.

    python benchmarks/compiler/first_call.py [--only "BERT-base, training|ResNet"] [--threads 1]
        [--peers gnomon,inductor] [--again] [--parts] [--profile 25]

Each row is a process of its own that builds the model, calls it once in eager, and makes and calls it by one peer.
Seconds are CPU seconds of the process and of its children that ended (g++), so what else runs on the machine disturbs
them less than time on a wall, which stands beside. *shared* is what Dynamo and AOTAutograd took, *own* the rest: making
programs and kernels, and the calls in which these are tried. Of *own*: g++ and how often it was called, comparison on
the user's inputs and on made ones, timing, and what is left, which is Python and the call itself. *own / Inductor's*
takes *shared* of ours off either. `--again`: a second process with the caches of the first. `--parts` prints texts of
g++ and trials by what they cost, `--profile N` functions of Python by their own time (which cProfile makes slower).
Inductor compiles in its process alone (`compile_threads=1`), as its workers' seconds would not count. Leaves out what
a call takes afterwards (`table`).
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import json
import os
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.compiler.whole_models import Model, models  # noqa: E402
from gnomon.compiler import backend, build  # noqa: E402
from gnomon.compiler.tune import gate  # noqa: E402

COLUMNS = ("wall", "all", "shared", "own", "g++", "compared", "made inputs", "timed", "rest")
"""Seconds of a row, in the page's order."""


def cpu_s() -> float:
    """CPU seconds of this process, and of its children that ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in both)


def children_s() -> float:
    of = resource.getrusage(resource.RUSAGE_CHILDREN)
    return of.ru_utime + of.ru_stime


class Parts:
    """CPU seconds by part, of functions that are wrapped; what a part within another takes counts for the inner."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.count: dict[str, int] = defaultdict(int)
        self.detail: dict[str, float] = defaultdict(float)
        self.inner = [0.0]

    @contextmanager
    def part(self, name: str, detail: str = "") -> Iterator[None]:
        """Counts what runs within; g++ has children of its own, and is counted apart."""
        began, children = cpu_s(), children_s()
        self.inner.append(0.0)
        try:
            yield
        finally:
            whole = cpu_s() - began - (children_s() - children)
            own = whole - self.inner.pop()
            self.inner[-1] += whole
            self.seconds[name] += own
            self.count[name] += 1
            if detail:
                self.detail[f"{name}: {detail}"] += own

    def wrap(self, of: Any, name: str, part: str, detail: Callable[..., str] = lambda *_: "") -> None:
        """Has each call of `of.name` count as a part."""
        inner = getattr(of, name)

        @functools.wraps(inner)
        def counted(*args: Any, **named: Any) -> Any:
            with self.part(part, detail(*args)):
                return inner(*args, **named)

        setattr(of, name, counted)


def named_source(text: str) -> str:
    """A few words of what a text is."""
    lines = [line for line in text.splitlines()[:6] if line.startswith(("//", "#define"))] or text.splitlines()[:1]
    return f"{' '.join(lines)[:90]} ({len(text)} characters)"


def watched(parts: Parts) -> None:
    """Wraps what is counted."""
    parts.wrap(backend.CompiledGraph, "__init__", "own")
    parts.wrap(backend.CompiledGraph, "_first", "own")
    parts.wrap(gate.Trial, "_judged", "compared", lambda trial, *_: named_source(trial.source))
    parts.wrap(gate, "wrong_on_made", "made inputs")
    parts.wrap(gate, "_times", "timed")
    inner = build.compiled

    def compiled(key: str, source: str) -> Any:
        began = time.perf_counter()
        try:
            return inner(key, source)
        finally:
            parts.count["g++"] += 1
            parts.detail[f"g++ on the wall: {named_source(source)}"] += time.perf_counter() - began

    build.compiled = compiled


def called(model: Model, train: bool, peer: str, dtype: torch.dtype) -> Callable[[], Any]:
    """What makes the peer's function and calls it, once."""
    torch.manual_seed(0)
    module = model.build().to(dtype).train(train)
    inputs = tuple(
        x.to(dtype) if x.is_floating_point() else x for x in model.inputs(model.train if train else model.batch)
    )

    def step(function: Any) -> None:
        if not train:
            with torch.no_grad():
                function(*inputs)
            return
        module.zero_grad()
        function(*inputs).square().mean().backward()

    step(module)  # what libraries set up once is no peer's

    def call() -> None:
        step(torch.compile(module, backend=backend.gnomon) if peer == "gnomon" else torch.compile(module))

    return call


def measured(model: Model, train: bool, peer: str, dtype: torch.dtype, profile: int) -> dict[str, Any]:
    """Seconds of the first call in this process."""
    call, parts = called(model, train, peer, dtype), Parts()
    profiler = cProfile.Profile() if profile else None
    if peer == "gnomon":
        watched(parts)
    began, cpu, children = time.perf_counter(), cpu_s(), children_s()
    if profiler is not None:
        profiler.runcall(call)
    else:
        call()
    wall, whole, compilers = time.perf_counter() - began, cpu_s() - cpu, children_s() - children
    if profiler is not None:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(profile)
    tried = {name: parts.seconds[name] for name in ("compared", "made inputs", "timed")}
    own = parts.seconds["own"] + sum(tried.values()) + compilers
    seconds = {"wall": wall, "all": whole, "shared": whole - own, "own": own, "g++": compilers, **tried}
    seconds["rest"] = parts.seconds["own"]
    return {"s": seconds, "calls": parts.count["g++"], "trials": parts.count["compared"], "detail": parts.detail}


def in_process(words: list[str], caches: str, profile: bool) -> dict[str, Any]:
    """A row by a process of its own."""
    empty = {name: f"{caches}/{name}" for name in ("GNOMON_CACHE", "TORCHINDUCTOR_CACHE_DIR")}
    environment = {**os.environ, **empty, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, env=environment)
    if profile:
        print(done.stderr)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def row(name: str, results: dict[str, dict[str, Any]]) -> str:
    """A line of the page."""
    ours, theirs = results.get("gnomon"), results.get("inductor")
    cells = [name]
    if ours is not None:
        cells += [f"{ours['s'][one]:.2f}" for one in COLUMNS]
        cells[1 + COLUMNS.index("g++")] += f" ({ours['calls']})"
    if theirs is not None:
        cells += [f"{theirs['s']['all']:.1f} ({theirs['s']['wall']:.1f})"]
    if ours is not None and theirs is not None:
        cells.append(f"{ours['s']['own'] / (theirs['s']['all'] - ours['s']['shared']):.3f}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """The rows that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts of names of rows, with | between")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--peers", default="gnomon")
    parser.add_argument("--again", action="store_true", help="a second process with the first one's caches too")
    parser.add_argument("--parts", action="store_true", help="what texts of g++ and trials cost")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="functions of Python that cost most")
    parser.add_argument("--row", default="", help="only this row, by the first of --peers, as JSON, in this process")
    options = parser.parse_args()
    dtype = torch.float32 if options.dtype == "fp32" else torch.bfloat16
    rows = {f"{m.name}, {'training' if t else 'inference'}": (m, t) for t in (False, True) for m in models()
            if (m.train if t else m.batch)}  # fmt: skip
    if options.row:
        torch.set_num_threads(options.threads)
        print(json.dumps(measured(*rows[options.row], options.peers, dtype, options.profile)))
        return
    heads = ["model", *COLUMNS, "Inductor, all (wall)", "own / Inductor's"]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|", flush=True)
    for name in rows:
        if not any(word in name for word in options.only.split("|")):
            continue
        with tempfile.TemporaryDirectory() as folder:
            for turn in range(1 + options.again):
                results = {}
                for peer in options.peers.split(","):
                    words = ["--row", name, "--peers", peer, "--threads", str(options.threads)]
                    words += ["--dtype", options.dtype, "--profile", str(options.profile)]
                    results[peer] = in_process(words, folder, bool(options.profile))
                print(row(name + (", again" if turn else ""), results), flush=True)
                if options.parts:
                    detail = results["gnomon"]["detail"]
                    for what in sorted(detail, key=lambda one: -detail[one])[:40]:
                        print(f"    {detail[what]:.2f} {what}")


if __name__ == "__main__":
    main()
