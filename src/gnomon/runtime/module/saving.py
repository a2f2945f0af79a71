"""What one layer keeps for backward, tensor by tensor: kept, computed again, or on the host until it is read.

A `Keeper` sees every tensor that autograd saves in a layer's forward, tells by its storage which tensor of the block it
is, and does what the plan's rules say. What is computed again is the least that makes it, from what is kept before it,
once, when backward first reads it (`graph.backward.saved` counts the same ops). A copy on the host is made by the op
that saves the tensor, and comes back when backward reads it. Leaves out whole layers (`stage`) and copies beside
computing: they are on the stream that computes.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gnomon.errors import PlanError
from gnomon.graph import Graph
from gnomon.late import load_late
from gnomon.plans import Plan
from gnomon.plans.parts import Action
from gnomon.plans.saving import named_by_tensor, savings
from gnomon.runtime.module.blocks import BlockRun, Frame
from gnomon.software import own, stack
from gnomon.tensors.captured import writes_over


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What becomes of the tensors of one layer: which are saved, recomputed or offloaded."""

    actions: Mapping[str, Action]
    """By tensor of the block, or `path:name` of what the op at `path` makes for its own backward."""
    input: Action
    """Of what the layer reads from the one before."""

    def of(self, root: str, path: str, *, is_input: bool) -> Action:
        """What becomes of a tensor. root: empty for one that only the op at `path` knows."""
        if is_input:
            return self.input if self.input == "offload" else "keep"
        if root:
            return self.actions.get(root, "keep")
        # What only the op knows has no name of its own: a rule that names any of it speaks for all.
        own = [action for name, action in self.actions.items() if name.startswith(f"{path}:")]
        return own[0] if own else "keep"


def rules_of(plan: Plan, graph: Graph) -> dict[str, Rules]:
    """Label of each layer in which rules name tensors -> what they say."""
    if all(rule.preset is not None for rule in plan.saved.rules):
        return {}
    kernels, *_ = load_late("gnomon.prediction.software_kernels:kernels_of")(stack(own.NAME))
    by_label, chosen = {}, named_by_tensor(plan, graph)
    for label, saving in savings(plan, graph, kernels).items():
        if label in chosen and (saving.policy or saving.input == "offload"):
            by_label[label] = Rules(actions=dict(saving.policy), input=saving.input)
    return by_label


Geometry = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]
"""Size, stride and offset in a storage, and the dtype that is seen there."""


@dataclass(slots=True, eq=False)
class _Saved:
    """A tensor that autograd saved."""

    tensor: Tensor | None
    """None once it is gone from the device."""
    place: tuple[int, int]
    """(op of the block, which of those that it saved)."""
    geometry: Geometry
    key: str = ""
    """The block's tensor whose storage it looks into, or `op.place` for what only the op knows."""
    action: Action = "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingDecision:
    """What was found out about a layer in its first forward; the same for all microbatches."""

    saved: Mapping[tuple[int, int], tuple[str, Action]]
    """By place: key and action."""
    again: tuple[int, ...]
    """Ops that are run again, in forward order."""
    anchors: Mapping[str, str]
    """Tensors that these read and do not make -> the one whose storage it is."""


