"""Generated kernels under AddressSanitizer and UndefinedBehaviorSanitizer: `python benchmarks/compiler/sanitized.py`.

Runs the tests of tests/compiler and of the engine's latent attention, then samples of OpInfo (`--opinfo`) and the tiny
models of transformers (`--models`), with kernels built with `-fsanitize=address,undefined` and libasan loaded before
Python, so that torch's buffers have red zones. Once with the instruction set of this machine and once with the generic
one: compilers do not check masked vector loads and stores, plain loops they do. The first error ends the tests; the
other two, whose kernels are compiled many in a library (`sanitized_batch.py`), go on after one. First a kernel that
reads one element too far is built and run: where that is not caught, nothing here says anything. Exits with 1 at any
error of a sanitizer. Left out: leaks, which are Python's and torch's too; whether results are right, which
`tests/compiler/opinfo.py` says.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -O1"
GOES_ON = "-fsanitize=address,undefined -fsanitize-recover=address,undefined -fno-omit-frame-pointer -O0"
CAUGHT = 99
"""Exit status of a process that a sanitizer ended."""
TOO_FAR = """
import torch
from gnomon.compiler import build
source = 'extern "C" int gnomon_kernel(float* a, long n, float* out) { float s = 0; for (long i = 0; i <= n; i++) s += a[i]; *out = s; return 0; }'
[function] = build.libraries([source])
a, out = torch.randn(1000), torch.zeros(1)
import ctypes
function(ctypes.c_void_p(a.data_ptr()), ctypes.c_long(1000), ctypes.c_void_p(out.data_ptr()))
"""  # noqa: E501
SERVED = ("tests/serve/test_latent_kernel.py",)
"""Of kernels of the engine, whose room is their own."""
TESTS = (
    "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/compiler", *SERVED, "--ignore",
    "tests/compiler/test_triton.py",
    "--deselect", "tests/compiler/test_backend.py::test_a_damaged_file_of_the_cache_is_made_again",
)  # fmt: skip
"""Deselected: a test that compares bytes of libraries, which hold the path of their source when sanitized."""


def library(name: str) -> str:
    """Where g++ has it."""
    found = subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        sys.exit(f"g++ has no {name}: install its sanitizers' libraries")
    return found


def run(
    words: tuple[str, ...], cache: str, isa: str, *, goes_on: bool = False, preload: bool = True
) -> subprocess.CompletedProcess[str]:
    """A Python process with sanitized kernels. goes_on: after an error; preload: with the sanitizers' own memory."""
    halt = int(not goes_on)
    env = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}",
        "ASAN_OPTIONS": f"detect_leaks=0:alloc_dealloc_mismatch=0:halt_on_error={halt}:exitcode={CAUGHT}",
        "UBSAN_OPTIONS": f"print_stacktrace=1:halt_on_error={halt}:exitcode={CAUGHT}",
        "GNOMON_CXXFLAGS": GOES_ON if goes_on else FLAGS,
        "GNOMON_CACHE": cache,
        "OMP_NUM_THREADS": "2",
    }
    if preload:
        env["LD_PRELOAD"] = f"{library('libasan.so')}:{library('libubsan.so')}"
    if isa:
        env["GNOMON_ISA_NAME"] = isa
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True)


def batched(suite: str, cache: str, isa: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """(the run of a suite of sanitized_batch.py, how many kernels it had)."""
    script = str(Path(__file__).with_name("sanitized_batch.py"))
    folder = Path(cache) / f"{suite.replace(':', '-')}-{isa}"
    asked = Path(cache) / f"{suite.replace(':', '-')}.json"  # texts are the same for all instruction sets
    counts = []
    gather, build = ("gather", suite, str(asked)), ("build", str(asked), str(folder))
    for words in (build,) if asked.exists() else (gather, build):
        done = run((script, *words), cache, isa, goes_on=True, preload=False)
        if done.returncode:
            return done, f"not run: {words[0]} failed"
        counts.append(done.stdout.strip().splitlines()[-1])
    done = run((script, "run", suite, str(folder)), cache, isa, goes_on=True)
    return done, f"{counts[-1]}, {(done.stderr.strip().splitlines() or [''])[-1]}"


def main() -> int:
    """A line for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--opinfo", action="store_true", help="OpInfo's samples too (minutes)")
    parser.add_argument("--samples", type=int, default=4, help="of an operation, dtype and direction, at most")
    parser.add_argument("--models", action="store_true", help="the tiny models of transformers too (minutes)")
    parser.add_argument("--no-tests", action="store_true", help="without tests/compiler")
    parser.add_argument("--isa", default=",generic", help="names, empty for this machine's own")
    parser.add_argument("--only", default="", help="files of these, as test_stored,test_gathered,test_latent_kernel")
    options = parser.parse_args()
    own = {Path(file).stem: file for file in SERVED}
    files = [own.get(name, f"tests/compiler/{name}.py") for name in options.only.split(",") if name]
    tests = (*TESTS[:5], *files) if files else TESTS
    runs: dict[str, tuple[str, ...]] = {} if options.no_tests else {" ".join(files) or "tests/compiler": tests}
    if options.opinfo:
        runs["OpInfo"] = (f"opinfo:{options.samples}",)
    if options.models:
        runs["transformers"] = ("models",)
    bad = 0
    with tempfile.TemporaryDirectory() as cache:
        for isa in options.isa.split(","):
            caught = run(("-c", TOO_FAR), cache, isa)
            if caught.returncode != CAUGHT or "heap-buffer-overflow" not in caught.stderr:
                print(f"a read beyond the end is not caught:\n{caught.stderr[-2000:]}")
                return 1
            for name, words in runs.items():
                began = time.perf_counter()
                done, kernels = batched(words[0], cache, isa) if words != tests else (run(words, cache, isa), "")
                said = [
                    line
                    for line in done.stderr.splitlines()
                    if "ERROR: AddressSanitizer" in line or "runtime error:" in line
                ]
                printed = done.stdout.strip().splitlines() or [""]
                last = next((line for line in printed if line.startswith("| all ")), printed[-1])
                print(
                    f"{isa or 'instruction set of this machine'}: {name}: {last}; {kernels + '; ' if kernels else ''}"
                    f"exit status {done.returncode}, {len(said)} errors of sanitizers, "
                    f"{time.perf_counter() - began:.0f} s",
                    flush=True,
                )
                if done.returncode in (CAUGHT, *range(-64, 0)) or said or (done.returncode and words == tests):
                    bad = 1
                    print("\n".join((*said, done.stdout[-3000:], done.stderr[-6000:])))
    return bad


if __name__ == "__main__":
    sys.exit(main())
