"""A compiled model on disk: `save` compiles ahead of time, `load` runs where there is no C++ compiler.

A folder: `program.pt2` (torch.export's own file, weights in it), `kernels/` (each kernel's C++ and its library) and
`gnomon.json` with the SHA-256 of each. Inference on the CPU. A library is native code and `program.pt2` may hold
pickles: load what you trust; what others than you and root may write to is refused. On another instruction set
kernels are built from what the program says, or, without a compiler, stay PyTorch's own operations. Leaves out
training and GPUs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import operator
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils import _pytree as pytree

from gnomon.compiler import build
from gnomon.compiler.backend import CompiledGraph
from gnomon.compiler.kernels import convolutions, mersenne
from gnomon.compiler.machine import this_machine
from gnomon.compiler.program import as_declared
from gnomon.compiler.rules.views import VIEWS
from gnomon.compiler.tasks import steps
from gnomon.errors import CaptureError, InputError
from gnomon.trust import others_may_write

log = logging.getLogger("gnomon.compiler")
RECORD, PROGRAM, KERNELS = "gnomon.json", "program.pt2", "kernels"
FORMAT = 1
MEMBER = re.compile(rf"{re.escape(PROGRAM)}|{KERNELS}/\d+\.(cpp|so)")
READ = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR, InputKind.USER_INPUT)
WHOLE = frozenset({"aten::scaled_dot_product_attention"})
"""Composite operations that ATen runs better whole."""
LESS: tuple[dict[str, Any], ...] = ({"packs": True, "works": False}, {})
"""A graph whose convolutions turn out slower where it is loaded is compiled once more, with less in them and then
without (`CompiledGraph`): their kernels are saved too."""


_Plain = tuple[torch.dtype, torch.Size, tuple[int, ...]]


def _strides(expected: torch.Tensor, sizes: Mapping[Any, int]) -> tuple[int, ...]:
    """The strides that a saved input was said to have, of what symbols stand for now."""
    return tuple(one if isinstance(one, int) else int(one.node.expr.subs(sizes)) for one in expected.stride())


def _laid(x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """An input in the layout that kernels read it by, whatever the caller's is: nothing guards a loaded model's calls
    as Dynamo does those of a compiled one. Negation and conjugation that PyTorch put off are done."""
    return as_declared(x.detach().resolve_conj().resolve_neg(), strides)


class LoadedModel:
    """A saved model; called as the module was, with tensors that lie on the CPU. Gradients are not recorded."""

    def __init__(self, exported: ExportedProgram, keywords: list[str]) -> None:
        self.compiled = CompiledGraph(exported.graph_module, packs=True)
        """What runs: its kernels, and steps that are ATen's."""
        self._call = self.compiled.boxed()
        self._in, self._out, self._keywords = exported.call_spec.in_spec, exported.call_spec.out_spec, keywords
        state = {**exported.state_dict, **exported.constants}
        self._specs = exported.graph_signature.input_specs
        self._held: list[Any] = [
            None if spec.kind is InputKind.USER_INPUT else state[str(spec.target)].detach() for spec in self._specs
        ]
        nodes = [node for node in exported.graph.nodes if node.op == "placeholder"]
        self._wanted: list[tuple[str, Any]] = [
            (node.name, spec.arg.value if isinstance(spec.arg, ConstantArgument) else node.meta["val"])
            for node, spec in zip(nodes, self._specs, strict=True)
            if spec.kind is InputKind.USER_INPUT
        ]
        self._ranges = {symbol: (one.lower, one.upper) for symbol, one in exported.range_constraints.items()}
        self._places = [n for n, spec in enumerate(self._specs) if spec.kind is InputKind.USER_INPUT]
        self._plain = self._plain_inputs()
        self._bare = self._out == pytree.tree_structure(0)
        """Whether it returns one result by itself."""

    def _plain_inputs(self) -> tuple[_Plain, ...] | None:
        """Dtypes, sizes and strides of the inputs where they are tensors of fixed sizes, one beside the other, which
        are looked at without being taken apart: that takes as long as a small model. None of other inputs."""
        wanted = [one for _, one in self._wanted]
        if self._keywords or not all(isinstance(one, torch.Tensor) for one in wanted):
            return None
        if self._in != pytree.tree_structure((tuple(wanted), {})):
            return None
        if not all(isinstance(size, int) for one in wanted for size in one.shape):
            return None
        return tuple((one.dtype, torch.Size(one.shape), tuple(one.stride())) for one in wanted)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns. InputError where an input is not of the saved kind, dtype or size."""
        flat = None if kwargs or self._plain is None else self._flat(args, self._plain)
        if flat is None:
            flat = self._looked_at(args, kwargs)
        grad = torch.is_grad_enabled()
        if grad:
            torch._C._set_grad_enabled(False)  # as `torch.no_grad`, without an object for it
        try:
            results = self._call(flat)
        finally:
            if grad:
                torch._C._set_grad_enabled(True)
        return results[0] if self._bare else pytree.tree_unflatten(results, self._out)

    def _flat(self, args: tuple[Any, ...], plain: tuple[_Plain, ...]) -> list[Any] | None:
        """What the graph takes; None of inputs that are not as they were saved, for `_looked_at` to say why."""
        if len(args) != len(plain):
            return None
        flat = self._held.copy()
        for place, one, (dtype, sizes, strides) in zip(self._places, args, plain, strict=True):
            if type(one) not in steps.PLAIN or one.dtype is not dtype or one.shape != sizes or not one.is_cpu:
                return None
            if one.layout is not torch.strided:
                return None
            flat[place] = (
                one if one.stride() == strides and not one.is_neg() and not one.is_conj() else _laid(one, strides)
            )
        return flat

    def _looked_at(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        if set(kwargs) != set(self._keywords):
            raise InputError(f"it was saved with the keyword arguments {self._keywords}, and got {sorted(kwargs)}")
        inputs, spec = pytree.tree_flatten((args, {name: kwargs[name] for name in self._keywords}))
        if spec != self._in:
            raise InputError(f"inputs are nested as {spec}, and were saved as {self._in}")
        sizes = self._check(inputs)
        flat = self._held.copy()
        for place, (_, expected), one in zip(self._places, self._wanted, inputs, strict=True):
            flat[place] = _laid(one, _strides(expected, sizes)) if isinstance(one, torch.Tensor) else one
        return flat

    def _check(self, inputs: list[Any]) -> dict[Any, int]:
        """What symbols stand for."""
        sizes: dict[Any, int] = {}
        for (name, expected), one in zip(self._wanted, inputs, strict=True):
            if not isinstance(expected, torch.Tensor):
                if type(one) is not type(expected) or one != expected:
                    raise InputError(f"input {name!r} is {one!r}, and was saved as {expected!r}")
                continue
            saved = f"{expected.dtype} {tuple(map(str, expected.shape))} on the CPU"
            if not isinstance(one, torch.Tensor) or one.device.type != "cpu" or one.dtype != expected.dtype:
                is_a = f"{one.dtype} on {one.device}" if isinstance(one, torch.Tensor) else type(one).__name__
                raise InputError(f"input {name!r} is {is_a}, and was saved as {saved}")
            if one.dim() != expected.dim() or not all(
                self._fits(size, at, sizes) for size, at in zip(expected.shape, one.shape, strict=True)
            ):
                raise InputError(f"input {name!r} is {tuple(one.shape)}, and was saved as {saved}{self._limits()}")
            if one.layout is not torch.strided:
                raise InputError(
                    f"input {name!r} is {one.layout}, and was saved as {saved}: give it dense (to_dense())"
                )
        return sizes

    def _fits(self, expected: int | torch.SymInt, size: int, sizes: dict[Any, int]) -> bool:
        """Whether a size is the saved one, or within the range of its symbol and equal wherever that stands."""
        if isinstance(expected, int):
            return size == expected
        expression = expected.node.expr
        # The first size that a symbol stands for is its value; wherever else it stands, alone or in an expression, it
        # has to agree.
        if expression.is_Symbol and expression not in sizes:
            low, high = self._ranges.get(expression, (0, float("inf")))
            sizes[expression] = size
            return bool(low <= size <= high)
        return bool(expression.subs(sizes) == size)

    def _limits(self) -> str:
        return "".join(f"; {low} <= {symbol} <= {high}" for symbol, (low, high) in self._ranges.items())


def save(
    module: torch.nn.Module,
    inputs: tuple[Any, ...],
    path: str | Path,
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> Path:
    """Compiles a module for inference and writes it to a new folder.

    inputs, kwargs: examples, as `torch.export.export` takes them. dynamic_shapes: torch.export's; sizes that it does
    not name are fixed. Raises CaptureError where torch.export cannot record the module, InputError where the folder
    exists, the model is not on the CPU or there is no C++ compiler.
    """
    target = Path(path)
    if target.exists():
        raise InputError(f"{target} exists already: give a new folder")
    if not build.has_compiler():
        raise InputError("saving needs a C++ compiler (g++, or CXX): loading does not")
    keywords = dict(kwargs or {})
    exported = _exported(module, inputs, keywords, dynamic_shapes)
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        with quiet():
            torch.export.save(exported, work / PROGRAM)
        # As it is read back, so that what is compiled here is what a process that loads it asks for.
        ways = [CompiledGraph(_read(work / PROGRAM).graph_module, packs=True)]
        if ways[0].convolutions:
            ways += [CompiledGraph(_read(work / PROGRAM).graph_module, **how) for how in LESS]
        _write_kernels(ways, work / KERNELS)
        files = sorted(path for path in work.rglob("*") if path.is_file())
        record = {
            "format": FORMAT,
            "torch": torch.__version__,
            "isa": this_machine().isa.name,
            "keywords": list(keywords),
            "files": {file.relative_to(work).as_posix(): _digest(file) for file in files},
        }
        (work / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
        for path in (work, *work.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)  # whatever the umask: `load` refuses what others may write
        # A folder of that name is there whole or not at all.
        work.rename(target)
    # Interrupts too, so that no half folder is left.
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return target


def load(path: str | Path) -> LoadedModel:
    """A saved model, ready to be called. Raises InputError where the folder is not whole."""
    folder = Path(path)
    record = _record(folder)
    for name in record["files"]:
        # The record comes from outside: no name may lead out of the folder.
        if not MEMBER.fullmatch(name):
            raise InputError(f"{folder / RECORD} names {name!r}, which is no file of a saved model")
    # Before digests are compared: what others may write to could be changed right after that.
    _check_writers(folder, [RECORD, *record["files"]])
    for name, digest in record["files"].items():
        try:
            whole = _digest(folder / name) == digest
        except OSError as error:
            raise InputError(f"{folder / name} cannot be read ({error.strerror}): save the model again") from None
        if not whole:
            raise InputError(f"{folder / name} is damaged (its SHA-256 is not the recorded one): save the model again")
    if record["isa"] == this_machine().isa.name:
        for name in record["files"]:
            if name.endswith(".so"):
                build.adopt((folder / name).with_suffix(".cpp").read_text(encoding="utf-8"), folder / name)
    else:
        log.warning("%s was saved for %s and this is %s: its kernels are built anew, or stay PyTorch's operations",
                    folder, record["isa"], this_machine().isa.name)  # fmt: skip
    try:
        exported = _read(folder / PROGRAM)
    except Exception as error:  # torch's own, of many types
        raise InputError(
            f"torch {torch.__version__} cannot read {folder / PROGRAM}, which torch {record['torch']} wrote ({error}); "
            "where it returns a library's own type (transformers' outputs), import that library first"
        ) from error
    return LoadedModel(exported, list(record["keywords"]))


@contextmanager
def quiet() -> Iterator[None]:
    """torch.export warns of its own use of what torch deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _read(path: Path) -> ExportedProgram:
    """A program, without the results of operations that torch.export names and nobody reads."""
    with quiet():
        exported = torch.export.load(path)
    for node in list(exported.graph.nodes):
        if node.target is operator.getitem and not node.users:
            exported.graph.erase_node(node)
    _say_views(exported)
    return exported