class Keeper:
    """One forward of one layer, and its backward."""

    def __init__(self, run: BlockRun, rules: Rules, known: dict[Hashable, SavingDecision], label: Hashable) -> None:
        """Takes known, layers that ran before, by label; this adds to it."""
        self.run, self.rules, self.known, self.label = run, rules, known, label
        self.decided = known.get(label)
        self.saved: list[_Saved] = []
        self.roots: dict[int, str] = {}  # storage -> the first tensor of the block that lies there; in a first forward
        self.root_of: dict[str, str] = {}
        self.values: dict[str, tuple[Tensor, bool]] = {}  # (what may be read when ops are run again, wants a gradient)
        self.shapes: dict[str, tuple[Geometry, bool]] = {}
        self.hosts: dict[str, Tensor] = {}
        self.came: dict[str, Tensor] = {}  # storages that were computed again or came from the host
        self.num_missing = self.op = self.order = 0
        self.device = torch.device("cpu")
        self.drawn: dict[int, Generators] = {}  # op that draws random numbers -> the generators before it
        self.frame: Frame | None = None

    @contextmanager
    def watching(self, frame: Frame) -> Iterator[None]:
        """Watches the layer's forward, which runs inside, and decides what autograd saves."""
        self.device = frame.device
        # Inputs first: what ops save of them is then known as the layer's input, not as some view.
        for name, x in frame.values.items():
            self._register(name, x)
        with saved_tensors_hooks(self._pack, self._unpack):
            yield
        if self.decided is None:
            self.decided = self.known[self.label] = self._decide()
        for name, root in self.decided.anchors.items():
            if root not in self.hosts and self.rules.actions.get(root) == "offload":
                self.hosts[root] = _to_host(self.values[name][0])
        # Kept is what ops that are run again start from, unless it is on the host; a tensor that is no such anchor has
        # the root "".
        self.values = {
            name: x for name, x in self.values.items() if self.decided.anchors.get(name, "") not in self._far
        }
        self.frame = frame.anew({})
        # How many will be asked for again: after the last, what was brought back is let go.
        self.num_missing = sum(saved.tensor is None for saved in self.saved)

    @property
    def _far(self) -> Collection[str]:
        """Storages that are not kept for ops that are run again: those on the host, and what none of them reads."""
        return {"", *self.hosts}

    def begin(self, index: int) -> None:
        """Notes that an op begins."""
        self.op, self.order = index, 0
        if self.run.ops[index].site.op.path in self.run.drawing:
            self.drawn[index] = _generators(self.device)

    def end(self, outputs: Mapping[str, Tensor]) -> None:
        """An op has made its outputs: what it saved is known by name now."""
        for name, x in outputs.items():
            self._register(name, x)
        # This op's entries are the last ones.
        for saved in reversed(self.saved):
            if saved.place[0] != self.op:
                break
            assert saved.tensor is not None
            saved.key, saved.action = self._action_of(saved)
            if saved.action == "offload" and saved.key not in self.hosts:
                self.hosts[saved.key] = _to_host(saved.tensor)
            # Let go here, right after the op: the peak of a forward counts.
            if saved.action != "keep":
                saved.tensor = None

    def on_device(self) -> Iterator[Tensor]:
        """What is on the device until backward."""
        yield from (saved.tensor for saved in self.saved if saved.tensor is not None)
        yield from (x for x, _ in self.values.values())

    def _action_of(self, saved: _Saved) -> tuple[str, Action]:
        if self.decided is not None:
            return self.decided.saved[saved.place]
        assert saved.tensor is not None
        root, path = self.roots.get(_where(saved.tensor), ""), self.run.ops[self.op].site.op.path
        action = self.rules.of(root, path, is_input=root in self.run.block.inputs)
        return root or f"{saved.place[0]}.{saved.place[1]}", action

    def _register(self, name: str, x: Tensor) -> None:
        if self.decided is None:  # all tensors live until it is decided, so that no storage is given to another
            self.root_of[name] = self.roots.setdefault(_where(x), name)
        elif name not in self.decided.anchors:
            return
        self.values[name] = x.detach(), x.requires_grad
        self.shapes[name] = _geometry(x), x.requires_grad

    def _pack(self, x: Tensor) -> _Saved:
        # Detached: the graph must not hold itself through what it saves.
        saved = _Saved(x.detach(), (self.op, self.order), _geometry(x))
        self.order += 1
        self.saved.append(saved)
        return saved

    def _decide(self) -> SavingDecision:
        maker = {name: index for index, op in enumerate(self.run.ops) for name in op.site.op.outputs}
        saved_names = {saved.key for saved in self.saved if saved.action != "recompute"}
        # A rule that names a tensor keeps it even where autograd does not ask for it, so that recomputation may start
        # there.
        saved_names |= {name for name, action in self.rules.actions.items() if action != "recompute"}
        gone = [saved for saved in self.saved if saved.action == "recompute"]
        todo = [maker.get(saved.key, saved.place[0]) for saved in gone]
        writers = self._writers()
        todo += [index for saved in gone for index in writers.get(saved.key, ())]
        again, anchors = set[int](), dict[str, str]()
        while todo:
            if (index := todo.pop()) in again:
                continue
            again.add(index)
            for name in self.run.ops[index].site.op.inputs:
                # Parameters and states are there anyway.
                if not self.run.block.tensor(name).is_activation:
                    continue
                root = self.root_of[name]
                if root in writers:  # what was kept is as it was at the end
                    todo += [maker[name], *writers[root]]
                elif name not in maker or root in saved_names or root in self.run.block.inputs:
                    anchors[name] = root
                else:
                    todo.append(maker[name])
        saved = {entry.place: (entry.key, entry.action) for entry in self.saved}
        return SavingDecision(saved=saved, again=tuple(sorted(again)), anchors=anchors)

    def _writers(self) -> dict[str, list[int]]:
        """Storage into which ops of the layer write after it is made -> these ops. PlanError for the layer's input."""
        writers: dict[str, list[int]] = {}
        for index, op in enumerate(self.run.ops):
            captured = op.site.op.captured
            for name in () if captured is None else writes_over(op.site.op.inputs, captured.nodes):
                root = self.root_of.get(name, "")
                if root in self.run.block.inputs:
                    raise PlanError(
                        f"{op.site.op.path} ({captured and captured.where}) writes over what its layer reads, so that "
                        f"the layer cannot be computed again by tensor; leave it out of saved.rules"
                    )
                writers.setdefault(root, []).append(index)
        # Storages that no tensor of the block has.
        writers.pop("", None)
        return writers

    def _unpack(self, saved: _Saved) -> Tensor:
        if saved.tensor is not None:
            return saved.tensor
        if saved.key not in self.came:
            if saved.action == "offload":
                self._back(saved.key)
            else:
                self._again()
        tensor = _looked(self.came[saved.key], saved.geometry)
        self.num_missing -= 1
        if self.num_missing <= 0:
            self.came.clear()
        return tensor

    def _back(self, key: str) -> Tensor:
        """A storage that is on the host."""
        if key not in self.came:
            host = self.hosts[key]
            assert self.frame is not None
            self.came[key] = host.to(self.frame.device, non_blocking=True)
        return self.came[key]

    def _again(self) -> None:
        """Runs ops as forward did, and takes what was wanted of it."""
        frame, decided = self.frame, self.decided
        assert frame is not None and decided is not None
        # Leaves, with the same wish for gradients as in forward, or ops would save other things.
        values = {name: x.detach().requires_grad_(wants) for name, (x, wants) in self.values.items()}
        # Those whose storage went to the host.
        for name in decided.anchors.keys() - values.keys():
            geometry, wants = self.shapes[name]
            values[name] = _looked(self._back(decided.anchors[name]), geometry).detach().requires_grad_(wants)
        recomputed = {saved.key for saved in self.saved if saved.action == "recompute"}
        own: list[Tensor] = []

        def pack(x: Tensor) -> None:
            """Nothing goes back through this graph. An op that held its own output by the hook would never be freed."""
            own.append(x.detach())

        def seen(name: str, x: Tensor) -> None:
            if name in recomputed:
                self.came[name] = _storage_of(x)

        run = frame.anew(values)
        run.only = frozenset(self.run.ops[index].site.op.path for index in decided.again)
        now = _generators(self.device) if self.drawn else None
        with torch.enable_grad(), saved_tensors_hooks(pack, lambda x: x):  # type: ignore[arg-type]
            for index in decided.again:
                own.clear()
                if index in self.drawn:
                    _set_generators(self.device, self.drawn[index])
                run.do(self.run.ops[index], again=False, seen=seen)
                for order, x in enumerate(own):
                    if f"{index}.{order}" in recomputed:
                        self.came[f"{index}.{order}"] = _storage_of(x)
        # The generators go on from where they were, as if nothing had been drawn twice.
        if now is not None:
            _set_generators(self.device, now)


