"""Consecutive steps of a graph as one call of C++: kernels, library calls, views, and an arena for what lies between.

Python allocates and calls for every step; a graph of small tensors takes longer there than in its kernels. `joined`
makes each stretch of a program's units, as far as C++ can call them, one `Run`: a table of what is called with which
buffers, which cpp/steps.cpp walks. It is compiled once for all graphs, so a graph costs no compilation. Kernels are
called by address; ATen's operations through PyTorch's C interface, by name. A run is tried like a group beside the same
steps in Python (`gate`); where a step refuses (an index outside its table), Python does the run once more and says why.
With several threads a run whose steps do not all wait for each other is then tried by two workers (`schedule`), each
with half of the threads, beside its steps one after another: steps are timed in C++, the schedule is made from their
seconds, and memory is shared only by what is over before another begins whatever the workers' speeds.
Taken are tensors of fixed sizes on a CPU. Leaves out what writes in place, draws random numbers, or gives tensors whose
sizes are known only when it runs.
Source: Rammer (OSDI 2020) has such tables for a GPU's blocks; MonoNN (OSDI 2024) makes a whole model one call.
"""

from __future__ import annotations

import ctypes
import math
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gnomon.compiler.build import CPP, address_of, libraries
from gnomon.compiler.graph.groups import fake
from gnomon.compiler.node import Node
from gnomon.compiler.rules.views import VIEWS
from gnomon.compiler.tasks.arena import Buffer, offsets
from gnomon.compiler.tasks.schedule import StepCost, StepSchedule, scheduled
from gnomon.compiler.tune.gate import Trial

FORMULA = CPP / "steps.cpp"
SOURCE = FORMULA.read_text(encoding="utf-8")
FEWEST = 2
"""Steps, views aside, from which on they are a run."""
MOST_POINTERS, MOST_ARGUMENTS, LARGEST_STRUCT, MOST_PACKED, MOST_PIECES = 64, 64, 1024, 4, 8
"""Of cpp/steps.cpp."""
TIMED = 4
"""Calls in which steps are timed with half and with all of the threads: the least of each counts."""
SHARE = 0.97
"""Of the time of the steps one after another that two workers may take: less is noise."""
MOST_SCHEDULED = 400
"""Steps of a run that is given to two workers; of more the order takes long to find."""
MOST_BYTES = 32 << 20
"""Of an arena, which is kept from call to call; in a backward of what the forward kept too, which a run holds to its
end. What is larger takes so long that Python's part is nothing."""
KERNEL, STRUCT, ATEN, LEAVE, PRODUCT, LOOP, BRANCH, PACKED = range(8)
RAW, TENSOR, SOME, LIST, TEXT, HELD = range(6)
ROOM, RUN, FORGET, HALVED, WHOLE, HOLD, BESIDE = range(7)
LIBRARIES = ("aten", "mkldnn")
"""Namespaces of operations that C++ calls."""
PRODUCTS = {
    torch.ops.aten.mm.default: "aoti_torch_cpu_mm_out",
    torch.ops.aten.bmm.default: "aoti_torch_cpu_bmm_out",
    torch.ops.aten.addmm.default: "aoti_torch_cpu_addmm_out",
    torch.ops.aten.baddbmm.default: "aoti_torch_cpu_baddbmm_out",
}
"""Operations that write where they are told, by PyTorch's own interface: of two tensors, or of three and two scales."""

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of tensors whose memory C++ may read."""
FUNCTIONS = {
    "torch": (
        "aoti_torch_empty_strided aoti_torch_create_tensor_from_blob aoti_torch_new_tensor_handle "
        "aoti_torch_delete_tensor_object aoti_torch_get_data_ptr aoti_torch_get_strides aoti_torch_copy_ "
        "torch_call_dispatcher torch_new_list_reserve_size torch_list_push_back torch_new_stable_ivalue "
        "torch_new_string_handle"
    ).split(),
    "python": (
        "PyList_GetItem PyList_New PyList_SetItem PyCapsule_New PyEval_SaveThread PyEval_RestoreThread Py_IncRef "
        "PyErr_CheckSignals"
    ).split(),
}
"""`Functions` of cpp/steps.cpp: those of PyTorch, then the one that gives a tensor's address, then Python's."""
AT_THREADS, BLAS_THREADS = "_ZN2at15get_num_threadsEv", "MKL_Set_Num_Threads_Local"
"""And the last: at::get_num_threads, and MKL's own count, which a PyTorch without MKL does not have."""


class _Tensor(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("buffer", "offset", "dtype", "dims", "sizes", "strides")]


# Every field of the C++ struct has 64 bits, addresses among them.
class _Table(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "torch buffers inputs tensors arena results tensor result made step words none child children start steps "
            "wide task0 task1 tasks0 tasks1 seconds held"
        ).split()
    ]


