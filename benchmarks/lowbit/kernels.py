"""Linear layers with stored weights beside torch, OpenVINO and ggml, in one process and in turn.

    python benchmarks/lowbit/kernels.py [--sizes 4096x4096] [--rows 1,8,32,128] [--rounds 7] [--minutes 4.5] [--write]

One thread; milliseconds of CPU of a call, medians with the least and the most beside, and for each goal the ratio of
the medians with the least and the most ratio of a round. The bound is max(bytes / bandwidth, operations / peak) with
the bandwidth and peaks of the machine that is named below (measured apart). Peers are installed into FOLDER
(`--peers`) where they are not there: OpenVINO into a virtual environment by uv, ggml (llama.cpp's kernels for this
processor) by `npm pack @node-llama-cpp/linux-x64`. Each size with each number of rows is a portion, measured at once
and kept in FOLDER: after `--minutes` the command ends, and the same command goes on; one with other sources begins
anew.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from gnomon.compiler.kernels import stored
from gnomon.compiler.machine import SETS, this_machine
from gnomon.storage.names import storage_of

RESULT = Path(__file__).parents[1] / "results" / "lowbit_kernels.md"
BYTES_PER_S = 21.3e9
OPS_PER_S = {"int8": 456e9, "bf16": 230e9}
"""AMD EPYC (Zen 4), one thread, CPU time: reading 512 MB, vpdpbusd and vdpbf16ps in a loop."""
Call = Callable[[np.ndarray], Any]

GOALS = (
    ("int4-g64", 1, "ggml q4_0", 0.95),
    ("int4-g64", 1, "ggml q4_k", 0.95),
    ("int4-g64", 8, "OpenVINO int4 g64", 1.65),
    ("int4-g64", 128, "OpenVINO int4 g64", 1.4),
    ("int8", 8, "torch int8 fbgemm", 1.35),
    ("int8", 128, "torch int8 onednn", 1.0),
    ("bf16", 8, "OpenVINO bf16", 1.5),
    ("ternary-g64", 1, "ggml tq2_0", 1.0),
)
"""(ours, rows, peer, peer's time over ours)."""


def ours(weight: torch.Tensor, name: str, activations: stored.Activations) -> Call:
    packed = stored.pack(weight, storage_of(name), activations)
    assert packed.by == "kernel", "this machine widens weights"
    return lambda x: stored.linear(torch.from_numpy(x), packed)


def torch_peers(weight: torch.Tensor) -> dict[str, Call]:
    out: dict[str, Call] = {}
    half = weight.bfloat16()
    out["torch bf16"] = lambda x: F.linear(torch.from_numpy(x).bfloat16(), half)
    for engine in ("fbgemm", "onednn"):
        torch.backends.quantized.engine = engine
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        layer.weight.data = weight.clone()
        made = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(layer), {torch.nn.Linear}, dtype=torch.qint8)

        def call(x: np.ndarray, made: Any = made, engine: str = engine) -> Any:
            torch.backends.quantized.engine = engine
            return made(torch.from_numpy(x))

        out[f"torch int8 {engine}"] = call
    return out