Generators = tuple[Tensor, Tensor | None]
"""States of torch's random generators: the CPU's, and that of a GPU."""


def _generators(device: torch.device) -> Generators:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_generators(device: torch.device, states: Generators) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1], device)


def _where(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _geometry(x: Tensor) -> Geometry:
    return tuple(x.shape), tuple(x.stride()), int(x.storage_offset()), x.dtype


def _looked(storage: Tensor, geometry: Geometry) -> Tensor:
    """What looks into a storage so, as complex numbers into pairs of real ones too."""
    shape, stride, offset, dtype = geometry
    same = storage if storage.dtype == dtype else torch.empty(0, dtype=dtype, device=storage.device)
    with torch.no_grad():
        # A view in another dtype, without a copy.
        flat = same if same is storage else same.set_(storage.untyped_storage())
    return flat.as_strided(shape, stride, offset)


def _storage_of(x: Tensor) -> Tensor:
    """All of the storage that a tensor looks into, as a vector."""
    with torch.no_grad():
        return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.detach().untyped_storage())


def _to_host(x: Tensor) -> Tensor:
    """A copy of its storage, in memory that a GPU copies from and to without waiting."""
    flat = _storage_of(x)
    host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=flat.is_cuda)
    return host.copy_(flat, non_blocking=flat.is_cuda)
