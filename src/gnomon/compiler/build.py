"""Text of kernels compiled and loaded: g++ in parallel, kept on disk by content, verified before it is loaded.

`libraries` takes sources and gives functions, None where a source does not compile or there is no compiler. A
file's name holds the key of what made it (source, headers, flags, compiler) and its bytes signed with a key of the
user's (`trust`), so that processes may write at the same time, a damaged file is built anew, and one that somebody
else put there is not loaded. A folder that others may write to is not used. Leaves out what is worth compiling.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gnomon.compiler.machine import InstructionSet, cxx, this_machine
from gnomon.trust import Seal, new_seal, others_may_write, private_folder, seal_in, user_folder

log = logging.getLogger("gnomon.compiler")
CPP = Path(__file__).with_name("cpp")
"""The folder of the kernels' C++: sources, and the headers that they share."""
FLAGS = (
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-shared",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-exceptions",
    "-fno-rtti",
    "-ffp-contract=fast",
    "-Wno-psabi",
)
ASKS = "// flags: "
"""How a source's first line begins where it asks for flags of its own."""
FUNCTION = "gnomon_kernel"
ABANDONED_S = 3600.0
"""Seconds after which no compilation is still under way."""
Function = Callable[..., int]

_loaded: dict[str, Function | None] = {}
_lock = threading.Lock()


def cache_folder() -> Path:
    """GNOMON_CACHE, else the user's cache folder; where others may write to that, one of this process alone."""
    return _kept(_asked_folder(), user_folder())[0]


def _asked_folder() -> Path:
    folder = os.environ.get("GNOMON_CACHE")
    if folder:
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "gnomon" / "compiler"


@cache
def _kept(folder: Path, of_key: Path) -> tuple[Path, Seal]:
    """Finds where libraries are kept and what signs them. of_key: the folder of the user's key."""
    try:
        wrong, seal = private_folder(folder), seal_in(of_key)
    except OSError as error:
        wrong, seal = f"{error.filename or folder} cannot be used ({error.strerror})", new_seal()
    if wrong is None and isinstance(seal, Seal):
        return folder, seal
    log.warning(
        "compiled kernels are not kept from one process to the next: %s (or set GNOMON_CACHE and GNOMON_HOME to "
        "folders of your own)", wrong or seal
    )  # fmt: skip
    private = tempfile.mkdtemp(prefix="gnomon-kernels-")  # of mode 700
    atexit.register(_remove, private, os.getpid())
    return Path(private), new_seal()


def _remove(folder: str, maker: int) -> None:
    """Removes a folder at the end of the process that made it; those that were forked from it may end earlier."""
    if os.getpid() == maker:
        shutil.rmtree(folder, ignore_errors=True)


def seal() -> Seal:
    """What signs the libraries of `cache_folder`."""
    return _kept(_asked_folder(), user_folder())[1]