def _say_views(exported: ExportedProgram) -> None:
    """Has views lie in the memory of what they are views of, at their place: the file has sizes and strides of each
    node's result, but neither whose memory it is nor, of a part of a split, where that begins."""
    for node in exported.graph.nodes:
        parted = node.target is operator.getitem and node.args[0].target in VIEWS
        if node.op != "call_function" or not (parted or node.target in VIEWS):
            continue
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
        mode = detect_fake_mode([value for value in pytree.tree_leaves(args) if isinstance(value, torch.Tensor)])
        with mode or nullcontext():
            made = node.target(*args, **kwargs)
        said = node.meta.get("val")
        if not isinstance(said, torch.Tensor) or _layout(made) == _layout(said):
            node.meta["val"] = made


def _layout(value: torch.Tensor) -> tuple[Any, ...]:
    return value.dtype, *map(str, (*value.shape, *value.stride()))


def _record(folder: Path) -> dict[str, Any]:
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{folder} is not a saved model: {RECORD} cannot be read ({error.strerror})") from None
    except ValueError:
        raise InputError(f"{folder / RECORD} is damaged: it is not JSON; save the model again") from None
    kinds = {"format": int, "torch": str, "isa": str, "keywords": list, "files": dict}
    if not isinstance(record, dict) or not all(isinstance(record.get(key), kind) for key, kind in kinds.items()):
        raise InputError(f"{folder / RECORD} is not of a saved model: it needs {', '.join(kinds)}")
    if record["format"] != FORMAT:
        raise InputError(f"{folder} has format {record['format']} and this Gnomon reads {FORMAT}: save it again")
    if PROGRAM not in record["files"]:
        raise InputError(f"{folder / RECORD} names no {PROGRAM}: save the model again")
    return record


