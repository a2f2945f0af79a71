"""`torch.compile(model, backend="gnomon")`: Dynamo's graphs through AOTAutograd to programs of groups and ATen
calls.

`gnomon` is the backend that the entry point of `torch_dynamo_backends` names; it needs no import. Inference and
training, static and symbolic shapes. Whatever goes wrong inside becomes one line in the log and PyTorch's own
operations. Leaves out what is compiled (`program`) and whether it is kept (`gate`).
"""

from __future__ import annotations

import copy
import ctypes
import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import _disable_current_modes

from gnomon.compiler import dispatch
from gnomon.compiler.build import address_of, has_compiler, libraries
from gnomon.compiler.graph import dropout, kept, log_softmax
from gnomon.compiler.graph.mixed_norm import say_statistics
from gnomon.compiler.graph.summary import summary
from gnomon.compiler.kernels import (
    attention,
    columns,
    convolutions,
    experts,
    linears,
    mersenne,
    pairs,
    pairs_backward,
    pixels_backward,
    pools,
    products,
    quantized,
    recurrent,
    recurrent_modules,
    recurrent_training,
    scan,
    scan_tracing,
    table_gradient,
    table_pairs,
)
from gnomon.compiler.kernels.chains import fuse as fuse_chains
from gnomon.compiler.kernels.live import fuse as fuse_live
from gnomon.compiler.kernels.preview import fuse as preview_of_pools
from gnomon.compiler.kernels.ragged import Ragged
from gnomon.compiler.program import LINES, PlannedGroup, Program, Table, Writer, may_fail, program, write
from gnomon.compiler.rules.views import say_views
from gnomon.compiler.stencil import call as stencil_call
from gnomon.compiler.tasks import loops, steps
from gnomon.compiler.tasks.steps import Run, join_runs
from gnomon.compiler.text.triton_launch import launchers
from gnomon.compiler.text.triton_module import has_triton
from gnomon.compiler.text.triton_text import TritonKernel
from gnomon.compiler.tune import gate, tuner
from gnomon.compiler.tune.gate import Again, Trial
from gnomon.errors import InputError

log = logging.getLogger("gnomon.compiler")
_said: set[str] = set()

reports: list[CompiledGraph] = []
"""What was compiled in this process, the newest last; `gnomon compile --explain` reads it. At most `KEPT`."""
KEPT = 64
CALL_S = 3e-6
"""What Python takes to make an output and call a kernel, at least."""
SOON = 32
"""Calls after the trials within which kernels are compared once more."""


def gnomon(
    module: torch.fx.GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None, **_: Any
) -> Callable[..., Any]:
    """Compiles a traced graph for `torch.compile(backend="gnomon")`. options: `tune_s`, seconds in which each graph's
    tilings are measured (`tuner`); `ragged`, the name of the argument that says which positions of a padded batch are
    there (`ragged`); `frozen`, whether weights are written no more (`live`); `preview`, whether results may be near in
    place of equal (`preview`). Others are accepted and ignored, so that
    code written for another backend runs."""
    tune_s, frozen, preview = (
        seconds_of(options or {}),
        flag_of(options or {}, "frozen"),
        flag_of(options or {}, "preview"),
    )
    mask = mask_of(options or {}, module)
    on_gpu = any(isinstance(x, torch.Tensor) and x.is_cuda for x in inputs)
    if not (has_triton() if on_gpu else has_compiler()):
        lacks = "Triton is not installed" if on_gpu else "no C++ compiler was found (g++ or CXX)"
        say_once(f"{lacks}: backend 'gnomon' runs PyTorch's own operations")
        return module.forward
    if not on_gpu and not recurrent.keep(module):
        return module.forward
    scan_tracing.widen(module)
    through = aot_autograd(
        fw_compiler=partial(compile_graph, tune_s=tune_s),
        bw_compiler=partial(compile_graph, saved=True, tune_s=tune_s),
        inference_compiler=partial(
            compile_graph, learns=False, tune_s=tune_s, frozen=frozen, mask=mask, preview=preview
        ),
        partition_fn=partition,
        # Writes to inputs stay operations of the graph, where `program` keeps their order.
        keep_inference_input_mutations=True,
    )
    return through(module, inputs)  # type: ignore[no-any-return]