def openvino_peers(weight: torch.Tensor) -> dict[str, Call]:
    import openvino as ov
    import openvino.opset13 as op

    n, k = weight.shape
    x = op.parameter([-1, k], ov.Type.f32)
    group = 64
    rows = weight.view(n, k // group, group)
    scales = rows.abs().amax(-1, keepdim=True) / 7
    codes = (rows / scales).round().clamp(-8, 7).to(torch.int8).numpy().ravel()
    four = ov.Tensor(
        (codes[0::2] & 15 | (codes[1::2] & 15) << 4).astype(np.uint8), ov.Shape([n, k // group, group]), ov.Type.i4
    )
    by = op.multiply(op.convert(op.constant(four), ov.Type.f16), op.constant(scales.numpy().astype(np.float16)))
    whole = op.reshape(by, op.constant(np.array([n, k], np.int64)), False)
    top = weight.abs().amax(1, keepdim=True) / 127
    eight = op.constant((weight / top).round().to(torch.int8).numpy())
    made = {
        "OpenVINO bf16": (op.constant(weight.numpy()), "bf16"),
        "OpenVINO int4 g64": (op.convert(whole, ov.Type.f32), "f32"),
        "OpenVINO int8": (
            op.convert(
                op.multiply(op.convert(eight, ov.Type.f16), op.constant(top.numpy().astype(np.float16))), ov.Type.f32
            ),
            "f32",
        ),
    }
    out: dict[str, Call] = {}
    for name, (w, hint) in made.items():
        model = ov.Model([op.matmul(x, w, False, True)], [x])
        how = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": hint}
        request = ov.Core().compile_model(model, "CPU", how).create_infer_request()
        out[name] = lambda x, request=request: request.infer([x], share_inputs=True, share_outputs=True)
    return out


class Ggml:
    """llama.cpp's kernels by ctypes; types of ggml.h."""

    TYPES = {"q4_0": 2, "q8_0": 8, "q4_k": 12, "bf16": 30, "tq2_0": 35}

    def __init__(self, folder: Path, build: str) -> None:
        """build: whose processor, as `libggml-cpu-*.so` are named."""
        self.base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
        self.top = ctypes.CDLL(str(next(folder.glob("libggml.v*.so"))), mode=ctypes.RTLD_GLOBAL)
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self.init = self._of(self.base, "ggml_init", pointer, _Init)
        self.matrix = self._of(self.base, "ggml_new_tensor_2d", pointer, pointer, ctypes.c_int, number, number)
        self.product = self._of(self.base, "ggml_mul_mat", pointer, pointer, pointer, pointer)
        self.graph = self._of(self.base, "ggml_new_graph", pointer, pointer)
        self.expand = self._of(self.base, "ggml_build_forward_expand", None, pointer, pointer)
        self.alloc = self._of(self.base, "ggml_backend_alloc_ctx_tensors_from_buft", pointer, pointer, pointer)
        size = ctypes.c_size_t
        self.put = self._of(self.base, "ggml_backend_tensor_set", None, pointer, pointer, size, size)
        self.row_size = self._of(self.base, "ggml_row_size", size, ctypes.c_int, number)
        self.quantize = self._of(
            self.base, "ggml_quantize_chunk", size, ctypes.c_int, pointer, pointer, number, number, number, pointer
        )
        self.compute = self._of(self.base, "ggml_backend_graph_compute", ctypes.c_int, pointer, pointer)
        load = self._of(self.top, "ggml_backend_load", pointer, ctypes.c_char_p)
        registered = load(str(folder / f"libggml-cpu-{build}.so").encode())
        device = self._of(self.base, "ggml_backend_reg_dev_get", pointer, pointer, size)(registered, 0)
        self.backend = self._of(self.base, "ggml_backend_dev_init", pointer, pointer, ctypes.c_char_p)(device, None)
        self.plain = self._of(self.base, "ggml_backend_dev_buffer_type", pointer, pointer)(device)
        address = self._of(self.base, "ggml_backend_reg_get_proc_address", pointer, pointer, ctypes.c_char_p)
        threads = address(registered, b"ggml_backend_set_n_threads")
        ctypes.CFUNCTYPE(None, pointer, ctypes.c_int)(threads)(self.backend, 1)
        extra = address(registered, b"ggml_backend_dev_get_extra_bufts")
        many = ctypes.CFUNCTYPE(ctypes.POINTER(pointer), pointer)(extra)(device)
        name = self._of(self.base, "ggml_backend_buft_name", ctypes.c_char_p, pointer)
        self.repacked, i = None, 0
        while many[i]:
            if b"REPACK" in name(many[i]).upper():
                self.repacked = many[i]
            i += 1

    @staticmethod
    def _of(library: Any, name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(library, name)
        function.restype, function.argtypes = result, list(arguments)
        return function

    def _context(self) -> int:
        made: int = self.init(_Init(1 << 21, None, True))
        return made

    def call(self, weight: np.ndarray, kind: str, rows: int, x: np.ndarray) -> Callable[[], None]:
        n, k = weight.shape
        held = self._weights(weight, kind)
        context = self._context()
        given = self.matrix(context, 0, k, rows)
        out = self.product(context, held, given)
        graph = self.graph(context)
        self.expand(graph, out)
        assert self.alloc(context, self.plain)
        self.put(given, x.ctypes.data, 0, x.nbytes)
        return lambda: self.compute(self.backend, graph)

    def _weights(self, weight: np.ndarray, kind: str) -> int:
        n, k = weight.shape
        number = self.TYPES[kind]
        if not hasattr(self, "_held"):
            self._held: dict[str, int] = {}
        if kind not in self._held:
            made = self.matrix(context := self._context(), number, k, n)
            where = self.repacked if self.repacked and kind in ("q4_0", "q4_k") else self.plain
            assert self.alloc(context, where)
            if kind == "bf16":
                codes = (weight.view(np.uint32) >> 16).astype(np.uint16)
            else:
                codes = np.empty(self.row_size(number, k) * n, np.uint8)
                self.quantize(number, weight.ctypes.data, codes.ctypes.data, 0, n, k, None)
            self.put(made, codes.ctypes.data, 0, codes.nbytes)
            self._held[kind] = made
        return self._held[kind]


class _Init(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("memory", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def uv_in(folder: Path) -> str:
    """uv, put into an environment of its own by pip where the machine has none."""
    if found := shutil.which("uv"):
        return found
    boot = folder / "boot"
    if not (boot / "bin" / "uv").exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", boot], check=True)
        subprocess.run(
            [sys.executable, "-m", "pip", "--python", boot / "bin/python", "install", "-q", "uv"], check=True
        )
    return str(boot / "bin" / "uv")


def installed(folder: Path) -> Path:
    """Peers; ggml's libraries."""
    folder.mkdir(parents=True, exist_ok=True)
    venv = folder / "venv"
    own = venv / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    if not (own / "openvino").exists():
        uv = uv_in(folder)
        subprocess.run([uv, "venv", "-q", "--allow-existing", "--python", sys.executable, venv], check=True)
        command = [uv, "pip", "install", "-q", "--no-deps", "--python", venv / "bin" / "python", "openvino"]
        subprocess.run(command, check=True)
    sys.path.append(str(own))
    if not list(folder.glob("*.tgz")):
        subprocess.run(["npm", "pack", "@node-llama-cpp/linux-x64"], cwd=folder, check=True, capture_output=True)
    where = folder / "package" / "bins" / "linux-x64"
    if not where.exists():
        with tarfile.open(next(folder.glob("*.tgz"))) as packed:
            packed.extractall(folder, filter="data")
    return where


def bound_ms(name: str, n: int, k: int, m: int) -> float:
    wide = "bf16" if name == "bf16" else "int8"
    return 1e3 * max(storage_of(name).bytes((n, k)) / BYTES_PER_S, 2 * n * k * m / OPS_PER_S[wide])


def measured(calls: dict[str, Callable[[], Any]], rounds: int, enough: float) -> dict[str, list[float]]:
    """Milliseconds of CPU by name, round by round, in another order each time."""
    out: dict[str, list[float]] = {name: [] for name in calls}
    repeats = {}
    for name, call in calls.items():
        call()
        start = time.process_time()
        call()
        repeats[name] = max(1, min(50, int(enough / max(1e-6, time.process_time() - start))))
    names = list(calls)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start = time.process_time()
            for _ in range(repeats[name]):
                calls[name]()
            out[name].append(1e3 * (time.process_time() - start) / repeats[name])
    return out


MINE: dict[str, tuple[str, Any]] = {
    **{name: (name, "int8") for name in ("int4-g64", "int4-g32", "int4-g128", "int8", "ternary-g64")},
    "bf16": ("bf16", "bf16"),
    "int4-g64 bf16": ("int4-g64", "bf16"),
}
"""Ours: storage and activations."""


class Portions:
    """What was measured, kept between calls of a command, by name; of the same sources and the same `given`."""

    def __init__(self, folder: Path, script: Path, given: str, minutes: float) -> None:
        """minutes: after which no other portion is begun; one is at least."""
        sources = [*sorted(Path(stored.__file__).parent.rglob("*stored*")), script]
        text = b"".join(path.read_bytes() for path in sources if path.is_file() and path.suffix != ".pyc")
        known = hashlib.sha256(text + f"{torch.__version__} {given}".encode()).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{script.stem}-{known}.json"
        self.new, self.ends_s = 0, time.monotonic() + 60 * minutes
        self.found: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}

    def keep(self, name: str, value: Any) -> None:
        self.found[name] = value
        self.new += 1
        self.path.write_text(json.dumps(self.found), encoding="utf-8")
        print(f"{name}: measured", flush=True)

    @property
    def is_over(self) -> bool:
        return self.new > 0 and time.monotonic() > self.ends_s

    def of(self, name: str) -> Any:
        """None where it is still to be measured."""
        return self.found.get(name)


def portion(size: str, rows: int) -> str:
    return f"{size}, {rows} rows"


def measure(size: str, rows: list[int], rounds: int, folder: Path, build: str, portions: Portions) -> bool:
    """Measures what is missing of a size; False where the time was over before."""
    missing = [m for m in rows if portions.of(portion(size, m)) is None]
    if not missing:
        return True
    if portions.is_over:
        return False
    n, k = (int(one) for one in size.split("x"))
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(0)) * 0.02
    library = installed(folder)
    calls: dict[str, Call] = {name: ours(weight, storage, how) for name, (storage, how) in MINE.items()}
    calls |= torch_peers(weight)
    if this_machine().isa == SETS[0]:  # OpenVINO takes what the processor has, whatever this program is told to
        calls |= openvino_peers(weight)
    ggml = Ggml(library, build)
    for m in missing:
        if portions.is_over:
            return False
        x = np.random.default_rng(m).standard_normal((m, k)).astype(np.float32)
        every = {name: partial(call, x) for name, call in calls.items()}
        every |= {f"ggml {kind}": ggml.call(weight.numpy(), kind, m, x) for kind in Ggml.TYPES}
        portions.keep(portion(size, m), measured(every, rounds, 0.02))
    return True


def table(size: str, rows: list[int], portions: Portions) -> list[str]:
    n, k = (int(one) for one in size.split("x"))
    found: dict[tuple[str, int], list[float]] = {}
    for m in rows:
        found |= {(name, m): times for name, times in portions.of(portion(size, m)).items()}
    head = " | ".join(f"{m} rows" for m in rows)
    lines = [f"\n## {n} x {k}\n", f"| | {head} |", "|---|" + "---|" * len(rows)]
    for name in dict.fromkeys(name for name, _ in found):
        cells = []
        for m in rows:
            took = found[name, m]
            text = f"{median(took):.2f} ({min(took):.2f}-{max(took):.2f})"
            if name in MINE:
                least = bound_ms(MINE[name][0], n, k, m)
                text += f", {median(took) / least:.1f} times {least:.2f}"
            cells.append(text)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["\n| goal | rows | peer / ours (rounds) | at the bound | goal | |", "|---|---|---|---|---|---|"]
    for name, m, peer, goal in GOALS:
        if m in rows and (peer, m) in found:
            mine, theirs = found[name, m], found[peer, m]
            ratio, each = median(theirs) / median(mine), [b / a for a, b in zip(mine, theirs, strict=True)]
            best = median(theirs) / bound_ms(MINE[name][0], n, k, m)
            lines.append(
                f"| {name} beside {peer} | {m} | {ratio:.2f} ({min(each):.2f}-{max(each):.2f}) | {best:.2f} | {goal} | "
                f"{'met' if ratio >= goal else 'missed'} |"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="4096x4096,14336x4096", help="outputs x inputs")
    parser.add_argument("--rows", default="1,8,32,128")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peers", type=Path, default=Path.home() / ".cache" / "gnomon" / "lowbit-peers")
    parser.add_argument("--ggml", default="zen4", help="the processor that its kernels are built for; haswell: AVX2")
    parser.add_argument("--minutes", type=float, default=4.5, help="after which no other portion is begun")
    parser.add_argument("--write", action="store_true", help=f"to {RESULT.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [int(one) for one in options.rows.split(",")]
    lines = [
        "# Linear layers with stored weights beside torch, OpenVINO and ggml\n",
        f"{date.today()}, `python {' '.join(['benchmarks/lowbit/kernels.py', *sys.argv[1:]])}`, "
        f"{this_machine().model}, one thread, torch {torch.__version__}, load average {os.getloadavg()[0]:.1f}. "
        "Milliseconds of CPU of a call: median (least-most), and of ours how many times the bound; at the bound: what "
        "the ratio would be there.",
    ]
    portions = Portions(
        options.peers,
        Path(__file__),
        f"{options.rounds} rounds, {options.ggml}, {this_machine().isa.name}",
        options.minutes,
    )
    sizes = options.sizes.split(",")
    with torch.inference_mode():
        for size in sizes:
            if not measure(size, rows, options.rounds, options.peers, options.ggml, portions):
                raise SystemExit(
                    f"{len(portions.found)} of {len(sizes) * len(rows)} portions; the same command goes on"
                )
    for size in sizes:
        lines += table(size, rows, portions)
    print("\n".join(lines))
    if options.write:
        RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
