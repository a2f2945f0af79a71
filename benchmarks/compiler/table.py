"""Kernels and whole models by backend "gnomon" beside eager, Inductor, ONNX Runtime and OpenVINO.

    python benchmarks/compiler/table.py [--minutes 14] [--only softmax,BERT] [--threads 1] [--dtype bf16] [--state FILE]
        [--write]

Resumable: each row runs in a process of its own, which is ended after `--limit` seconds, and is added to the state file
when it is done; the next call goes on with the rows that are missing, and starts none after `--minutes`. In a row all
peers take turns, in another order each time; milliseconds are medians, quartiles beside, CPU time on one thread. First
calls begin with empty caches, and say what of ours Dynamo and AOTAutograd took; a peer whose first call takes too long
(`PEER_S`) is left out. Memory that is freed stays the process's (`KEPT`): a peer that gets new pages from the system by
chance takes up to three times as long.
ONNX Runtime and OpenVINO take part in inference where they are installed (`pip install onnxruntime onnx onnxscript
openvino`). The bound is, of kernels, the bytes that must move at the median rate of adding a number to an array as
large as the first input into another, which takes its turns like a peer; of models, FLOPs at that of a product of
matrices of 1,024 x 1,024. Training of a kernel is its forward and the gradients of all floating inputs from a given
gradient of its output. `--dtype bf16` casts models and inputs; the other runtimes take part in fp32 only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import geometric_mean, quantiles
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.compiler.whole_models import Model, models  # noqa: E402
from gnomon.compiler import backend  # noqa: E402

RESULT = Path(__file__).parents[1] / "results" / "compiler_table.md"
PEERS = ("eager", "gnomon", "inductor")
OTHERS = ("onnxruntime", "openvino")
SQUARE = 1024
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WARM = 4
"""Calls before the first that is measured: kernels are tried in the first ones."""
KERNELS_S, MODELS_S = 3.0, 8.0
"""Seconds in which all peers take turns."""
LEAST = 5
STITCHED, BANDWIDTH = 1.5, 0.85
"""Goals: of eager's speed where reductions are stitched, of bandwidth for all kernels."""
REDUCTIONS = ("softmax", "log-softmax", "layer norm", "cross-entropy")
KEPT = {"MALLOC_TRIM_THRESHOLD_": str(1 << 32), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""glibc's, the second the largest that it takes."""
PEER_S, OTHER_S = 100, 45
"""Seconds after which the first call of a peer of torch.compile, and of another runtime, is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    call: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]
    train: bool = False
    moved: int
    """Arrays of the first input's size that must be read or written."""


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of (tokens, heads, head size), by halves."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def updated(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Parameters and states after a step of AdamW."""
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    return p * (1 - 1e-5) - 1e-4 * m / (v.sqrt() + 1e-8), m, v


def cases(dtype: torch.dtype) -> list[Case]:
    torch.manual_seed(0)
    rows, columns, head = 2048, 1024, 64
    x, y, g = (torch.randn(rows, columns).to(dtype) for _ in range(3))
    w, b = torch.randn(columns).to(dtype), torch.randn(columns).to(dtype)
    target = torch.randint(0, columns, (rows,))
    angles = torch.arange(rows)[:, None, None] / 10_000 ** (torch.arange(head) % (head // 2) * 2 / head)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    table = [
        ("softmax", lambda a: F.softmax(a, -1), (x,), 2, 3),
        ("log-softmax", lambda a: F.log_softmax(a, -1), (x,), 2, 3),
        ("layer norm", lambda a, p, q: F.layer_norm(a, (columns,), p, q), (x, w, b), 2, 3),
        ("add, layer norm, GELU", lambda a, c, p, q: F.gelu(F.layer_norm(a + c, (columns,), p, q)), (x, y, w, b), 3, 4),
        ("RMS norm", lambda a, p: F.rms_norm(a, (columns,), p), (x, w), 2, 3),
        ("GELU", lambda a: F.gelu(a), (x,), 2, 3),
        ("SwiGLU", lambda a, c: F.silu(a) * c, (x, y), 3, 5),
        ("cross-entropy", lambda a: F.cross_entropy(a, target), (x,), 1, 2),
        ("RoPE", lambda a: rotated(a, cos, sin), (x.view(rows, columns // head, head),), 2, 2),
        ("dropout, residual", lambda a, c: F.dropout(a, 0.1) + c, (x, y), 3, 2),
        ("residual, layer norm", lambda a, c, p, q: F.layer_norm(a + c, (columns,), p, q), (x, y, w, b), 3, 4),
    ]
    out = []
    for name, call, inputs, forward, backward in table:
        out.append(Case(name=name, call=call, inputs=inputs, moved=forward))
        out.append(Case(name=f"{name}, training", call=call, inputs=inputs, train=True, moved=forward + backward))
    return [*out, Case(name="AdamW", call=updated, inputs=(x, g, torch.zeros_like(x), torch.zeros_like(x)), moved=7)]


def caller(case: Case, peer: str) -> Callable[[], Any]:
    torch._dynamo.reset()
    leaves = tuple(t.clone().requires_grad_(case.train) for t in case.inputs)
    given = torch.randn(case.call(*case.inputs).shape, dtype=case.inputs[0].dtype) if case.train else None
    call = case.call
    if peer == "gnomon":
        call = torch.compile(case.call, backend=backend.gnomon)
    elif peer == "inductor":
        call = torch.compile(case.call)

    def once() -> Any:
        with torch.set_grad_enabled(case.train):
            out = call(*leaves)
        return torch.autograd.grad(out, leaves, given) if case.train else out

    return once


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row: calls of all peers, and a call whose rate gives the bound."""

    name: str
    calls: dict[str, Callable[[], Any]]
    first_s: dict[str, float]
    shared_s: float
    """Of our first call, what Dynamo and AOTAutograd took, as of any backend's."""
    rate: Callable[[], Any]
    bound_calls: float
    """Calls of `rate` that take as long as the row must take at least."""
    left_out: dict[str, str]
    spend_s: float


def first_calls(
    makers: dict[str, Callable[[], Callable[[], Any]]],
) -> tuple[dict[str, Any], dict[str, float], dict[str, str], float]:
    """(calls, seconds to make and call each first, why others are left out, what of ours is `shared`)."""
    calls, first, left_out = {}, {}, {}
    for peer, make in makers.items():
        began = time.perf_counter()
        signal.alarm(OTHER_S if peer in OTHERS else PEER_S)
        try:
            call = make()
            call()
        except Exception as error:
            left_out[peer] = f"{type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"
            continue
        finally:
            signal.alarm(0)
        first[peer], calls[peer] = time.perf_counter() - began, call
    alone = shared(first)
    for call in calls.values():  # after all are made: each begins by forgetting what others compiled
        for _ in range(WARM):
            call()
    return calls, first, left_out, alone


def too_long(*_: Any) -> None:
    raise TimeoutError("its first call took too long")


def shared(first: dict[str, float]) -> float:
    """Seconds of our first call that were neither making programs and kernels nor trials."""
    ours = sum(one.made_s + one.tried_s for one in backend.reports)
    return max(0.0, first.get("gnomon", 0.0) - ours)


def kernel_row(case: Case) -> Row:
    calls, first, left_out, alone = first_calls({peer: lambda peer=peer: caller(case, peer) for peer in PEERS})
    a = torch.zeros_like(case.inputs[0])
    out = torch.empty_like(a)
    return Row(
        name=case.name, calls=calls, first_s=first, shared_s=alone, rate=lambda: torch.add(a, 1.0, out=out),
        bound_calls=case.moved / 2, left_out=left_out, spend_s=KERNELS_S,
    )  # fmt: skip


def model_row(model: Model, train: bool, dtype: torch.dtype) -> Row:
    torch.manual_seed(0)
    module = model.build().to(dtype).train(train)
    given = model.inputs(model.train if train else model.batch)
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in given)

    def stepped(function: Any) -> Callable[[], Any]:
        def infer() -> Any:
            with torch.no_grad():
                return function(*inputs)

        def step() -> Any:
            module.zero_grad()
            function(*inputs).square().mean().backward()

        return step if train else infer

    def made(peer: str) -> Callable[[], Any]:
        torch._dynamo.reset()
        function = {
            "eager": lambda: module,
            "gnomon": lambda: torch.compile(module, backend=backend.gnomon),
            "inductor": lambda: torch.compile(module),
        }[peer]()
        return stepped(function)

    makers: dict[str, Any] = {peer: lambda peer=peer: made(peer) for peer in PEERS}
    if not train and dtype == torch.float32:
        makers |= {peer: lambda peer=peer: exported(peer, module, inputs) for peer in OTHERS}
    with FlopCounterMode(display=False) as counted:
        stepped(module)()
    calls, first, left_out, alone = first_calls(makers)
    square = torch.randn(SQUARE, SQUARE).to(dtype)
    return Row(
        name=f"{model.name}, {'training' if train else 'inference'}", calls=calls, first_s=first,
        shared_s=alone, rate=lambda: square @ square,
        bound_calls=counted.get_total_flops() / (2 * SQUARE**3), left_out=left_out, spend_s=MODELS_S,
    )  # fmt: skip


def exported(peer: str, module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> Callable[[], Any]:
    """A call of another runtime, with as many threads as torch has."""
    threads = torch.get_num_threads()
    if peer == "onnxruntime":
        import onnxruntime

        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/model.onnx"
            torch.onnx.export(module, tuple(inputs), path, dynamo=True, verbose=False)
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = threads
            session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        given = {one.name: x.numpy() for one, x in zip(session.get_inputs(), inputs, strict=True)}
        return lambda: session.run(None, given)
    import openvino

    core = openvino.Core()
    converted = openvino.convert_model(module, example_input=tuple(inputs))
    exact = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    compiled = core.compile_model(converted, "CPU", exact)
    numbers = [x.numpy() for x in inputs]
    return lambda: compiled(numbers)


def measured(row: Row, share: float) -> dict[str, Any]:
    """What is kept of a row: quartiles of milliseconds of each peer, the bound, first calls, what was left out."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    calls = {**row.calls, "rate": row.rate}
    times: dict[str, list[float]] = {peer: [] for peer in calls}
    until = time.perf_counter() + share * row.spend_s
    order, shuffled = list(calls), random.Random(0)
    while time.perf_counter() < until or len(times["rate"]) < LEAST:
        shuffled.shuffle(order)  # what runs after the product of `rate` finds its data out of cache
        for peer in order:
            began = clock()
            calls[peer]()
            times[peer].append((clock() - began) * 1e3)
    quartiles = {peer: quantiles(each, n=4) for peer, each in times.items()}
    bound = row.bound_calls * quartiles["rate"][1]
    return {
        "name": row.name, "commit": commit(), "ms": quartiles, "first_s": row.first_s, "shared_s": row.shared_s,
        "bound_ms": bound, "left_out": row.left_out, "rounds": len(times["rate"]),
    }  # fmt: skip


def commit() -> str:
    """Of the sources that run; rows of one state file may be of several."""
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True).stdout.strip() or "unknown"


def rows(dtype: torch.dtype) -> dict[str, Callable[[], Row]]:
    """All rows, by name."""
    made: dict[str, Callable[[], Row]] = {case.name: lambda case=case: kernel_row(case) for case in cases(dtype)}
    for train in (False, True):
        for model in models():
            if model.train if train else model.batch:
                name = f"{model.name}, {'training' if train else 'inference'}"
                made[name] = lambda model=model, train=train: model_row(model, train, dtype)
    return made


def line(result: dict[str, Any]) -> str:
    """A row of the page."""
    ms, cells = result.get("ms", {}), []
    for peer in (*PEERS, *OTHERS):
        if peer in ms:
            cells.append(f"{ms[peer][1]:.2f} ({ms[peer][0]:.2f}-{ms[peer][2]:.2f})")
        else:
            cells.append("-" if peer in OTHERS else "left out")
    if not {"eager", "gnomon"} <= set(ms):
        return f"| {result['name']} | {' | '.join(cells)} | | | | | {reasons(result)} |"
    ours = ms["gnomon"][1]
    against = [f"{ms['eager'][1] / ours:.2f}", f"{ms['inductor'][1] / ours:.2f}" if "inductor" in ms else ""]
    bound = f"{result['bound_ms']:.2f} ({ours / result['bound_ms']:.2f})" if result["bound_ms"] else ""
    first = ", ".join(f"{peer} {result['first_s'][peer]:.1f}" for peer in PEERS if peer in result["first_s"])
    first += f" ({result['shared_s']:.1f} of gnomon's shared)"
    return f"| {result['name']} | {' | '.join((*cells, *against, bound, first))} | {reasons(result)} |"


def reasons(result: dict[str, Any]) -> str:
    missing = {peer: why for peer, why in result["left_out"].items() if "No module named" not in why}
    return "; ".join(f"{peer}: {why}" for peer, why in missing.items()).replace("|", "/")


def geomeans(results: Sequence[dict[str, Any]]) -> str:
    """Geometric means of the models' ratios, and of what the first call takes beside Inductor's."""
    told, names = [], {model.name for model in models()}
    for kind in ("inference", "training"):
        chosen = [
            one for one in results if one["name"].endswith(f", {kind}") and one["name"].rsplit(", ", 1)[0] in names
        ]
        for peer in ("eager", "inductor"):
            ratios = [
                one["ms"][peer][1] / one["ms"]["gnomon"][1]
                for one in chosen
                if {peer, "gnomon"} <= set(one.get("ms", ()))
            ]
            if ratios:
                told.append(f"{kind}, {peer} / gnomon: {geometric_mean(ratios):.2f} of {len(ratios)} models")
    return "; ".join(told)


def page(results: Sequence[dict[str, Any]], threads: int, dtype: str, command: str) -> str:
    """The table, and how far what misses its goal is from its bound."""
    out = [
        "# The compiler's kernels and models beside eager, Inductor, ONNX Runtime and OpenVINO", "",
        f"{date.today()}, `{command}`, {platform.processor() or platform.machine()}, {threads} thread(s), {dtype}, "
        f"torch {torch.__version__}, load average {os.getloadavg()[0]:.1f} at the end. "
        "Milliseconds: medians and quartiles. First calls start with empty caches; *shared*: what Dynamo and "
        "AOTAutograd took of ours.", "",
        f"| case | {' | '.join((*PEERS, *OTHERS))} | eager / gnomon | Inductor / gnomon | bound ms (gnomon / bound) "
        "| first call s | left out |",
        "|---" * (len(PEERS) + len(OTHERS) + 6) + "|",
        *map(line, results), "",
    ]  # fmt: skip
    goals: dict[str, list[str]] = {
        "Below 0.98 of the better of eager and Inductor": [],
        "Below 0.9 of the better of ONNX Runtime and OpenVINO": [],
        f"Below {STITCHED} of eager, of {', '.join(REDUCTIONS)}": [],
        f"Kernels below {BANDWIDTH:.0%} of the bandwidth of `torch.add`": [],
        "Models whose first call takes over a fifth of Inductor's (without *shared*, of Inductor's without it)": [],
    }
    for result in results:
        for told, missed in zip(goals.values(), misses(result), strict=True):
            told += [f"- {result['name']}: {missed}"] if missed else []
    if means := geomeans(results):
        out += [f"Geometric means of models: {means}.", ""]
    for title, told in goals.items():
        out += [f"{title}:", "", *(told or ["- none."]), ""]
    commits: dict[str, list[str]] = {}
    for result in results:
        commits.setdefault(result.get("commit", "unknown"), []).append(result["name"])
    for n, (of, names) in enumerate(sorted(commits.items(), key=lambda one: -len(one[1]))):
        out.append(f"Commit {of}: {'; '.join(names) if n else f'{len(names)} rows'}.")
    return "\n".join(out).rstrip("\n") + "\n"


def sections(page: str) -> str:
    """What stands below the table of a page that somebody wrote on, which a new table leaves there."""
    _, found, below = page.partition("\n## ")
    return found + below


def misses(result: dict[str, Any]) -> tuple[str, ...]:
    """What a row misses of each goal in `page`, with its distance; empty where it is reached or not asked."""
    ms = {peer: each[1] for peer, each in result.get("ms", {}).items()}
    if not {"eager", "gnomon"} <= set(ms):
        return ("",) * 5
    ours, model = ms["gnomon"], any(result["name"].startswith(f"{one.name}, ") for one in models())
    best = min(ms[peer] for peer in ("eager", "inductor") if peer in ms)
    other = min((ms[peer] for peer in OTHERS if peer in ms), default=float("inf"))
    far = f"; {ours / result['bound_ms']:.2f} times the bound" if result["bound_ms"] else ""
    reduction = any(result["name"].removesuffix(", training") == one for one in REDUCTIONS)
    ideal = f"; eager is at {ms['eager'] / result['bound_ms']:.2f} times the bound" if result["bound_ms"] else ""
    first, begins = result["first_s"], ""
    if model and first.get("gnomon", 0.0) > first.get("inductor", float("inf")) / 5:
        own, theirs = (max(first[peer] - result["shared_s"], 0.0) for peer in ("gnomon", "inductor"))
        begins = f"{first['gnomon'] / first['inductor']:.2f} ({own / theirs:.2f})." if theirs else ""
    return (
        f"{best / ours:.3f}{far}." if best / ours < 0.98 else "",
        f"{other / ours:.2f}." if other / ours < 0.9 else "",
        f"{ms['eager'] / ours:.2f}{ideal}." if reduction and ms["eager"] / ours < STITCHED else "",
        f"{result['bound_ms'] / ours:.0%}." if not model and result["bound_ms"] / ours < BANDWIDTH else "",
        begins,
    )


def in_process(name: str, threads: int, dtype: str, limit_s: float, share: float) -> dict[str, Any]:
    """A row by a process of its own, with empty caches of compilers."""
    words = [sys.executable, __file__, "--row", name, "--threads", str(threads), "--dtype", dtype]
    words += ["--share", str(share)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            empty = {name: f"{folder}/{name}" for name in ("GNOMON_CACHE", "TORCHINDUCTOR_CACHE_DIR")}
            environment = {**os.environ, **KEPT, **empty}
            done = subprocess.run(words, capture_output=True, text=True, timeout=limit_s, env=environment)
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))
    except subprocess.TimeoutExpired:
        why = f"not done after {limit_s:.0f} s"
    except (IndexError, ValueError):
        why = (done.stderr.strip().splitlines() or ["nothing printed"])[-1][:120]
    return {"name": name, "left_out": {"all": why}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts of names of rows")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32")
    parser.add_argument("--minutes", type=float, default=14.0, help="after which no row is begun")
    parser.add_argument("--limit", type=float, default=360.0, help="seconds of one row")
    parser.add_argument("--share", type=float, default=1.0, help="of the seconds in which peers take turns")
    parser.add_argument("--state", type=Path, help="default: by threads, in the temporary folder")
    parser.add_argument("--row", default="", help="only this row, as JSON, in this process")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("--write writes the page of all rows: leave out --only, or add what it prints to the page by hand")
    torch.set_num_threads(options.threads)
    every = rows(DTYPES[options.dtype])
    if options.row:
        signal.signal(signal.SIGALRM, too_long)
        print("\n" + json.dumps(measured(every[options.row](), options.share)))
        return
    state = options.state or Path(tempfile.gettempdir()) / f"gnomon-table-{options.threads}-{options.dtype}.jsonl"
    known = [json.loads(text) for text in state.read_text().splitlines()] if state.exists() else []
    began, names = time.monotonic(), [one["name"] for one in known]
    asked = [name for name in every if any(word in name for word in options.only.split(","))]
    for name in asked:
        if name in names or time.monotonic() - began > 60 * options.minutes:
            continue
        known.append(in_process(name, options.threads, options.dtype, options.limit, options.share))
        if "ms" in known[-1]:  # what failed is tried again by the next call
            with state.open("a") as file:
                file.write(json.dumps(known[-1]) + "\n")
        print(line(known[-1]), flush=True)
    shown = [one for one in known if one["name"] in asked]
    text = page(shown, options.threads, options.dtype, "python benchmarks/compiler/table.py " + " ".join(sys.argv[1:]))
    print(text, f"{len(shown)} of {len(asked)} rows; state in {state}")
    if options.write:
        kind = "" if options.dtype == "fp32" else f"_{options.dtype}"
        target = RESULT.with_stem(f"compiler_table_{options.threads}{kind}")
        target.write_text(text + sections(target.read_text() if target.exists() else ""))


if __name__ == "__main__":
    main()