recurrent_modules.allow(gnomon)
scan_tracing.allow(gnomon)
quantized.allow(gnomon)
dispatch.allow(gnomon)


def partition(joint: torch.fx.GraphModule, *inputs: Any, **sizes: Any) -> tuple[torch.fx.GraphModule, ...]:
    """Forward and backward of a joint graph: what is kept between is the least of bytes."""
    dropout.split(joint.graph)
    log_softmax.split(joint.graph)
    say_statistics(joint.graph)
    kept.keep(joint.graph)
    return min_cut_rematerialization_partition(joint, *inputs, **sizes)


def say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        log.warning("%s", message)


def seconds_of(options: dict[str, Any]) -> float:
    """The seconds for tuning that somebody asks for, 0 where nobody does."""
    seconds = options.get("tune_s", 0.0)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < float("inf"):
        raise InputError(f'options={{"tune_s": {seconds!r}}}: a number of seconds, 0 or more, as {{"tune_s": 30}}')
    return float(seconds)


FLAGS = {
    "frozen": "where weights are not written any more",
    "preview": "where results may be near in place of equal",
}
"""What somebody may say, and when."""


def flag_of(options: dict[str, Any], name: str) -> bool:
    """Whether somebody says so."""
    flag = options.get(name, False)
    if not isinstance(flag, bool):
        raise InputError(f"options={{{name!r}: {flag!r}}}: True {FLAGS[name]}, or False")
    return flag


def mask_of(options: dict[str, Any], module: torch.fx.GraphModule) -> int | None:
    """Finds the input of Dynamo's graph that says which rows of a padded batch are there; None where nobody asks, or it
    has none."""
    name = options.get("ragged")
    if name is None:
        return None
    if not isinstance(name, str) or not name.isidentifier():
        raise InputError(
            f'options={{"ragged": {name!r}}}: the name of the argument that says which positions of a padded batch are '
            'there, as {"ragged": "attention_mask"}'
        )
    inputs = [node.name.strip("_").lower() for node in module.graph.nodes if node.op == "placeholder"]
    found = [n for n, one in enumerate(inputs) if one == name.lower() or one.endswith(f"_{name.lower()}")]
    if len(found) != 1:
        count = "more than one" if found else "no"
        say_once(f"ragged: {count} input of a graph is named {name}: its products stay whole")
        return None
    return found[0]


def compile_graph(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    learns: bool = True,
    saved: bool = False,
    tune_s: float = 0.0,
    frozen: bool = False,
    mask: int | None = None,
    preview: bool = False,
) -> Callable[..., Any]:
    """A boxed function of an ATen graph. learns: whether weights may change between calls. saved: whether its inputs
    may lie otherwise than it says: a backward's, which the forward kept, or of a loop's body, which is given rows.
    frozen: whether weights are written no more. preview: whether results may be near. mask: the input that says what
    of a padded batch is there."""
    try:
        compiled = CompiledGraph(
            module,
            packs=not learns,
            saved=saved,
            tune_s=tune_s,
            live=not learns,
            frozen=frozen,
            mask=mask,
            preview=preview,
        )
    except Exception as error:  # a mistake of ours must not stop a model that runs in eager
        say_once(f"a graph stays PyTorch's own operations: {type(error).__name__}: {error}")
        log.debug("why", exc_info=True)
        return make_boxed_func(module.forward)  # type: ignore[no-any-return]
    return compiled.boxed()


def _alone(module: torch.fx.GraphModule, layers: int) -> Callable[[list[Any]], Any]:
    """A part of a graph compiled with chains of so many layers at most, as a function of a list; it is no graph that
    anybody asks about."""
    compiled = CompiledGraph(module, chain_layers=layers)
    if compiled in reports:
        reports.remove(compiled)
    return compiled.boxed()