@cache
def _compiler() -> tuple[str, str] | None:
    """(path, version) of a compiler that answers."""
    path = cxx()
    if path is None:
        return None
    try:
        version = subprocess.run([path, "-dumpfullversion", "-dumpmachine"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return (path, version.stdout.strip()) if version.returncode == 0 else None


def has_compiler() -> bool:
    return _compiler() is not None


@cache
def _headers() -> str:
    return "".join(path.read_text(encoding="utf-8") for path in sorted(CPP.glob("*.h")))


def asked_flags() -> list[str]:
    """Reads GNOMON_CXXFLAGS: more flags for the compiler, as -fsanitize=address. A quotation that does not end is the
    compiler's to refuse, as other flags that it does not know."""
    flags = os.environ.get("GNOMON_CXXFLAGS", "")
    try:
        return shlex.split(flags)
    except ValueError:
        return flags.split()


def key_of(source: str, isa: InstructionSet | None = None, extra: Sequence[str] = ()) -> str:
    """What a source compiles to depends on this alone."""
    isa, flags = isa or this_machine().isa, [*FLAGS, *asked_flags(), *extra]
    compiler = _compiler()
    # No part holds a zero byte, so other parts never join to the same text.
    content = "\0".join((source, _headers(), *flags, *isa.flags, compiler[1] if compiler else "", _openmp()))
    return hashlib.sha256(content.encode()).hexdigest()[:32]


@cache
def _openmp() -> str:
    """The folder of the OpenMP that torch itself uses: a second pool of threads would halve both."""
    folder = Path(torch.__file__).parent / "lib"
    return str(folder) if (folder / "libgomp.so.1").exists() else ""


def command(source: Path, target: Path, isa: InstructionSet, extra: Sequence[str] = ()) -> list[str]:
    compiler = _compiler()
    assert compiler is not None
    linked = [f"-L{_openmp()}", f"-Wl,-rpath,{_openmp()}"] if _openmp() else []
    return [
        compiler[0],
        *FLAGS,
        *asked_flags(),
        *isa.flags,
        f'-DGNOMON_ISA="{isa.header}"',
        f"-I{CPP}",
        *extra,
        str(source),
        "-o",
        str(target),
        *linked,
    ]


def libraries(sources: Sequence[str]) -> list[Function | None]:
    """A function for each source, in order; those that are new are compiled beside each other."""
    keys = [key_of(source) for source in sources]
    with _lock:
        missing = {key: source for key, source in zip(keys, sources, strict=True) if key not in _loaded}
    if missing:
        with ThreadPoolExecutor(max_workers=max(1, min(this_machine().cores, len(missing)))) as pool:
            functions = list(pool.map(_one, missing.items()))
        with _lock:
            # Another thread may have loaded the same meanwhile: whichever came first stays.
            for key, function in zip(missing, functions, strict=True):
                _loaded.setdefault(key, function)
    return [_loaded[key] for key in keys]


def kernel_of(source: str, *arguments: Any) -> Callable[..., int] | None:
    """The function of a source as Python calls it, compiled where it is not known; None where it does not compile.

    arguments: ctypes of what it takes.
    """
    [function] = libraries([source])
    return None if function is None else typed(function, *arguments)


def address_of(function: Any) -> int:
    """Returns the address at which a function of a library begins."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def typed(function: Function, *arguments: Any) -> Callable[..., int]:
    """A library's function with its arguments' ctypes said, so that plain integers are pointers."""
    return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(address_of(function))


def library_of(source: str) -> Path | None:
    """The file of a source's library, built where it is not there; None where it does not compile."""
    [function] = libraries([source])
    return None if function is None else _on_disk(key_of(source)) or compiled(key_of(source), source)


def adopt(source: str, library: Path) -> None:
    """Has a library that came with a saved model in the place of building its source."""
    key = key_of(source)
    with _lock:
        if _loaded.get(key) is None:
            _loaded[key] = function_of(library)


TRIES = 5
"""To have a kernel that is there when it is loaded."""


def _one(item: tuple[str, str]) -> Function | None:
    key, source = item
    failed: OSError | None = None
    for _ in range(TRIES):  # a process of another seal may take a file away between its making and its loading
        path: Path | None = None
        try:
            path = _on_disk(key) or (compiled(key, source) if has_compiler() else None)
            return None if path is None else function_of(path)
        except OSError as error:
            failed = error
            if path is None or path.exists():
                break
    log.warning("kernels cannot be kept or loaded (%s): their operations stay PyTorch's", failed)
    return None


def function_of(path: Path) -> Function:
    function = getattr(ctypes.CDLL(str(path)), FUNCTION)
    function.restype = ctypes.c_int
    return function  # type: ignore[no-any-return]


def _on_disk(key: str) -> Path | None:
    """A file of this key that this user signed and nobody else may write to; others of the key are removed."""
    for path in cache_folder().glob(f"{key}-*.so"):
        try:
            wrong = f"{path} is a link" if path.is_symlink() else others_may_write(path)
            if wrong is not None:
                log.warning("a compiled kernel is not loaded, and is built anew: %s", wrong)
            elif seal().fits(path.read_bytes(), path.stem.rpartition("-")[2]):
                return path
        except FileNotFoundError:  # another process removed it first
            continue
        path.unlink(missing_ok=True)
    return None


@cache
def _sweep(folder: Path) -> None:
    """Removes what processes that were killed left in the middle of a compilation, once in a process."""
    for path in folder.glob("making-*"):
        try:
            if time.time() - path.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # another process was faster
            continue


def compiled(key: str, source: str) -> Path | None:
    """Compile into the cache; None (and a line in the log) where the compiler refuses."""
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it may have been removed since
    _sweep(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix="making-") as work:
        text, target = Path(work) / "kernel.cpp", Path(work) / "kernel.so"
        text.write_text(source, encoding="utf-8")
        first = source.partition("\n")[0]
        own = first.removeprefix(ASKS).split() if first.startswith(ASKS) else []
        done = subprocess.run(command(text, target, this_machine().isa, own), capture_output=True, text=True)
        if done.returncode:
            log.warning("a kernel does not compile, its operations stay PyTorch's: %s", done.stderr[:2000])
            log.debug("%s", source)
            return None
        # Whatever the umask: a file that others may write to is refused when it is loaded.
        target.chmod(0o600)
        # Renamed when it is whole, so no other process loads half of it.
        final = folder / f"{key}-{seal().of(target.read_bytes())}.so"
        os.replace(target, final)
    return final