@cache
def _library() -> tuple[Callable[..., Any], Callable[..., Any], Any, int] | None:
    """(what makes and frees rooms, what runs, addresses of PyTorch's and Python's functions, version of PyTorch's
    interface); None where one is missing."""
    try:
        # The products' functions are looked up only to know that all are there: `_step` writes their addresses into the
        # table by itself, so they are cut off from the struct.
        found = [_address(name) for name in (*FUNCTIONS["torch"], *PRODUCTS.values())][: len(FUNCTIONS["torch"])]
        found.append(int(getattr(torch._C._dynamo.guards, "_torchinductor_pyobject_tensor_data_ptr")))  # noqa: B009
        found += [address_of(getattr(ctypes.pythonapi, name)) for name in FUNCTIONS["python"]]
        found += [_address(AT_THREADS), address_of(getattr(_torch(), BLAS_THREADS, None))]
        version = _torch().aoti_torch_abi_version
    except (OSError, AttributeError):  # another PyTorch
        return None
    [function] = libraries([SOURCE])
    if function is None:
        return None
    version.restype = ctypes.c_uint64
    address = address_of(function)
    arguments = (ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
    # One address under two prototypes. Rooms are made and freed without any Python object, so ctypes may release the
    # GIL. A run gives a list of capsules: it begins with the GIL held (PYFUNCTYPE) and lets go of it itself while it
    # walks the steps.
    rooms = ctypes.CFUNCTYPE(ctypes.c_void_p, *arguments, ctypes.c_void_p)(address)
    run = ctypes.PYFUNCTYPE(ctypes.py_object, *arguments, ctypes.py_object)(address)
    return rooms, run, (ctypes.c_void_p * len(found))(*found), int(version())


@cache
def _torch() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def _address(name: str) -> int:
    """Returns the address of a function of PyTorch's; AttributeError where there is none of that name."""
    return address_of(getattr(_torch(), name))


# ---- what a step is
@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A tensor of a node's memory: its sizes and strides as `like` has them."""

    node: Node
    like: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """A kernel that takes a struct: its address, the struct without addresses, and which tensor's each field is."""

    function: int
    filled: ctypes.Structure
    inputs: tuple[tuple[str, Node], ...]
    outputs: tuple[tuple[str, Node], ...]
    mode: int = -1
    """A second argument, where it is not negative."""
    packing: Packing | None = None
    """Of fields that hold what was packed."""
    held: tuple[tuple[str, PackedArgument], ...] = ()
    """These fields, which stay null where nothing was packed for them."""


class _Packed(ctypes.Structure):
    _fields_ = [("digest", ctypes.c_uint64), ("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p)]


class _PackedSlot(ctypes.Structure):
    _fields_ = [("taken", ctypes.c_int32), ("count", ctypes.c_int32), ("packed", _Packed * MOST_PACKED)]


class PackedSlot:
    """What C++ takes packed tensors from: by the digest of what they were packed from (`Slot` of cpp/steps.cpp)."""

    def __init__(self) -> None:
        """Begins with an empty slot."""
        self.memory = _PackedSlot()
        self.handles: list[int] = []

    @property
    def address(self) -> int:
        return ctypes.addressof(self.memory)

    def hold(self, packed: Sequence[tuple[int, torch.Tensor, torch.Tensor | None]]) -> None:
        """Has these (digest, weight, bias) in the place of others."""
        library = _library()
        assert library is not None and len(packed) <= MOST_PACKED
        packed_array, handles = (_Packed * MOST_PACKED)(), []
        for one, (digest, *tensors) in zip(packed_array, packed, strict=False):
            handle_values = [None if t is None else _handle(t) for t in tensors]
            # The digest comes as a signed number.
            one.digest, one.weight, one.bias = digest & (1 << 64) - 1, *handle_values
            handles += [handle for handle in handle_values if handle is not None]
        library[0](HOLD, self.address, ctypes.addressof(packed_array), len(packed))
        self._drop()
        self.handles = handles

    def _drop(self) -> None:
        drop = _torch().aoti_torch_delete_tensor_object
        for handle in self.handles:
            drop(ctypes.c_void_p(handle))
        self.handles = []

    def __del__(self) -> None:
        self._drop()


def _handle(tensor: torch.Tensor) -> int:
    """A handle of a tensor, for PyTorch's C interface; its owner deletes it."""
    capsule: Any = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors([tensor])[0]
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return get(capsule, None) or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """What an operation takes packed: the slot, the function of digests, and what was packed."""

    slot: PackedSlot
    digest: int
    pieces: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class PackedArgument:
    """An argument that is packed: 0 is the weight, 1 the bias."""

    which: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A call of one ATen op: its arguments, tensors among them as nodes, views or the number of an earlier operation's
    result, and the node of each result, None where nobody reads it."""

    target: Any
    args: tuple[Any, ...]
    results: tuple[Any, ...]
    packing: Packing | None = None


@dataclass(frozen=True, slots=True)
class Between:
    """The result of an operation that no node has: the layout that it is declared to have."""

    like: torch.Tensor


KernelOf = Callable[[Any], "tuple[int, ctypes.Array[Any]] | None"]


BodyOf = Callable[[Any], "tuple[Sequence[Any], Sequence[Any], KernelOf, BodyOf] | None"]
"""Of the node of a loop's body: the units of its program, its inputs, kernels, and bodies within it."""


class UnfitStepError(Exception):
    """A step that C++ cannot call; it says why. Never reaches a user."""


def is_static(value: Any) -> bool:
    """Whether a tensor is of fixed sizes, dense, on a CPU, and not empty."""
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and value.dtype in DTYPES
        and not (value.is_conj() or value.is_neg())
        and all(isinstance(size, int) and size > 0 for size in value.shape)
        and all(isinstance(step, int) for step in value.stride())
        and isinstance(value.storage_offset(), int)
    )


DTYPES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float32: 6,
    torch.float64: 7, torch.bool: 11, torch.bfloat16: 15,
}  # fmt: skip
"""c10's number of each, which does not change (saved models hold it); those that a trial can compare (`gate`)."""


def _is_view(node: Node) -> bool:
    if node.op != "call_function":
        return False
    of = node.args[0] if node.args else None
    if node.target is operator.getitem:
        return isinstance(of, torch.fx.Node) and of.target in VIEWS
    return node.target in VIEWS


def _shares(node: Node) -> bool:
    """Whether a view's memory is its source's."""
    above = node.args[0]
    if node.target is operator.getitem:
        above = above.args[0]
    one, other = node.meta.get("val"), above.meta.get("val")
    if isinstance(one, (list, tuple)):
        return all(is_static(part) for part in one) and is_static(other)
    return is_static(one) and is_static(other) and bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _span(value: torch.Tensor) -> int:
    """Bytes from a tensor's first element to its last."""
    last = sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    return (1 + last) * value.element_size()


# ---- a run
@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaSlot:
    """Bytes of the arena, and the steps from which and to which they are of use."""

    offset: int
    size_bytes: int
    first: int
    last: int


@dataclass(slots=True)
class Run:
    """Consecutive units as one function of `inputs`, tensors that are there before, to `outputs`."""

    units: list[Any]
    inputs: list[Node]
    outputs: list[Node]
    number: int
    table: Any = None
    kept_alive: list[Any] = field(default_factory=list)
    """What the table points to."""
    rooms: list[int] = field(default_factory=list)
    """Of cpp/steps.cpp: those that no call uses now."""
    plain: Callable[..., Any] | None = None
    """The same steps in Python."""
    trial: Trial | None = None
    count: int = 0
    """Steps, views aside."""
    names: list[str] = field(default_factory=list)
    """Of them."""
    slots: list[ArenaSlot] = field(default_factory=list)
    """What lies in the arena."""
    arena_bytes: int = 0
    again: Callable[[StepSchedule], Run] | None = None
    """The same steps by two workers, until that was tried."""
    needs: list[set[int]] = field(default_factory=list)
    """Of each step, those that it waits for."""
    first: set[int] = field(default_factory=set)
    """Steps that the calling thread does."""
    schedule: StepSchedule | None = None
    """Of two workers, where they do it."""
    two_workers: Run | None = None
    """By two workers, where that was tried."""

    def __call__(self, *args: torch.Tensor) -> Any:
        """Returns the outputs; the first call is on trial."""
        trial = self.trial
        assert trial is not None and self.plain is not None
        if not PLAIN.issuperset(map(type, args)):  # one without memory
            return self.plain(*args)
        if trial.kept is None:
            out = trial(*args)
            again, self.again = self.again, None
            if again is not None and not trial.verdict.get("wrong"):
                with _disable_current_modes():
                    self.try_two(args, again)
            return out
        if self.kept:
            out = self.call(args)
            if out is not None:
                return out
        return self.plain(*args)

    def held_bytes(self, saved: bool) -> int:
        """What it keeps from being freed. saved: whether inputs would be, as they are read."""
        return self.arena_bytes + sum(_span(node.meta["val"]) for node in self.inputs if saved)

    def call(self, args: Sequence[torch.Tensor]) -> Any:
        """Returns the results of the call in C++; None where a step refuses its arguments."""
        if self.two_kept and self.two_workers is not None:
            return self.two_workers.call(args)
        return self.walked(args, RUN)

    @property
    def two_kept(self) -> bool:
        """Whether two workers do the steps."""
        return self.two_workers is not None and self.two_workers.kept

    @property
    def kept(self) -> bool:
        """Whether C++ does the steps, by one worker or two."""
        return (self.trial is not None and bool(self.trial.kept)) or self.two_kept

    def walked(self, args: Sequence[torch.Tensor], what: int) -> Any:
        """Runs as `call` does, by this table. what: RUN, or HALVED or WHOLE, which time its steps."""
        library = _library()
        assert library is not None
        rooms, run, _, _ = library
        table = ctypes.addressof(self.table)
        try:
            # A room holds one call's arena and handles, so calls at the same time each need their own. `pop` and
            # `append` of a list are atomic; a call that raises does not give its room back.
            room = self.rooms.pop()
        except IndexError:
            room = rooms(ROOM, table, None, None)
            # Only addresses are passed on, as a reference to the table would keep it alive for ever.
            weakref.finalize(self.table, rooms, FORGET, table, room, None)
        handles = run(what, table, room, list(args))
        self.rooms.append(room)
        return None if handles is None else torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(handles)

    def tried(self, *args: torch.Tensor) -> Any:
        """Runs as `call` does, but raises RuntimeError where that does not run."""
        out = self.call(args)
        if out is None:
            raise RuntimeError("a step of a run refused")
        return out

    def costs(self, args: Sequence[torch.Tensor]) -> list[StepCost] | None:
        """The steps' seconds with half and with all of the threads; None where one refused."""
        found = []
        for what in (HALVED, WHOLE):
            # C++ keeps the least of all calls.
            seconds = (ctypes.c_double * len(self.needs))(*[math.inf] * len(self.needs))
            self.table.seconds = ctypes.addressof(seconds)
            refused = any(self.walked(args, what) is None for _ in range(TIMED))
            self.table.seconds = 0  # a later walk would write to memory that is no longer these seconds'
            if refused:
                return None
            found.append([*seconds])
        return [StepCost(half_s=half, whole_s=whole) for half, whole in zip(*found, strict=True)]

    def try_two(self, args: Sequence[torch.Tensor], again: Callable[[StepSchedule], Run]) -> None:
        """Has two workers do the steps, where there are several threads, some steps do not wait for each other, and
        that is equal and faster."""
        several = any(not _chained(self.needs, n) for n in range(1, len(self.needs)))
        if torch.get_num_threads() < 2 or not several or len(self.needs) > MOST_SCHEDULED:
            return
        costs = self.costs(args)
        schedule = None if costs is None else scheduled(costs, self.needs, self.first)
        if schedule is None:
            return
        two, trial = again(schedule), self.trial
        assert trial is not None
        others = self.tried if trial.kept else trial.aten
        two.trial = Trial(f"two workers {trial.kept} {trial.source}", two.tried, others, share=SHARE)
        two.trial(*args)
        self.two_workers = two


class Builder:
    """Collects the steps of one run; `finished` gives the run."""

    def __init__(self, kernel_of: KernelOf, body_of: BodyOf) -> None:
        """kernel_of: a planned group's kernel and the array of its sizes, None where the group is ATen's."""
        self.kernel_of, self.body_of = kernel_of, body_of
        self.units: list[Any] = []
        self.inside: set[Any] = set()
        """Nodes that are known once the run is over."""
        self.steps: list[Any] = []
        """Planned groups, calls, operations."""
        self.made: dict[Any, int] = {}
        """Whose memory a step makes, and which step."""
        self.by_aten: set[Any] = set()

    def add(self, unit: Any) -> bool:
        """Whether a unit is of the run; it is not where C++ cannot call it."""
        try:
            # Nothing of this builder changes before all steps of the unit are known to be callable, so a unit that is
            # refused leaves the run as it was.
            steps, step_results = self._steps(unit)
        except UnfitStepError:
            return False
        for step, nodes in zip(steps, step_results, strict=True):
            self.steps.append(step)
            for node in nodes:
                self.made[node] = len(self.steps) - 1
                # ATen allocates what it returns. PRODUCTS are called in their `out` form and write to the arena, as
                # kernels do.
                if isinstance(step, Operation) and step.target not in PRODUCTS:
                    self.by_aten.add(node)
        self.units.append(unit)
        self.inside |= set(unit.outputs) if hasattr(unit, "outputs") else {unit}
        return True

    def _steps(self, unit: Any) -> tuple[list[Any], list[list[Any]]]:
        """Steps, and what memory each makes."""
        if hasattr(unit, "kernel"):
            tensors = [*unit.inputs, *unit.outputs]
            slots = len(unit.kernel.slots) + len(unit.outputs)
            if self.kernel_of(unit) is None or not all(is_static(fake(n)) for n in tensors) or slots > MOST_POINTERS:
                raise UnfitStepError("a group that ATen runs, or of sizes that change")
            return [unit], [list(unit.outputs)]
        if _is_view(unit):
            if not _shares(unit):
                raise UnfitStepError("a view that may copy")
            return [], []
        if unit.op != "call_function":
            raise UnfitStepError("no function")
        if isinstance(unit.target, torch._ops.HigherOrderOperator):
            # What a loop keeps from step to step has a place in the arena, like its results.
            step = _higher(unit, self.body_of)
            return [step], [[*step.memory, *_results(step)]]
        if unit.target is operator.getitem:
            if unit not in self.made:
                raise UnfitStepError("a result of something else")
            return [], []
        step_of = getattr(unit.target, "step", None)
        if step_of is not None:
            steps = step_of(unit)
            if steps is None or not is_static(fake(unit)):
                raise UnfitStepError("an operation of ours that only Python calls")
        else:
            steps = [_operation(unit)]
        for step in steps:
            _check(step)
        step_results = [[n for n in _results(step) if n is not None] for step in steps]
        return steps, step_results

    # ---- where memory is
    def base(self, node: Any) -> Any:
        """Whose memory a tensor of the run is: what a step makes, or an input."""
        if isinstance(node, View):
            node = node.node
        # Inside the run only views are not in `made`, and a view's first argument is what it is a view of.
        while node not in self.made and node in self.inside:
            node = node.args[0]
        return node

    def like(self, node: Any) -> torch.Tensor:
        if isinstance(node, (View, Between, Memory)):
            return node.like
        value: torch.Tensor = node.meta["val"]
        return value

    def outputs_of(self, node: Any, results: dict[Any, None], again: dict[Any, None]) -> None:
        """What somebody outside needs of the run: results, and views that Python makes of them again."""
        if node not in self.inside:
            return
        if node in self.made:
            results[node] = None
        else:
            self.outputs_of(node.args[0], results, again)
            again[node] = None

    def finished(self, later: Sequence[Any], number: int) -> tuple[Run, list[Any]] | None:
        """The run, and the views of its results that are to be made after it. later: nodes that are read after it. None
        where an input is no tensor of fixed sizes."""
        results: dict[Any, None] = {}
        again: dict[Any, None] = {}
        for node in later:
            self.outputs_of(node, results, again)
        views = [unit for unit in self.units if isinstance(unit, torch.fx.Node) and unit in again]
        run = _Text(self, list(results)).run(number)
        # Written anew rather than changed: with a schedule other tensors live at the same time, so the arena is
        # another.
        run.again = lambda schedule: _Text(self, list(results), schedule=schedule).run(number)
        return (run, views) if all(is_static(fake(node)) for node in run.inputs) else None


def _name(step: Any) -> str:
    """What a step is, in words."""
    if isinstance(step, KernelCall):
        target = step.outputs[0][1].target
        return f"{getattr(target, 'name', None) or getattr(target, '__name__', 'kernel')} (kernel)"
    if isinstance(step, Operation):
        return f"{step.target._schema.name.partition('::')[2]} (ATen)"
    if isinstance(step, Branch):
        return "branch"
    if isinstance(step, Loop):
        return f"loop of {step.count} steps" if step.count >= 0 else "loop while a condition holds"
    return f"group {step.number} (kernel)"


def _results(step: Any) -> tuple[Any, ...]:
    if isinstance(step, KernelCall):
        return tuple(node for _, node in step.outputs)
    return tuple(node for node in step.results if node is not None)


def _tensors(step: Any) -> list[Any]:
    """Nodes and views that a step reads."""
    if isinstance(step, (KernelCall, Operation)):
        packed = [] if step.packing is None else list(step.packing.pieces)
        if isinstance(step, KernelCall):
            return [*(node for _, node in step.inputs), *packed]
        return [*(one for arg in step.args for one in _inside(arg)), *packed]
    if isinstance(step, (Loop, Branch)):
        return list(step.inputs)
    return [step.kernel.nest.body.inputs[slot].node for slot in step.kernel.slots]


def _inside(arg: Any) -> list[Any]:
    if isinstance(arg, (torch.fx.Node, View, Between)):
        return [arg]
    return [one for part in arg for one in _inside(part)] if isinstance(arg, (list, tuple)) else []


def _check(step: Any) -> None:
    for one in (*_tensors(step), *_results(step)):
        if one is None:
            continue
        if not is_static(one.like if isinstance(one, (View, Between)) else one.meta.get("val")):
            raise UnfitStepError("a tensor elsewhere, of a size that changes, or empty")
    if isinstance(step, Operation) and step.target in PRODUCTS:
        if not all(isinstance(scale, (int, float)) for scale in step.args[3:]):
            raise UnfitStepError("a scale that is no number")
        return
    if isinstance(step, (Loop, Branch)):
        return
    if isinstance(step, KernelCall):
        # C++ copies the struct to its stack and writes the addresses there, so that calls at the same time do not share
        # it.
        if ctypes.sizeof(step.filled) > LARGEST_STRUCT:
            raise UnfitStepError("a large struct")
        return
    schema = step.target._schema
    if len(schema.arguments) > MOST_ARGUMENTS or len(step.args) != len(schema.arguments):
        raise UnfitStepError("many arguments")
    for arg, of in zip(step.args, schema.arguments, strict=True):
        _encodable(arg, of.type)


def _operation(node: Node) -> Operation:
    """A plain function of ATen's with all of its arguments."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in LIBRARIES:
        raise UnfitStepError("no operation of a library")
    schema = target._schema
    # A trial does every step several times on the same inputs and compares: that needs functions of their arguments
    # alone.
    if schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags or target.is_view:
        raise UnfitStepError("an operation that does more than give a result")
    if torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd"):
        raise UnfitStepError("an operation that may give its argument")
    if any(one.alias_info is not None for one in (*schema.arguments, *schema.returns)):
        raise UnfitStepError("an operation that may give its argument")
    if not schema.returns or any(one.type.kind() != "TensorType" for one in schema.returns):
        raise UnfitStepError("results that are no tensors")
    if schema.name.startswith("aten::_embedding_bag"):  # some of its results have no memory, whatever fake tensors say
        raise UnfitStepError("an operation that may give a result without memory")
    args = list(node.args)
    for of in schema.arguments[len(args) :]:
        if of.name in node.kwargs:
            args.append(node.kwargs[of.name])
        elif of.has_default_value():
            args.append(of.default_value)
        else:
            raise UnfitStepError("an argument is missing")
    if len(schema.returns) == 1:
        return Operation(target=target, args=tuple(args), results=(node,))
    parts: list[Any] = [None] * len(schema.returns)
    for user in node.users:
        # Each result has one node, whose memory it is; two `getitem` of one result would be two names for it.
        if user.target is not operator.getitem or parts[user.args[1]] is not None:
            raise UnfitStepError("results that are asked for together")
        parts[user.args[1]] = user
    return Operation(target=target, args=tuple(args), results=tuple(parts))


def _bits(number: float) -> int:
    return ctypes.c_int64.from_buffer(ctypes.c_double(number)).value


MEMORY_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
"""By c10's numbers."""
DEVICE_CPU = 0xFFFFFFFF
"""A CPU without a number: the kind in the upper half, the number -1 in the lower."""


def _encodable(arg: Any, kind: Any) -> None:
    _encoded(arg, kind, lambda _: 0, [])


def _encoded(arg: Any, kind: Any, tensor: Callable[[Any], int], texts: list[Any]) -> list[int]:
    """The words of one argument; kind: its type in the schema. texts: keeps strings alive."""
    name = kind.kind()
    if name == "OptionalType":
        # In the stable ABI an optional is a pointer to its value, null where there is none.
        return [RAW, 0] if arg is None else [SOME, *_encoded(arg, kind.getElementType(), tensor, texts)]
    if name == "TensorType" and isinstance(arg, (torch.fx.Node, View, Between)):
        return [TENSOR, tensor(arg)]
    if name == "TensorType" and isinstance(arg, PackedArgument):
        return [HELD, tensor(arg)]
    if name == "ListType" and isinstance(arg, (list, tuple)):
        inner = kind.getElementType()
        return [LIST, len(arg), *(word for one in arg for word in _encoded(one, inner, tensor, texts))]
    if name == "StringType" and isinstance(arg, str):
        texts.append(ctypes.create_string_buffer(arg.encode()))
        return [TEXT, ctypes.addressof(texts[-1]), len(arg.encode())]
    if name == "BoolType" and isinstance(arg, bool):
        return [RAW, int(arg)]
    # To a schema dtypes and memory formats are integers, in c10's numbering.
    if name == "IntType" and isinstance(arg, torch.dtype) and arg in DTYPES:
        return [RAW, DTYPES[arg]]
    if name == "IntType" and arg in MEMORY_FORMATS:
        return [RAW, MEMORY_FORMATS.index(arg)]
    if name == "IntType" and isinstance(arg, int) and not isinstance(arg, bool):
        return [RAW, arg]
    if name == "FloatType" and isinstance(arg, (int, float)):
        return [RAW, _bits(float(arg))]
    if name == "DeviceObjType" and isinstance(arg, torch.device) and arg.type == "cpu":
        return [RAW, DEVICE_CPU]
    raise UnfitStepError(f"an argument of type {name}")


def _needed(units: Sequence[Any], results: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Units that some result needs, and what these read that none of the units makes."""
    of = {node: n for n, unit in enumerate(units) for node in (unit.outputs if hasattr(unit, "kernel") else [unit])}
    needed: set[int] = set()
    outside: dict[Any, None] = {}
    waiting = list(results)
    while waiting:
        node = waiting.pop()
        n = of.get(node)
        if n is None:
            if node.op != "get_attr":  # a body, which Python finds by itself
                outside[node] = None
        elif n not in needed:
            needed.add(n)
            waiting += _read_by(units[n])
    return [unit for n, unit in enumerate(units) if n in needed], list(outside)


# ---- loops and branches
class Body:
    """The body of a loop or branch, all of whose units are steps: its table, and where its results lie."""

    def __init__(self, node: Node, body_of: BodyOf) -> None:
        found = body_of(node)
        if found is None:
            raise UnfitStepError("a body that is not compiled")
        units, self.inputs, kernel_of, inner = found
        builder = Builder(kernel_of, inner)
        self.results: list[Any] = []
        for unit in units:
            op = getattr(unit, "op", "")
            if op == "output":
                of = unit.args[0]
                self.results = list(of) if isinstance(of, (list, tuple)) else [of]
            elif op not in ("placeholder", "get_attr") and not builder.add(unit):
                raise UnfitStepError("a body with a step that only Python calls")
        if not all(is_static(fake(one)) for one in (*self.inputs, *self.results)):
            raise UnfitStepError("a body of sizes that change, or of numbers")
        # A result that is an input handed on is memory of the run; no step of the body makes it.
        bases = [base for one in self.results if (base := builder.base(one)) in builder.made]
        self.text = _Text(builder, bases, self.inputs)
        self.table = self.text.table()

    def place(self, node: Any) -> tuple[int, int]:
        return self.text.place(node)

    def is_given(self, node: Any) -> bool:
        """Whether a result is memory that the body was given."""
        return self.text.made.base(node) not in self.text.made.made


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """What a loop keeps from step to step, or an input in the layout that a body reads."""

    like: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Move:
    """A copy: from a tensor of the run (or, of a body, its result) to one of the run, and how many bytes further each
    is in the next step. layouts: there and here."""

    of: Body | None
    source: Any
    target: Any
    layouts: tuple[TensorLayout, TensorLayout]
    steps: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Bound:
    """An input of a body that is memory of the run: which, and how many bytes further in the next step."""

    input: Node
    source: Any
    step: int = 0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Loop:
    """A `scan` of `count` steps, or a `while_loop` (-1)."""

    body: Body
    condition: Body | None
    count: int
    before: tuple[Move, ...]
    bound: tuple[Bound, ...]
    asked: tuple[Bound, ...]
    """Of the condition's inputs."""
    each: tuple[Move, ...]
    after_each: tuple[Move, ...]
    after: tuple[Move, ...]
    memory: tuple[Memory, ...]
    inputs: tuple[Any, ...]
    results: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Branch:
    """A `cond`: of either branch, copies before, what its inputs are, and copies of its results."""

    pred: Any
    bodies: tuple[Body, Body]
    before: tuple[tuple[Move, ...], tuple[Move, ...]]
    bound: tuple[tuple[Bound, ...], tuple[Bound, ...]]
    after: tuple[tuple[Move, ...], tuple[Move, ...]]
    memory: tuple[Memory, ...]
    inputs: tuple[Any, ...]
    results: tuple[Any, ...]


def _higher(node: Node, body_of: BodyOf) -> Loop | Branch:
    """The step of a node of higher order, of fixed sizes."""
    name, args = node.target.name(), node.args
    values = node.meta.get("val")
    if node.kwargs or not isinstance(values, (list, tuple)) or not all(is_static(value) for value in values):
        raise UnfitStepError("a loop of sizes that change")
    results: list[Any] = [None] * len(values)
    for user in node.users:
        if user.target is not operator.getitem or results[user.args[1]] is not None:
            raise UnfitStepError("results that are asked for together")
        results[user.args[1]] = user
    if name == "cond":
        return _branch(args[0], [Body(one, body_of) for one in args[1:3]], list(args[3]), results)
    if name == "scan":
        body, (first, rows, operands) = Body(args[0], body_of), (list(one) for one in args[1:4])
        return _loop(body, None, first, rows, operands, results)
    if name == "while_loop":
        condition, body = Body(args[0], body_of), Body(args[1], body_of)
        [goes_on] = condition.results
        if fake(goes_on).dtype != torch.bool or fake(goes_on).numel() != 1:  # type: ignore[union-attr]
            raise UnfitStepError("a condition that is no truth value")
        return _loop(body, condition, list(args[2]), [], list(args[3]), results)
    raise UnfitStepError("another operation of higher order")


def _fixed(nodes: Sequence[Any]) -> None:
    if not all(isinstance(node, torch.fx.Node) and is_static(fake(node)) for node in nodes):
        raise UnfitStepError("a loop of sizes that change, or of numbers")


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How a tensor lies; strides in elements."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def row(self) -> TensorLayout:
        """Returns the layout of one row along the first dim."""
        return TensorLayout(self.sizes[1:], self.strides[1:], self.dtype)


def _layout(value: torch.Tensor) -> TensorLayout:
    return TensorLayout(tuple(value.shape), value.stride(), value.dtype)


def _laid(one: TensorLayout, other: TensorLayout) -> bool:
    """Whether two tensors of the same sizes lie alike."""
    if one.sizes != other.sizes or one.dtype != other.dtype:
        raise UnfitStepError("a body that reads another size or dtype")
    return all(size == 1 or a == b for size, a, b in zip(one.sizes, one.strides, other.strides, strict=True))


def _bound(inputs: Sequence[Node], sources: Sequence[Any], memory: list[Memory]) -> tuple[list[Bound], list[Move]]:
    """Inputs of a body that stay the same, and copies of those that lie otherwise."""
    bound, before = [], []
    for one, source in zip(inputs, sources, strict=True):
        target, have = one.meta["val"], source.like if isinstance(source, Memory) else source.meta["val"]
        if _laid(_layout(have), _layout(target)):
            bound.append(Bound(input=one, source=source))
            continue
        memory.append(Memory(target))
        before.append(Move(of=None, source=source, target=memory[-1], layouts=(_layout(have), _layout(target))))
        bound.append(Bound(input=one, source=memory[-1]))
    return bound, before


def _branch(pred: Any, bodies: Sequence[Body], operands: list[Any], results: list[Any]) -> Branch:
    _fixed([pred, *operands])
    if fake(pred).dtype != torch.bool or fake(pred).numel() != 1:  # type: ignore[union-attr]
        raise UnfitStepError("a condition that is no truth value")
    memory: list[Memory] = []
    bound, before, after = [], [], []
    for body in bodies:
        same, copies = _bound(body.inputs, operands, memory)
        bound.append(tuple(same))
        before.append(tuple(copies))
        pairs = [(output, out) for output, out in zip(body.results, results, strict=True) if out is not None]
        after.append(
            tuple(
                Move(of=body, source=output, target=out, layouts=_layouts(output.meta["val"], out.meta["val"]))
                for output, out in pairs
            )
        )
    return Branch(
        pred=pred, bodies=(bodies[0], bodies[1]), before=(before[0], before[1]), bound=(bound[0], bound[1]),
        after=(after[0], after[1]), memory=tuple(memory), inputs=(pred, *operands), results=tuple(results),
    )  # fmt: skip


def _layouts(one: torch.Tensor, other: torch.Tensor) -> tuple[TensorLayout, TensorLayout]:
    """Returns the layouts of two tensors of the same sizes and dtype, made alike."""
    return _alike(_layout(one), _layout(other))


def _alike(one: TensorLayout, other: TensorLayout) -> tuple[TensorLayout, TensorLayout]:
    _laid(one, other)
    return one, other


def _loop(
    body: Body, condition: Body | None, first: list[Any], rows: list[Any], operands: list[Any], results: list[Any]
) -> Loop:
    """What is carried has memory of its own, in the layout that the body reads, and each step's results are copied
    there once nothing reads what was there before."""
    _fixed([*first, *rows, *operands])
    count = int(rows[0].meta["val"].shape[0]) if rows else -1
    if condition is None and count < 0:
        raise UnfitStepError("a scan of nothing")
    carries, row_inputs = body.inputs[: len(first)], body.inputs[len(first) : len(first) + len(rows)]
    memory = [Memory(one.meta["val"]) for one in carries]
    # `_bound` and what follows append further memory to `memory`; this list keeps the carries alone, in their order.
    carried = list(memory)
    bound, before = _bound(body.inputs[len(first) + len(rows) :], operands, memory)
    bound += [Bound(input=one, source=of) for one, of in zip(carries, carried, strict=True)]
    for source, of in zip(first, carried, strict=True):
        before.append(Move(of=None, source=source, target=of, layouts=_layouts(source.meta["val"], of.like)))
    # Copies before the body of every step (`each`), behind it (`after_each`), and behind the last step (`after`).
    each: list[Move] = []
    for source, one in zip(rows, row_inputs, strict=True):
        # A scanned input is [count, ...]: step i reads row i where it lies, i * stride(0) further, if rows lie as the
        # body reads them. Otherwise each row is copied before its step.
        value, target = source.meta["val"], one.meta["val"]
        step = value.stride(0) * value.element_size()
        if _laid(_layout(value).row(), _layout(target)):
            bound.append(Bound(input=one, source=source, step=step))
            continue
        memory.append(Memory(target))
        layouts = (_layout(value).row(), _layout(target))
        each.append(Move(of=None, source=source, target=memory[-1], layouts=layouts, steps=(step, 0)))
        bound.append(Bound(input=one, source=memory[-1]))
    after_each, late = [], []
    for output, out in zip(body.results[len(first) :], results[len(first) :], strict=True):
        if out is not None:
            value = out.meta["val"]
            layouts = _alike(_layout(output.meta["val"]), _layout(value).row())
            step = value.stride(0) * value.element_size()
            after_each.append(Move(of=body, source=output, target=out, layouts=layouts, steps=(0, step)))
    for output, of in zip(body.results[: len(first)], carried, strict=True):
        layouts = _layouts(output.meta["val"], of.like)
        # A result in memory of the body's own goes straight into its carry. One that is an input handed on (two carries
        # that are swapped) may be overwritten by another carry's copy, so it is saved first: all of `after_each` comes
        # before all of `late`.
        if not body.is_given(output):
            late.append(Move(of=body, source=output, target=of, layouts=layouts))
            continue
        memory.append(Memory(of.like))  # another's copy may come first
        after_each.append(Move(of=body, source=output, target=memory[-1], layouts=layouts))
        late.append(Move(of=None, source=memory[-1], target=of, layouts=_layouts(of.like, of.like)))
    after = [
        Move(of=None, source=of, target=out, layouts=_layouts(of.like, out.meta["val"]))
        for of, out in zip(carried, results, strict=False)
        if out is not None
    ]
    bounds: tuple[Bound, ...] = ()
    if condition is not None:
        copied: list[Memory] = []
        seen, again = _bound(condition.inputs, [*carried, *operands], copied)
        # The table has no copies for the inputs of a condition, so it has to read carries and operands as they lie.
        if again:
            raise UnfitStepError("a condition that reads another layout")
        bounds = tuple(seen)
    return Loop(
        body=body, condition=condition, count=count, before=tuple(before), bound=tuple(bound), asked=bounds,
        each=tuple(each), after_each=(*after_each, *late), after=tuple(after), memory=tuple(memory),
        inputs=(*first, *rows, *operands), results=tuple(results),
    )  # fmt: skip


class _Text:
    """Writes the table of a run, or of a body, whose inputs are set and results are read from outside."""

    def __init__(
        self,
        builder: Builder,
        results: list[Any],
        body: Sequence[Any] | None = None,
        schedule: StepSchedule | None = None,
    ) -> None:
        """body: inputs of a body. schedule: of two workers."""
        self.made, self.results, self.body, self.schedule = builder, results, body, schedule
        self.units, nodes = (builder.units, list(body)) if body is not None else _needed(builder.units, results)
        self.inputs: dict[Any, int] = {node: 1 + n for n, node in enumerate(nodes)}
        self.children: list[_Table] = []
        self.placed: list[ArenaSlot] = []
        self.buffer: dict[Any, int] = {}
        self.offset: dict[Any, int] = {}
        self.tensors: dict[Any, int] = {}
        self.words: list[int] = []
        self.kept: list[Any] = []
        self.arena = 0
        self.starts: list[int] = []
        self.held = 0
        self.needs: list[set[int]] = []
        self.readers: dict[Any, list[int]] = {}

    def run(self, number: int) -> Run:
        table = self.table()
        run = Run(units=self.units, inputs=list(self.inputs), outputs=self.results, number=number)
        run.count, run.arena_bytes = len(self.made.steps), self.arena
        run.names, run.slots = [_name(step) for step in self.made.steps], self.placed
        run.needs, run.schedule = self.needs, self.schedule
        run.first = {n for n, step in enumerate(self.made.steps) if isinstance(step, (Loop, Branch))}
        run.table, run.kept_alive = table, self.kept
        return run

    def table(self) -> _Table:
        steps, step_results = self.made.steps, self.made.made
        # What nobody reads is of use in the step that makes it, which writes it all the same.
        last = dict(step_results)
        for n, step in enumerate(steps):
            self.needs.append(set())
            for one in _tensors(step):
                at = self.made.base(one)
                if at in step_results:
                    last[at] = n
                    self.readers.setdefault(at, []).append(n)
                    self.needs[n] |= {step_results[at]} - {n}
                else:  # what no result needs may still be a step
                    self.inputs.setdefault(at, 1 + len(self.inputs))
        # A body's results are copied out after its last step (`Move`), so they live until one step beyond it.
        if self.body is not None:
            last.update(dict.fromkeys(self.results, len(steps)))
        self._place(last)
        # The arena's memory is shared by `_place`; what ATen has allocated is freed after its last reader, as in eager
        # mode, so that a run does not need more memory than its steps one by one.
        gone: dict[int, list[Any]] = {}
        for node in self.made.by_aten:
            if node not in self.results and (after := self._over(node, last[node])) is not None:
                gone.setdefault(after, []).append(node)
        for n, step in enumerate(steps):
            self.starts.append(len(self.words))
            self._step(step)
            if n in gone:
                self.words += [LEAVE, len(gone[n]), *(self.tensor(node) for node in gone[n])]
        self.starts.append(len(self.words))
        return self._table()

    def _uses(self, node: Any) -> set[int]:
        """Steps that make or read a tensor's memory."""
        return {self.made.made[node], *self.readers.get(node, ())}

    def _over(self, node: Any, last: int) -> int | None:
        """The step after which nobody reads a tensor; None where only the end of the run is sure to be."""
        if self.schedule is None:
            return last
        uses, ordered = self._uses(node), self.schedule.ordered
        return next((n for n in uses if all(one == n or ordered(one, n) for one in uses)), None)

    def _may_coexist(self, within: Sequence[Any]) -> Callable[[int, int], bool] | None:
        """Whether two tensors of the arena may live at the same time by the schedule."""
        if self.schedule is None:
            return None
        uses, ordered = [self._uses(node) for node in within], self.schedule.ordered
        written = [self.made.made[node] for node in within]

        def before(one: int, other: int) -> bool:
            return all(ordered(n, written[other]) for n in uses[one])

        return lambda one, other: not (before(one, other) or before(other, one))

    def _place(self, last: dict[Any, int]) -> None:
        """Inputs and what ATen or the caller owns have buffers; all else lies in the arena, which is buffer 0."""
        step_results, within = self.made.made, []
        self.buffer.update(self.inputs)
        for node in step_results:
            # A run's results outlive its arena, so each has memory of its own. A body's are copied out of it, so they
            # may lie in the arena.
            if node in self.made.by_aten or (self.body is None and node in self.results):
                self.buffer[node] = 1 + len(self.buffer)
            else:
                within.append(node)
        sized = [Buffer(size_bytes=_span(self.made.like(n)), first=step_results[n], last=last[n]) for n in within]
        places, self.arena = offsets(sized, self._may_coexist(within))
        for node, at, one in zip(within, places, sized, strict=True):
            self.buffer[node], self.offset[node] = 0, at
            self.placed.append(ArenaSlot(offset=at, size_bytes=one.size_bytes, first=one.first, last=one.last))

    def place(self, node: Any, offset_bytes: int | None = None) -> tuple[int, int]:
        """(buffer, bytes from its start) of a tensor; offset_bytes: from its base, where it is known."""
        base = self.made.base(node)
        if offset_bytes is None:
            like = self.made.like(node)
            offset = int(like.storage_offset()) - int(self.made.like(base).storage_offset())
            offset_bytes = offset * like.element_size()
        return self.buffer[base], self.offset.get(base, 0) + offset_bytes

    def tensor(self, node: Any) -> int:
        # `_packing` has already moved `held` past this operation's two handles, weight and bias.
        if isinstance(node, PackedArgument):  # of the operation that is written now
            return self.held - 2 + node.which
        return self.tensors.setdefault(node, len(self.tensors))

    def _step(self, step: Any) -> None:
        if isinstance(step, Operation) and step.target in PRODUCTS:
            # The result first, then the operands, then beta and alpha (of `addmm` and `baddbmm` alone), as the C
            # functions take them.
            tensors = [self.tensor(node) for node in (*step.results, *_tensors(step))]
            scales = [float(scale) for scale in step.args[3:]] or [1.0, 1.0]
            self.words += [PRODUCT, _address(PRODUCTS[step.target]), len(tensors), *map(_bits, scales), *tensors]
            return
        if isinstance(step, Operation):
            name, overload = step.target._schema.name, step.target._schema.overload_name
            library = _library()
            assert library is not None
            schema = step.target._schema.arguments
            if step.packing is not None:
                self._packing(step.packing)
            self.words += [ATEN, self._string(name), self._string(overload), len(step.args), len(step.results)]
            self.words.append(library[3])
            for arg, of in zip(step.args, schema, strict=True):
                self.words += _encoded(arg, of.type, self.tensor, self.kept)
            self.words += [-1 if node is None else self.tensor(node) for node in step.results]
            return
        if isinstance(step, KernelCall):
            self.kept.append(step.filled)
            fields = [(name, node) for name, node in (*step.inputs, *step.outputs)]
            if step.packing is not None:
                self._packing(step.packing)
            self.words += [STRUCT, step.function, ctypes.addressof(step.filled), ctypes.sizeof(step.filled)]
            self.words += [step.mode, len(fields), len(step.held)]
            for name, node in fields:
                self.words += [*self.place(node), getattr(type(step.filled), name).offset]
            for name, one in step.held:
                self.words += [self.tensor(one), getattr(type(step.filled), name).offset]
            return
        if isinstance(step, Loop):
            self._loop(step)
            return
        if isinstance(step, Branch):
            self._branch(step)
            return
        found = self.made.kernel_of(step)
        assert found is not None
        function, sizes = found
        self.kept.append(sizes)
        nest = step.kernel.nest
        places = []
        for slot in step.kernel.slots:
            inp = nest.body.inputs[slot]
            places.append(self.place(inp.node, int(inp.offset) * inp.dtype.itemsize))
        places += [self.place(node) for node in step.outputs]
        self.words += [KERNEL, function, ctypes.addressof(sizes), len(places), *(w for place in places for w in place)]

    def _packing(self, packing: Packing) -> None:
        self.words += [PACKED, packing.slot.address, packing.digest, self.held, len(packing.pieces)]
        for node in packing.pieces:
            self.words += [*self.place(node), _span(self.made.like(node))]
        self.kept.append(packing.slot)
        self.held += 2

    def _child(self, body: Body) -> int:
        self.children.append(body.table)
        self.kept += [body.table, body.text.kept]
        return len(self.children) - 1

    def _moves(self, moves: Sequence[Move]) -> list[int]:
        words: list[int] = []
        for move in moves:
            source = (0, *self.place(move.source)) if move.of is None else (1, *move.of.place(move.source))
            item, dims = _collapsed(*move.layouts)
            # A move: whose source it is (0: the run's, 1: the body's), its buffer, offset and bytes a step; the same
            # three of the target; bytes copied at once and the number of dims; then all sizes, all strides there and
            # all strides here.
            words += [*source, move.steps[0], *self.place(move.target), move.steps[1], item, len(dims)]
            words += [number for which in range(3) for number in (dim[which] for dim in dims)]
        # The number of words is there so that C++ can go on to the next section.
        return [len(moves), len(words), *words]

    def _bounds(self, body: Body, bounds: Sequence[Bound]) -> list[int]:
        words: list[int] = []
        for one in bounds:
            words += [body.text.inputs[one.input], *self.place(one.source), one.step]
        return [len(bounds), len(words), *words]

    def _loop(self, step: Loop) -> None:
        condition = step.condition
        bound_words = [0, 0] if condition is None else self._bounds(condition, step.asked)
        flag = (0, 0) if condition is None else condition.place(condition.results[0])
        which = -1 if condition is None else self._child(condition)
        self.words += [LOOP, self._child(step.body), which, step.count, *flag]
        self.words += [
            *self._moves(step.before),
            *bound_words,
            *self._bounds(step.body, step.bound),
            *self._moves(step.each),
        ]
        self.words += [*self._moves(step.after_each), *self._moves(step.after)]

    def _branch(self, step: Branch) -> None:
        self.words += [BRANCH, *self.place(step.pred), *(self._child(body) for body in step.bodies)]
        for n, body in enumerate(step.bodies):
            self.words += [*self._moves(step.before[n]), *self._bounds(body, step.bound[n])]
            self.words += self._moves(step.after[n])

    def _string(self, text: str) -> int:
        self.kept.append(ctypes.create_string_buffer(text.encode()))
        return ctypes.addressof(self.kept[-1])

    def _array(self, words: Sequence[int]) -> int:
        self.kept.append((ctypes.c_int64 * max(1, len(words)))(*words))
        return ctypes.addressof(self.kept[-1])

    def _table(self) -> _Table:
        library = _library()
        assert library is not None
        results = [] if self.body is not None else [self.tensor(node) for node in self.results]
        tensors = (_Tensor * max(1, len(self.tensors)))()
        for node, n in self.tensors.items():
            like = self.made.like(node)
            buffer, offset = self.place(node)
            shape, steps = self._array(list(like.shape)), self._array(list(like.stride()))
            tensors[n] = _Tensor(
                buffer=buffer, offset=offset, dtype=DTYPES[like.dtype], dims=like.dim(), sizes=shape, strides=steps
            )
        self.kept += [tensors, library[2]]
        # What kernels write is allocated before the first step; ATen's results come with their step.
        results_made = [int(node not in self.made.by_aten) for node in self.results if self.body is None]
        lists, wide = ((), ()) if self.schedule is None else self.schedule.lists, [0] * len(self.made.steps)
        for n in () if self.schedule is None else self.schedule.wide:
            wide[n] = 1
        tasks = [self._array([word for task in each for word in (task.step, task.others)]) for each in lists]
        return _Table(
            torch=ctypes.addressof(library[2]), buffers=1 + len(self.buffer), inputs=len(self.inputs),
            tensors=len(self.tensors), arena=self.arena, results=len(results), tensor=ctypes.addressof(tensors),
            result=self._array(results), made=self._array(results_made), step=self._array(self.words),
            words=len(self.words),
            none=id(None), child=self._array([ctypes.addressof(one) for one in self.children]),
            children=len(self.children), start=self._array(self.starts), steps=len(self.made.steps),
            wide=self._array(wide), task0=tasks[0], task1=tasks[1], tasks0=len(lists[0]), tasks1=len(lists[1]),
            held=self.held,
        )  # fmt: skip


def _chained(needs: Sequence[set[int]], n: int) -> bool:
    """Whether a step waits for the one before it."""
    return n - 1 in needs[n]


def _collapsed(one: TensorLayout, other: TensorLayout) -> tuple[int, list[tuple[int, int, int]]]:
    """A copy between two layouts: bytes that lie beside each other in both, and (size, bytes there, bytes here) of the
    dims around them."""
    item = one.dtype.itemsize
    dims = [(size, a * item, b * item) for size, a, b in zip(one.sizes, one.strides, other.strides, strict=True)]
    dims = [dim for dim in dims if dim[0] > 1]
    # Outermost first by the target's strides. Then the last dims, as far as they are dense in both layouts, are one
    # memcpy.
    dims.sort(key=lambda dim: (-dim[2], -dim[1]))
    whole = item
    while dims and dims[-1][1] == dims[-1][2] == whole:
        whole *= dims.pop()[0]
    return whole, dims


def join_runs(units: Sequence[Any], kernel_of: KernelOf, body_of: BodyOf, saved: bool) -> list[Any]:
    """The units, with a `Run` in the place of each stretch that C++ can call, and then views of its results. saved:
    whether inputs are what a forward kept, and are freed as they are read."""
    if _library() is None:
        return list(units)
    out: list[Any] = []
    builder, runs = Builder(kernel_of, body_of), 0

    def end(after: int) -> None:
        nonlocal builder, runs
        # A loop or a branch alone is worth it: its body is many steps, or a call of Python's for each.
        if len(builder.steps) >= FEWEST or any(isinstance(step, (Loop, Branch)) for step in builder.steps):
            later = [node for unit in units[after:] for node in _read_by(unit)]
            text = builder.finished(later, runs)
            if text is not None and text[0].outputs and text[0].held_bytes(saved) <= MOST_BYTES:
                out.extend([text[0], *text[1]])
                runs += 1
                builder = Builder(kernel_of, body_of)
                return
        out.extend(builder.units)
        builder = Builder(kernel_of, body_of)

    for n, unit in enumerate(units):
        if getattr(unit, "op", "") in ("placeholder", "get_attr"):  # known before all
            out.append(unit)
        elif not builder.add(unit):
            end(n)
            out.append(unit)
    end(len(units))
    return out


def _read_by(unit: Any) -> Sequence[Any]:
    return unit.inputs if hasattr(unit, "kernel") else unit.all_input_nodes