class CompiledGraph:
    """A compiled graph: its program, and the function that runs it, first on trial and then with what the trials
    chose."""

    def __init__(
        self, module: torch.fx.GraphModule, packs: bool = False, saved: bool = False, tune_s: float = 0.0,
        live: bool = False, frozen: bool = False, mask: int | None = None, preview: bool = False,
        chain_layers: int = linears.MOST, works: bool = True, apart: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        """Fuses what it finds in the module's graph. packs: whether weights of convolutions are packed once. saved:
        whether inputs are what a forward kept. tune_s: seconds in which tilings are measured after the trials. live:
        whether products of what a ReLU made may take the columns that are not zero; frozen, mask, preview:
        as in `compile_graph`. chain_layers: of a chain, at most; 0: no chains.
        works, apart: whether convolutions take in pointwise work, and which do not (`convolutions.fuse`)."""
        self.apart = apart
        self.tune_s = tune_s
        self.tuned: list[tuner.Subject] = []
        """Kernels whose tilings were measured."""
        began = time.perf_counter()
        self.stencils = stencil_call.fuse(module.graph)
        before = copy.deepcopy(module.graph) if packs else None
        self.convolutions = convolutions.fuse(module.graph, works, apart) if packs else []
        self.previews = preview_of_pools(module.graph) if packs and preview else []
        self.pools = pools.fuse(module.graph) if self.convolutions else []
        self.before = torch.fx.GraphModule(module, before) if before and self.convolutions else None
        """The graph without them, in case they are slower."""
        dropout.split(module.graph)
        say_statistics(module.graph)
        say_views(module.graph)
        self.draws = mersenne.fuse(module.graph)
        self.pairs = [*pairs.fuse(module.graph), *pairs_backward.fuse(module.graph)]
        self.tables = table_gradient.fuse(module.graph)
        self.pixels = pixels_backward.fuse(module.graph)
        self.columns = columns.fuse(module.graph)
        # Joins the calls that `pairs` and `columns` have put in the graph.
        self.table_pairs = table_pairs.fuse(module.graph)
        self.recurrent = recurrent.fuse(module.graph, recurrent_training.Learner)
        self.scans = scan.fuse(module.graph)
        self.attention = attention.fuse(module.graph)
        self.experts = experts.fuse(module.graph)
        self.quantized = quantized.fuse(module.graph)
        self.chains = (
            fuse_chains(module.graph, _alone, chain_layers) if chain_layers and mask is None and not frozen else []
        )
        # After chains, which take products with what surrounds them; `live` and `ragged` then change calls of these.
        self.products = products.fuse(module.graph)
        self.live = fuse_live(module.graph, frozen) if live else []
        self.ragged = None if mask is None else Ragged(mask)
        if self.ragged is not None:
            self.ragged.fuse(module.graph)
        self.bodies = loops.compile_bodies(module, partial(compile_graph, saved=True))
        self.program: Program = program(module.graph, environment_of(module.graph))
        self.program.saved = saved
        self.tried = [
            *self.convolutions, *self.previews, *self.pools, *self.draws, *self.pairs, *self.table_pairs, *self.tables,
            *self.scans, *self.attention, *self.experts, *self.quantized, *self.pixels,
        ]  # fmt: skip
        self.tried += [*self.stencils, *self.chains]
        """What is no group and tried by itself."""
        texts: list[str | None] = [one.text for one in self.columns]
        texts += [one.text for one in self.tried] + [text for one in self.products for text in one.texts]
        texts += [text for one in self.stencils for text in one.texts]
        self.texts = [*[one.source for one in self.scans], *dict.fromkeys(filter(None, texts))]
        """C++ of what is no group."""
        _load(self.program.groups, self.texts)
        self.trials: dict[int, Trial] = {}
        self.lock = threading.Lock()
        self.runs: list[Run] = []
        """Stretches of it that are one call each."""
        self.quiet = True
        """Whether nothing was said of it yet."""
        self.final = False
        self.calls = 0
        """Since the trials were over."""
        sources = "".join(planned.kernel.source for planned in self.program.groups)
        self.again = 1 + zlib.crc32(sources.encode()) % SOON if sources else 0
        """The call that compares once more: any, and the same one in each run of a program; 0 without groups: none."""
        self.function = write(self.program, self._on_trial)
        # `_on_trial` fills `trials` while the function is written, so only now is it known whether anything is to be
        # tried.
        if not (self.trials or self.products or self.columns or self.tried):
            self.function = self._settled()
            self.final = True
        self.made_s = time.perf_counter() - began
        self.tried_s = 0.0
        """Seconds of making the program with its kernels, and of the calls in which they were tried."""
        if len(reports) >= KEPT:
            del reports[0]
        reports.append(self)

    def whole(self) -> Iterator[CompiledGraph]:
        """This graph, and those of its loops' bodies."""
        yield self
        for body in self.body_graphs():
            yield from body.whole()

    def body_graphs(self) -> list[CompiledGraph]:
        """Those of its loops' and branches' bodies that are compiled."""
        return [body.function.compiled for body in self.bodies if hasattr(body.function, "compiled")]

    def boxed(self) -> Callable[[list[Any]], Any]:
        """Returns the function that runs the graph."""
        if self.ragged is None or not self.ragged.products:
            return self._boxed()
        return self.ragged.boxed(self._boxed(), lambda: self.final)

    def _boxed(self) -> Callable[[list[Any]], Any]:
        def call(args: list[Any]) -> Any:
            if not self.final:
                return self._first(args)
            self.calls += 1
            if self.calls == 1 and self.quiet:
                self._say()
            if self.calls == self.again:
                return self._compared(args)
            return self.function(args)

        # AOTAutograd's mark of a function that takes its arguments as one list, which it empties.
        call._boxed_call = True  # type: ignore[attr-defined]
        call.compiled = self  # type: ignore[attr-defined]
        return call

    def _first(self, args: list[Any]) -> Any:
        """A call while groups are on trial; one at a time, and the last trial ends it."""
        with self.lock:
            if self.final:
                return self.function(args)
            began = time.perf_counter()
            out = self.function(args)
            self.tried_s += time.perf_counter() - began
            # Operations with trials of their own had them in the same call.
            if all(trial.kept is not None for trial in self.trials.values()):
                self.function = self._settled()
                self.final = True
                self._say()
            return out

    def _say(self) -> None:
        """What was made of the graph, once."""
        self.quiet = False
        if log.isEnabledFor(logging.INFO):
            log.info("a graph: %s", summary(self))

    def _compared(self, args: list[Any]) -> Any:
        """A call in which each kernel that is kept is compared with ATen once more."""
        checks: dict[int, Again] = {}

        def both(writer: Writer, planned: PlannedGroup) -> list[str]:
            if not self.kept(planned):
                return writer.given_back(planned)
            return self._by(
                writer, planned, lambda trial: checks.setdefault(planned.number, Again(trial.run, trial.aten))
            )

        with self.lock:
            out = write(self.program, both)(args)
            if wrong := {number: check.wrong for number, check in checks.items() if check.wrong}:
                for number, why in wrong.items():
                    self.trials[number].kept = False
                    self.trials[number].verdict = {**self.trials[number].verdict, "kept": False, "wrong": why}
                self.function = write(self.program, self._chosen)
        return out

    def _settled(self) -> Callable[[list[Any]], Any]:
        """The program that the trials chose, with tilings that were measured where somebody asked for it."""
        if self.tune_s:
            self.tuned = tuner.tune([p for p in self.program.groups if self.kept(p)], self.tune_s)
        # Taken out, as the copy of the graph is of no use afterwards.
        before, self.before = self.before, None
        lost = frozenset(one.source for one in self.convolutions if one.lost)
        if before is not None and lost:  # the same, with their work as kernels of its own
            if self in reports:
                reports.remove(self)
            return CompiledGraph(before, packs=True, apart=self.apart | lost).boxed()
        if before is None or not convolutions.slower(self.convolutions):
            return write(self.program, self._chosen, self._with_runs())
        if self in reports:
            reports.remove(self)
        return CompiledGraph(before).boxed()

    def _with_runs(self) -> list[Any]:
        """The program's units with stretches that C++ calls as one, where all sizes are fixed."""
        if self.program.environment is not None:
            return self.program.units
        try:
            units = join_runs(self.program.units, self._kernel, self._body, self.program.saved)
        except Exception:  # a mistake of ours: Python calls the steps
            log.debug("a graph's steps are called by Python", exc_info=True)
            return self.program.units
        self.runs = [unit for unit in units if isinstance(unit, Run)]
        return units

    def _kernel(self, planned: PlannedGroup) -> tuple[int, ctypes.Array[Any]] | None:
        """Address and sizes of a kernel that a run calls, None where it is ATen's or not for a CPU. Of kernels that
        were given back those are called too that lost by less than Python takes to call one."""
        trial = self.trials.get(planned.number)
        if trial is None or planned.function is None or planned.device.type != "cpu" or trial.verdict.get("wrong"):
            return None
        lost_s = trial.verdict.get("kernel_s", 0.0) - trial.verdict.get("aten_s", 0.0)
        if not trial.kept and lost_s > CALL_S:
            return None
        return address_of(planned.function), Table(planned, ())()

    def _body(self, node: torch.fx.Node) -> tuple[list[Any], list[Any], steps.KernelOf, steps.BodyOf] | None:
        """The program of a loop's or a branch's body, tried before on inputs that are made where it has not run yet."""
        body = getattr(self.program.graph.owning_module, str(node.target), None)
        compiled = getattr(getattr(body, "function", None), "compiled", None)
        if not isinstance(compiled, CompiledGraph) or compiled.program.environment is not None:
            return None
        if not compiled.final and not compiled.tried_on_made():
            return None
        inputs = [one for one in compiled.program.graph.nodes if one.op == "placeholder"]
        return compiled.program.units, inputs, compiled._kernel, compiled._body

    def tried_on_made(self) -> bool:
        """Tries the graph on inputs that are made; whether it ran."""
        values = [node.meta.get("val") for node in self.program.graph.nodes if node.op == "placeholder"]
        if not all(steps.is_static(value) for value in values):
            return False
        try:
            with _disable_current_modes(), torch.no_grad():
                self._first([gate.made_like(value, n) for n, value in enumerate(values)])
        except (RuntimeError, IndexError):  # what it does with such numbers is for its user to see
            return False
        return self.final

    def kept(self, planned: PlannedGroup) -> bool:
        trial = self.trials.get(planned.number)
        return trial is not None and bool(trial.kept)

    def by_kernel(self, planned: PlannedGroup) -> bool:
        """Whether a group's kernel is called, by Python or in a run, which may be on trial yet."""
        within = [run for run in self.runs if any(unit is planned for unit in run.units)]
        return self.kept(planned) or any(
            run.kept or (run.trial is not None and run.trial.kept is None) for run in within
        )

    def _chosen(self, writer: Writer, planned: PlannedGroup) -> list[str]:
        return writer.kernel_lines(planned) if self.kept(planned) else writer.given_back(planned)

    def _on_trial(self, writer: Writer, planned: PlannedGroup) -> list[str]:
        if planned.function is None:
            return writer.given_back(planned)
        return self._by(writer, planned, lambda trial: self.trials.setdefault(planned.number, trial))

    def _by(self, writer: Writer, planned: PlannedGroup, called: Callable[[Trial], Any]) -> list[str]:
        """The line that calls what stands in a group's place, made of the group's trial."""
        names = [writer.name(n) for n in planned.inputs]
        symbols = sorted(writer.symbols_of(planned))
        returned = f"({', '.join(writer.name(n) for n in planned.outputs)},)"
        functions = {}
        for which, lines in (("run", writer.kernel_lines(planned)), ("aten", writer.given_back(planned))):
            body = [*lines, f"return {returned}"]
            functions[which] = f"def {which}({', '.join([*names, *symbols])}):\n" + "\n".join(LINES + x for x in body)
        scope = dict(writer.scope())
        exec("\n".join(functions.values()), scope)
        trial = Trial(
            planned.kernel.source,
            scope["run"],
            scope["aten"],
            on_made_inputs=planned.device.type == "cpu",
            whole=not may_fail(planned),
        )
        return [f"{returned} = {writer.constant(called(trial))}({', '.join([*names, *symbols])})"]


def _load(planned: Sequence[PlannedGroup], others: Sequence[str]) -> None:
    """Gives kernels their functions, as far as this machine has what makes them. others: sources that are compiled
    beside them."""
    plain = [p for p in planned if not isinstance(p.kernel, TritonKernel)]
    functions = libraries([*[p.kernel.source for p in plain], *others])
    for p, function in zip(plain, functions, strict=False):
        p.function = function
    triton = [(p, p.kernel) for p in planned if isinstance(p.kernel, TritonKernel)]
    for (p, _), launcher in zip(triton, launchers([kernel for _, kernel in triton]), strict=True):
        p.function = launcher


def environment_of(graph: torch.fx.Graph) -> Any:
    """The ShapeEnv of a graph's symbols, or None where all sizes are numbers."""
    for node in graph.nodes:
        value = node.meta.get("val")
        for part in value.shape if isinstance(value, torch.Tensor) else [value]:
            if isinstance(part, torch.SymInt):
                return part.node.shape_env
    return None
