"""Parameters of one stage on one rank: a flat buffer, its shard, its gradient, and the handles that layers use.

A stage has one such buffer for each group of ranks that its gradients are reduced over: routed experts have their own.

A layer asks its `Weight` for the value when it computes and gives it gradients; autograd never holds a parameter. So a
gathered stage can be freed between forward and backward (ZeRO 3), and weight gradients can wait for their own action
(`Tape`). Returns tensors. Left out: communication, which `execute` starts on `flat`, `grad` and their shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from gnomon.runtime.parameters.files import ParameterFile

Range = tuple[int, int]
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One parameter in the flat buffer."""

    name: str
    """In full, as in the graph."""
    shape: tuple[int, ...]
    """Local, dim by dim as in the graph."""
    whole: tuple[int, ...]
    """The shape that all tensor-parallel ranks hold together."""
    offset: tuple[int, ...]
    """Where in it this rank's part begins."""
    start: int
    """First element in the flat buffer."""
    holders: int
    """Tensor-parallel ranks (of etp, of experts) that hold the same elements: a global sum counts each element once. 0
    where another stage counts it (a tied table)."""
    decays: bool
    """Whether weight decay is about it: what reads it says so, not its shape (`sharding.matrices.takes_decay`)."""
    sums: str
    """Communicator over which its gradient is added up before the update besides data parallelism: `tp`,
    `kv_copies`, or none."""

    copies: int = 1
    """Tensor-parallel ranks (of etp, of experts) that hold the same elements, wherever they are counted."""
    split: tuple[int, int] | None = None
    """As it is multiplied or looked up in: (leading dims that are matrices side by side, dims before its columns); None
    for vectors."""
    places: tuple[tuple[int, ...], ...] = ()
    """`offset` on each of the tensor-parallel ranks (of etp, of experts), in order; none where each has all of it."""
    table: bool = False
    """Its rows are looked up, not multiplied: in any layer."""
    experts: tuple[int, ...] | None = None
    """Which of all experts lie along its first dim, in this order, where a plan places them; None: those from `offset`
    on."""
    held_by: tuple[int, ...] = ()
    """Of each of these, how many ranks of ep hold it."""

    @property
    def matrix(self) -> tuple[int, int, int] | None:
        """(matrices, rows, columns) of the local part; None for vectors."""
        return None if self.split is None else _matrix(self.shape, self.split)

    @property
    def whole_matrix(self) -> tuple[int, int, int]:
        """The same of what all tensor-parallel ranks hold together, and of as many matrices. Not for vectors."""
        assert self.split is not None
        return _matrix((*self.shape[: self.split[0]], *self.whole[self.split[0] :]), self.split)

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor of the `whole` shape."""
        if self.experts is not None:
            whole = whole.index_select(0, torch.tensor(self.experts, device=whole.device))
        first = 0 if self.experts is None else 1
        for dim, (begin, length) in enumerate(zip(self.offset[first:], self.shape[first:], strict=True), start=first):
            whole = whole.narrow(dim, begin, length)
        return whole

    def each_expert(self) -> Iterator[tuple[Slot, Range]]:
        """A slot for each expert of a placed one, and where its elements are in the flat buffer; or itself."""
        if self.experts is None:
            yield self, (self.start, self.stop)
            return
        # Experts lie one after the other along the first dim, each with equally many elements.
        size = (self.stop - self.start) // max(1, self.shape[0])
        for number, (expert, ranks) in enumerate(zip(self.experts, self.held_by, strict=True)):
            begin = self.start + number * size
            one = replace(
                self,
                shape=(1, *self.shape[1:]),
                offset=(expert, *self.offset[1:]),
                start=begin,
                experts=None,
                held_by=(ranks,),
            )
            yield one, (begin, begin + size)

    def experts_of(self, value: Tensor) -> Iterator[tuple[Slot, Tensor]]:
        """The same with their parts of a value of `shape`."""
        for number, (one, _) in enumerate(self.each_expert()):
            yield one, value if self.experts is None else value[number : number + 1]

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.start + torch.Size(self.shape).numel()


Values = Callable[[Slot], Tensor | None]
"""A parameter -> this rank's part of what it begins with; None where nobody has it: then it is as the seed says."""