def _check_writers(folder: Path, names: list[str]) -> None:
    """InputError where others may have written what is run as code."""
    for path in (folder, folder / KERNELS, *(folder / name for name in names)):
        if path.exists() and (wrong := others_may_write(path)) is not None:
            raise InputError(f"a saved model is code, and {wrong}")


def _exported(
    module: torch.nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> ExportedProgram:
    """The module's ATen graph as the compiler's rules know it."""
    state = [*module.named_parameters(), *module.named_buffers()]
    if elsewhere := [name for name, tensor in state if tensor.device.type != "cpu"]:
        raise InputError(f"{elsewhere[0]!r} is not on the CPU: models are saved for CPUs (module.cpu())")
    for name, inner in module.named_modules():  # torch.export says of one that it "does not have a field"
        if any(isinstance(one, torch.ScriptObject) for one in vars(inner).values()):
            raise CaptureError(
                f"{name.removesuffix('._packed_params') or type(module).__name__!r} has a packed weight, as the layers "
                "of quantize_dynamic have, which torch.export cannot record: save the module as it was, and give "
                'the quantised one to torch.compile(backend="gnomon")'
            )
    try:
        with torch.no_grad(), quiet():
            first = torch.export.export(module, inputs, kwargs, dynamic_shapes=dynamic_shapes)
            exported = first.run_decompositions(_composites())
    except Exception as error:  # torch's own, of many types
        raise CaptureError(f"torch.export cannot record {type(module).__name__}: {str(error).strip()}") from error
    signature, name = exported.graph_signature, type(module).__name__
    for output in signature.output_specs:
        if output.kind is not OutputKind.USER_OUTPUT:
            kind = output.kind.name.lower().replace("_", " ")
            raise CaptureError(f"{name} writes {output.target!r} when it is called ({kind}): only models that write "
                               "nothing can be saved (module.eval()?)")  # fmt: skip
    for one in signature.input_specs:
        if one.kind not in READ:
            raise CaptureError(f"{name} reads {one.target!r}, a {one.kind.name.lower()}, which cannot be saved")
    exported._example_inputs = None  # would be written too
    return exported


def _composites() -> dict[Any, Any]:
    """Decompositions of what ATen itself takes apart, and no others: what PyTorch traces under `torch.compile`."""
    every = torch.export.default_decompositions().items()
    whole = torch._C._dispatch_has_kernel_for_dispatch_key
    return {
        op: how
        for op, how in every
        if whole(op.name(), "CompositeImplicitAutograd") and op.name().partition(".")[0] not in WHOLE
    }


def _write_kernels(ways: Sequence[CompiledGraph], folder: Path) -> None:
    """C++ and library of every kernel of a graph, compiled in several ways, and its loops' bodies."""
    sources: dict[str, None] = {}
    for one in (one for compiled in ways for one in compiled.whole()):
        sources |= dict.fromkeys(p.kernel.source for p in one.program.groups if p.function is not None)
        sources |= dict.fromkeys(one.texts)
        sources[steps.SOURCE] = None
        if one.convolutions:
            sources[convolutions.DIGEST.read_text(encoding="utf-8")] = None
        if one.draws:
            sources[mersenne.source()] = None
    folder.mkdir()
    for number, source in enumerate(sources):
        if (library := build.library_of(source)) is not None:
            (folder / f"{number}.cpp").write_text(source, encoding="utf-8")
            shutil.copyfile(library, folder / f"{number}.so")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