def _matrix(shape: tuple[int, ...], split: tuple[int, int]) -> tuple[int, int, int]:
    many, rows = split
    return math.prod(shape[:many]), math.prod(shape[many:rows]), math.prod(shape[rows:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtypes:
    """What is stored how."""

    param: torch.dtype
    """What forward reads, and computes in."""
    grad: torch.dtype
    """Gradients as they add up, and as they travel."""
    master: torch.dtype | None
    """The optimizer's own copy; None when there is none."""
    states: torch.dtype
    """Moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aside:
    """A weight gradient that waits for its action."""

    weight_grad: Callable[[], None]
    """Computes it and adds it up."""
    reads: tuple[Tensor, ...]
    """What it reads, which lives until then."""


class Tape:
    """Weight gradients of one stage: computed at once, or put aside for an action of their own."""

    def __init__(self) -> None:
        self.aside: list[Aside] | None = None

    def run(self, weight_grad: Callable[[], None], *reads: Tensor) -> None:
        """Does it now, or keeps it while `aside` is a list. reads: the tensors that it holds."""
        if self.aside is None:
            weight_grad()
        else:
            self.aside.append(Aside(weight_grad=weight_grad, reads=reads))


class Parameters:
    """The flat buffer and what belongs to it. `zero` is the ZeRO stage, `shard` this rank's of `num_shards`."""

    trained = True
    """Whether they have gradients (`frozen`)."""
    borrowed = False
    """Whether another layer holds them (`Borrowed`)."""
    lies_flat = True
    """Whether `value` is part of `flat`, and not made of it."""

    def __init__(
        self,
        slots: Sequence[Slot],
        dtypes: Dtypes,
        *,
        zero: int,
        shard: int,
        num_shards: int,
        replicas: int = 1,
        experts: bool = False,
        away: bool = False,
        folder: Path | None = None,
        device: torch.device = CPU,
    ) -> None:
        """Takes replicas, the ranks that reduce the same gradient to the same elements, experts, whether these are
        routed experts' (reduced over other ranks than the rest), away, whether this rank's shard waits in the host's
        memory (ZeRO 3), and folder, where it waits in a file instead."""
        self.slots, self.dtypes, self.zero, self.device = tuple(slots), dtypes, zero, device
        self.replicas, self.experts = replicas, experts
        self.num_shards, self.shard_number, self.away, self.folder = num_shards, shard, away, folder
        self.file: ParameterFile | None = None
        """The shard, where it waits on a disk."""
        self.by_name = {slot.name: slot for slot in slots}
        self.ranges = self.lay_out()
        used = max((stop for _, stop in self.ranges.values()), default=0)
        # Filled up, so that shards are equal: collectives take no others.
        self.size = -(-used // num_shards) * num_shards if zero else used
        part = self.size // num_shards if zero else self.size
        self.mine: Range = (shard * part, (shard + 1) * part) if zero else (0, self.size)
        self.flat: Tensor | None = torch.zeros(self.size, dtype=dtypes.param, device=device)
        self.resident: Tensor | None = None  # PS under ZeRO 3; a view of flat otherwise
        self.master: Tensor | None = None
        self.master_on_host = False  # where the update is on the host (`host_update`), as are its moments
        self.grad: Tensor | None = None
        """Of all parameters: below ZeRO 2 there from the first step on, rather than asked of the system in each."""
        self.bucket: GradientBucket | None = None
        """Where the gradient lies, with other layers', if they are reduced together."""
        self.grad_shard: Tensor | None = None
        self.begun: set[str] = set()  # parameters whose gradient has its first term; the others' is not written yet

    def place(self, experts: Mapping[str, tuple[int, ...]], held_by: Mapping[str, tuple[int, ...]]) -> None:
        """Says that other experts lie in these parameters now."""
        self.slots = tuple(
            replace(slot, experts=experts[slot.name], held_by=held_by[slot.name]) if slot.name in experts else slot
            for slot in self.slots
        )
        self.by_name = {slot.name: slot for slot in self.slots}

    def lay_out(self) -> dict[str, Range]:
        """The range of each parameter in the flat buffer, by name."""
        return {slot.name: (slot.start, slot.stop) for slot in self.slots}

    def fill(self, value: Callable[[Slot], Tensor]) -> None:
        """Sets all parameters, keeps this rank's shard (under ZeRO 3 nothing else) and the optimizer's copy."""
        # In fp64, from which both the parameters and the master copy are rounded once.
        flat = torch.zeros(self.size, dtype=torch.float64)
        for slot in self.slots:
            flat[slot.start : slot.stop] = value(slot).flatten()
        self.keep(flat)

    def keep(self, flat: Tensor) -> None:
        """Takes the values of all parameters: of them this rank's shard, and the optimizer's copy."""
        begin, end = self.mine
        if self.dtypes.master is not None:
            self.master = flat[begin:end].to(self.device, self.dtypes.master)
        self.flat = flat.to(self.device, self.dtypes.param)
        if self.zero == 3:
            # A copy, or the view would hold all of the buffer.
            self.resident, self.flat = self.flat[begin:end].clone(), None
            if self.away:
                self.resident = self._put_away(self.resident.to(CPU), pinned=self.device.type == "cuda")

    def _put_away(self, shard: Tensor, *, pinned: bool) -> Tensor:
        """The shard where it waits."""
        if self.folder is None:
            return shard.pin_memory() if pinned else shard
        self.file = ParameterFile(shard, self.folder, pinned=pinned)
        return self.file.tensor

    def comm(self, name: str) -> str:
        """The communicator of these parameters for what a Program calls `name`: dp, dp_shard, dp_replicate."""
        return f"experts.{name}" if self.experts and name in ("dp", "dp_shard") else name

    def make_room(self) -> tuple[Tensor, Tensor]:
        """(room on the device for all parameters, under ZeRO 3 new; what a gather reads of this rank). From the host it
        is copied to where the gather would write it: where no other rank has a part, all is there."""
        if self.zero == 3:
            self.flat = torch.empty(self.size, dtype=self.dtypes.param, device=self.device)
        assert self.flat is not None  # below stage 3 the shard lies where the gather would write it
        if not self.away:
            return self.flat, self.shard
        part = self.flat[self.mine[0] : self.mine[1]]
        part.copy_(self.shard if self.file is None else self.file.take(), non_blocking=True)
        return self.flat, part

    @property
    def shard(self) -> Tensor:
        """The PS buffer: this rank's part of the parameters as forward reads them; in the host's memory where they are
        away, or in a file."""
        if self.resident is not None:
            return self.resident
        assert self.flat is not None
        return self.flat[self.mine[0] : self.mine[1]]

    def value(self, name: str) -> Tensor:
        """One whole local parameter. It must be gathered."""
        start, stop = self.ranges[name]
        assert self.flat is not None, f"{name} is read while its stage is not gathered"
        return self.flat[start:stop].view(self.by_name[name].shape)

    def add_grad(self, name: str, grad: Tensor) -> None:
        """Adds to the gradient; the first term is written where the gradient will be."""
        place, first = self._place(name)
        if first:
            place.copy_(grad.reshape(-1))
        else:
            place += grad.reshape(-1)

    def add_matmul(self, name: str, lhs: Tensor, right: Tensor) -> None:
        """Adds the matrix product lhs · right to the gradient, where it lies if dtypes allow."""
        # A matmul writes its operands' dtype: for a wider gradient the product is made first and added in that.
        if lhs.dtype != self.dtypes.grad:
            self.add_grad(name, lhs @ right)
            return
        place, first = self._place(name)
        rows = place.view(lhs.shape[0], right.shape[1])
        if first:
            torch.mm(lhs, right, out=rows)
        else:
            # The matmul adds where the gradient lies, without a tensor of the product in between.
            rows.addmm_(lhs, right)

    def add_matmuls(self, name: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Adds left · right of each pair to one matrix of the gradient, of a parameter that is as many. The first terms
        are written where they stay; later ones are added as a whole, so that the bits are those of `add_grad`."""
        place, first = self._place(name)
        for matrix, (lhs, right) in zip(place.view(len(pairs), -1), pairs, strict=True):
            into = matrix.view(lhs.shape[0], right.shape[1])
            if not first:
                into += lhs @ right
            elif lhs.dtype == into.dtype:
                torch.mm(lhs, right, out=into)
            else:
                into.copy_(lhs @ right)

    def add_rows(self, name: str, at: Tensor, rows: Tensor) -> None:
        """Adds rows to the gradient of a table at these places."""
        place, first = self._place(name)
        table = place.view(-1, rows.shape[-1])
        if first:
            table.zero_()
        table.index_add_(0, at, rows.to(table.dtype))

    def _place(self, name: str) -> tuple[Tensor, bool]:
        """(where a parameter's gradient lies, whether nothing is there yet)."""
        if self.grad is None:
            self._make_grad()
        assert self.grad is not None
        (start, stop), first = self.ranges[name], name not in self.begun
        self.begun.add(name)
        return self.grad[start:stop], first

    def _make_grad(self) -> None:
        """Room for the gradient, in which nothing is yet."""
        if self.bucket is None:
            self.grad = torch.empty(self.size, dtype=self.dtypes.grad, device=self.device)
        else:
            self.grad = self.bucket.part(self)
        self.begun.clear()

    @property
    def grad_room(self) -> Tensor | None:
        """The tensor that the gradient lies in, or its room in a bucket while another member's gradient is there."""
        return self.grad if self.grad is not None or self.bucket is None else self.bucket.room(self)

    def free_grad(self) -> None:
        """Gives up the gradient's room; that of a bucket goes with its last member's."""
        self.grad = None
        if self.bucket is not None:
            self.bucket.free()

    def whole_grad(self) -> Tensor:
        """The gradient of all parameters, zero where none was computed."""
        if self.grad is None:
            self._make_grad()
        assert self.grad is not None
        # The buffer came from `empty`: what no op added to (an expert without tokens, a branch not taken) has no zeros
        # yet.
        if len(self.begun) < len(self.slots):
            for slot in self.slots:
                if slot.name not in self.begun:
                    self.grad[slot.start : slot.stop] = 0
            self.begun.update(self.by_name)
        used = self.slots[-1].stop if self.slots else 0
        # What fills up the last shard is reduced too, and must not be NaN.
        self.grad[used:] = 0
        return self.grad

    def my_grad(self) -> Tensor:
        """What the update consumes: the gradient of `mine`, where ZeRO put it."""
        if self.zero >= 2:
            assert self.grad_shard is not None, "no gradient was reduced before the update"
            return self.grad_shard
        return self.whole_grad()[self.mine[0] : self.mine[1]]

    def add_shard(self, part: Tensor) -> None:
        """Adds a reduced gradient of `mine` to the one that is kept."""
        if self.grad_shard is None:
            self.grad_shard = part.clone()  # or it would hold the whole
        else:
            self.grad_shard += part

    def pieces(self) -> Iterator[tuple[Slot, Range]]:
        """Each slot that this rank updates, and its range within `mine`."""
        begin, end = self.mine
        for slot in self.slots:
            # A shard may begin and end within a parameter: shards are equal parts of the flat buffer, whatever lies in
            # it.
            low, high = max(slot.start, begin), min(slot.stop, end)
            if low < high:
                yield slot, (low - begin, high - begin)

    def drop_grad(self) -> None:
        """Forgets the gradient after the update; its buffer stays for the next step, but for what ZeRO 2 and 3 free."""
        self.begun.clear()
        self.grad_shard = None
        if self.zero >= 2:
            self.grad = None
        if self.file is not None:
            self.file.updated()


class Borrowed(Parameters):
    """Parameters of another layer that a layer reads under ZeRO 3 (tied weights): gathered into room of its own, and
    its gradient is reduced to the one shard."""

    borrowed = True

    def __init__(self, owner: Parameters) -> None:
        self.owner = owner
        super().__init__(
            owner.slots,
            owner.dtypes,
            zero=owner.zero,
            shard=owner.shard_number,
            num_shards=owner.num_shards,
            replicas=owner.replicas,
            experts=owner.experts,
            away=owner.away,
            device=owner.device,
        )
        # It has room only while it is gathered.
        self.flat = None

    @property
    def shard(self) -> Tensor:
        """The shard of the layer that owns them."""
        return self.owner.shard

    def add_shard(self, part: Tensor) -> None:
        """Adds to the gradient shard of the layer that owns them."""
        self.owner.add_shard(part)


class GradientBucket:
    """Gradients of several layers in one buffer, so that one collective reduces them."""

    def __init__(self, members: Sequence[Parameters]) -> None:
        """Takes members below ZeRO 2, whose gradients stay; of the same dtype and device."""
        self.members = tuple(members)
        self._flat: Tensor | None = None
        for member in members:
            member.bucket = self

    def _buffer(self) -> Tensor:
        if self._flat is None:
            size, some = sum(member.size for member in self.members), self.members[0]
            self._flat = torch.empty(size, dtype=some.dtypes.grad, device=some.device)
        return self._flat

    def part(self, of: Parameters) -> Tensor:
        """The part of the bucket that holds one member's gradient."""
        begin = sum(member.size for member in self.members[: self.members.index(of)])
        return self._buffer()[begin : begin + of.size]

    def room(self, of: Parameters) -> Tensor | None:
        """The same part as `part` gives; None while there is no buffer."""
        return None if self._flat is None else self.part(of)

    def free(self) -> None:
        """Gives up the buffer, once no member's gradient lies there."""
        if all(member.grad is None for member in self.members):
            self._flat = None

    def whole(self) -> Tensor:
        """All members' gradients, zero where none was computed."""
        for member in self.members:
            member.whole_grad()
        return self._buffer()


class Weight:
    """A layer's handle on one parameter."""

    def __init__(
        self, parameters: Parameters, name: str, tape: Tape, *, rows: int, shape: Sequence[int] | None = None
    ) -> None:
        """Takes rows, the leading dims of the local shape that a matrix has as rows (heads × head_dim are two), and
        shape, in place of the slot's, whose dims may be factors of this one's."""
        self._parameters, self._name, self._rows, self.tape = parameters, name, rows, tape
        self.shape = tuple(shape or parameters.by_name[name].shape)
        self._seen: tuple[Tensor, Tensor] | None = None  # (flat buffer, the matrix in it), where that stays

    @property
    def trained(self) -> bool:
        """Whether it wants a gradient."""
        return self._parameters.trained

    @property
    def value(self) -> Tensor:
        """The parameter as a tensor of `shape`."""
        return self._parameters.value(self._name).view(self.shape)

    @property
    def matrix(self) -> Tensor:
        """The parameter as a matrix (out, in); a vector for rows = 0."""
        # The view is kept as long as the buffer is the same one.
        if self._seen is not None and self._seen[0] is self._parameters.flat:
            return self._seen[1]
        value = self._parameters.value(self._name)
        matrix = value.view(math.prod(self.shape[: self._rows]), -1) if self._rows else value.flatten()
        if self._parameters.zero < 3 and self._parameters.lies_flat and self._parameters.flat is not None:
            self._seen = self._parameters.flat, matrix
        return matrix

    def add(self, grad: Tensor) -> None:
        """Adds a gradient of `matrix`'s or `value`'s shape."""
        self._parameters.add_grad(self._name, grad)

    def add_matmul(self, lhs: Tensor, right: Tensor) -> None:
        """Adds lhsᵀ · right, of `matrix`'s shape. lhs: (tokens, out); right: (tokens, in)."""
        self._parameters.add_matmul(self._name, lhs.T, right)

    def add_matmuls(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Adds to each matrix of the parameter the product of a pair: what `value` has first is how many there are."""
        self._parameters.add_matmuls(self._name, pairs)

    def add_rows(self, at: Tensor, rows: Tensor) -> None:
        """Adds rows (tokens, width) at places (tokens) of a table."""
        self._parameters.add_rows(self._name, at, rows)
