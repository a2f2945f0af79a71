"""Checkpoints in memory: each rank's state is copied to the next rank, so that a lost one is given it without a disk.

A rank's state is its part of parameters, master copies and optimizer states, the updates behind it, the loss scale and
torch's random numbers; the place in the data is the step. `take` sends it to the next rank, the last one's to the
first, but for ranks that hold the same as others (data parallelism without ZeRO, `dp_replicate`): any of those has it.
`commit` follows once all ranks have taken, so that at any moment there is one step of which every rank's state is in
two places. Each rank holds its own copy, which it goes back to, and two places for the rank before it, of which one
takes what comes while the other is whole. Leaves out when (`survivors`).
Source: Wang et al. 2023 (Gemini), which keeps checkpoints in the memory of other machines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from gnomon.runtime.step.execute import Executor

NONE = -1
"""Step of a copy that holds nothing."""


@dataclass(slots=True)
class Copy:
    """The state of one rank after a step."""

    step: int = NONE
    data: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    """All of it, as bytes."""

    def room(self, nbytes: int) -> Tensor:
        """A buffer of so many bytes for the next copy; what was there is gone."""
        self.step = NONE
        if self.data.numel() != nbytes:
            self.data = torch.empty(nbytes, dtype=torch.uint8)
        return self.data


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSteps:
    """Steps of which a rank has copies."""

    own: tuple[int, ...]
    """Of its own state."""
    of_neighbour: tuple[int, ...]
    """Of the rank before it."""


def keeper(rank: int, ranks: int) -> int:
    """The rank that keeps the copy of `rank`: the next one."""
    return (rank + 1) % ranks


def source(rank: int, step: int, held_steps: Sequence[HeldSteps], alike: Sequence[int]) -> int | None:
    """The rank that has the state of `rank` after `step`: itself, one that holds the same, or its keeper; None where
    none has. held_steps, alike: by rank; ranks that hold the same parts have one number in `alike`."""
    same = [rank, *(other for other, number in enumerate(alike) if number == alike[rank] and other != rank)]
    if (found := next((one for one in same if step in held_steps[one].own), None)) is not None:
        return found
    next_one = keeper(rank, len(held_steps))
    return next_one if len(same) == 1 and step in held_steps[next_one].of_neighbour else None


def latest(held_steps: Sequence[HeldSteps], alike: Sequence[int]) -> int | None:
    """The last step after which the state of every rank is somewhere; None where there is none."""
    steps = {step for one in held_steps for step in (*one.own, *one.of_neighbour)} - {NONE}
    ranks = range(len(held_steps))
    return max((s for s in steps if all(source(r, s, held_steps, alike) is not None for r in ranks)), default=None)


class MemoryCheckpoint:
    """What one rank holds. It outlives process groups and executors: `attach` gives it those of now."""

    def __init__(self) -> None:
        self.own, self.neighbour, self._coming = Copy(), Copy(), Copy()
        self._live = NONE
        """Step whose state the executor has and that was taken, but that not all ranks are known to have."""
        self._executor: Executor | None = None
        self.alike: tuple[int, ...] = ()
        """By rank a number that those which hold the same parts have in common; nothing before the first `attach`."""
        self.sent = self.num_copies = 0
        """Bytes, and copies."""
        self.took_s = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of all copies that are held here."""
        return sum(copy.data.numel() for copy in (self.own, self.neighbour, self._coming))

    def attach(self, executor: Executor, *, draws: bool = False) -> None:
        """Copies are of this executor's state from now on. All ranks must call it. draws: whether steps draw random
        numbers, so that no two ranks have the same state."""
        self._executor = executor
        everyone = [""] * dist.get_world_size()
        dist.all_gather_object(everyone, f"{_parts_named(executor)}{dist.get_rank() if draws else ''}")
        self.alike = tuple(map(everyone.index, everyone))

    def detach(self) -> None:
        """Forgets the executor, which is about to be given up."""
        self._executor, self._live = None, NONE

    def take(self, step: int) -> None:
        """Sends this rank's state to the next rank, and receives that of the one before, where no other rank has it.
        All ranks must call it."""
        began, executor = perf_counter(), self._executor
        assert executor is not None
        executor.synchronise()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        before = (rank - 1) % ranks
        to = keeper(rank, ranks) if self.alike.count(self.alike[rank]) == 1 else None
        by = before if self.alike.count(self.alike[before]) == 1 else None
        parts = _parts(executor) if to is not None else []
        # How many, then how long, then the bytes: the rank before may be another stage, whose tensors are other ones.
        mine = torch.tensor([part.numel() for part in parts])
        (count,) = _exchanged([torch.tensor([len(mine)])], [torch.zeros(1, dtype=torch.int64)], to, by)
        (sizes,) = _exchanged([mine], [torch.zeros(int(count), dtype=torch.int64)], to, by)
        if by is not None:
            _exchanged(parts, self._coming.room(int(sizes.sum())).split(sizes.tolist()), to, by)
            self._coming.step = step
        else:
            _exchanged(parts, [], to, by)
        self._live = step
        self.sent += int(mine.sum())
        self.num_copies += 1
        self.took_s += perf_counter() - began

    def commit(self) -> None:
        """What was taken is what to go back to. Only where all ranks are known to have taken it; nothing if nothing
        was."""
        if self._live == NONE:
            return
        began = perf_counter()
        self._copy_own(self._live)
        self.neighbour, self._coming = self._coming, self.neighbour
        self._live = self._coming.step = NONE
        self.took_s += perf_counter() - began

    def steps_held(self) -> HeldSteps:
        """Steps that are here."""
        return HeldSteps(own=(self.own.step, self._live), of_neighbour=(self.neighbour.step, self._coming.step))

    def share(self, step: int, held_steps: Sequence[HeldSteps], alike: Sequence[int]) -> int:
        """Gives ranks without their own copy of `step` the one that another has (`source`), and returns the bytes that
        this rank sent or received. All ranks must call it."""
        self.alike = tuple(alike)
        rank, ranks, moved = dist.get_rank(), len(held_steps), 0
        # Taken, and then a rank was lost before all knew of it: the executor still has this state.
        if step == self._live and step != self.own.step:
            self._copy_own(step)
        if step == self._coming.step:
            self.neighbour, self._coming = self._coming, self.neighbour
        for lost in (lost for lost in range(ranks) if step not in held_steps[lost].own):
            has = source(lost, step, held_steps, self.alike)
            assert has is not None, "a step was chosen that is not everywhere"
            if rank == has:
                data = self.own.data if self.alike[has] == self.alike[lost] else self.neighbour.data
                dist.send(torch.tensor([data.numel()]), lost)
                dist.send(data, lost)
                moved += data.numel()
            elif rank == lost:
                dist.recv(size := torch.zeros(1, dtype=torch.int64), has)
                dist.recv(self.own.room(int(size)), has)
                self.own.step = step
                moved += int(size)
        return moved

    def restore(self) -> None:
        """Puts the own copy into the executor. All ranks must call it: parameters that ZeRO 1 or 2 divides are gathered
        again."""
        executor = self._executor
        assert executor is not None and self.own.step != NONE
        executor.synchronise()
        # First: `_parts` lists these states too, and a new executor may not have made them yet.
        _make_factored(executor, self.own.data)
        parts = _parts(executor)
        assert sum(part.numel() for part in parts) == self.own.data.numel(), "the copy is of another state"
        for part, saved in zip(parts, self.own.data.split([part.numel() for part in parts]), strict=True):
            part.copy_(saved)
        # Views of the state were filled by copying. The last four are made by `_parts` itself: random numbers and
        # counts are set by hand.
        *_, rng, numbers, _, _ = parts
        _set_numbers(executor, numbers.view(torch.float64).tolist())
        torch.set_rng_state(rng)
        executor.host.take()
        if executor.plan.optimizer.zero in (1, 2):
            executor.state.unshard(executor.stages)
            executor.synchronise()

    def _copy_own(self, step: int) -> None:
        assert self._executor is not None
        parts = _parts(self._executor)
        sizes = [part.numel() for part in parts]
        for room, part in zip(self.own.room(sum(sizes)).split(sizes), parts, strict=True):
            room.copy_(part)
        self.own.step = step


def _exchanged(sent: Sequence[Tensor], rooms: Sequence[Tensor], to: int | None, by: int | None) -> Sequence[Tensor]:
    """Sends to one rank and receives from another, where there is one; returns what came."""
    works = [dist.isend(part, to, tag=tag) for tag, part in enumerate(sent)] if to is not None else []
    works += [dist.irecv(room, by, tag=tag) for tag, room in enumerate(rooms)] if by is not None else []
    for work in works:
        if work is not None:
            work.wait()
    return rooms


def _parts_named(executor: Executor) -> str:
    """A checksum that says which elements of which parameters this rank updates."""
    signature = [
        ([(s.name, s.offset, s.shape) for s in parameters.slots], parameters.mine)
        for parameters, _ in executor.parameters()
    ]
    return hashlib.sha256(repr(signature).encode()).hexdigest()


def _parts(executor: Executor) -> list[Tensor]:
    """Bytes of all that lives from one step to the next on this rank: views of it, then random numbers, counts, a table
    of states that rules made as they went, and the length of that."""
    parts = []
    for parameters, rule in executor.parameters():
        factored = [x for name in sorted(rule.factored) for x in rule.factored[name]]
        parts += [
            x
            for x in (parameters.shard, parameters.master, rule.first, rule.second, *factored)
            if x is not None and x.numel()
        ]
    assert all(part.is_contiguous() for part in parts)
    numbers = torch.tensor(_numbers(executor), dtype=torch.float64)
    table = torch.frombuffer(bytearray(json.dumps(_factored(executor)).encode()), dtype=torch.uint8)
    parts += [torch.get_rng_state(), numbers, table, torch.tensor([table.numel()])]
    return [part.detach().reshape(-1).view(torch.uint8) for part in parts]


def _factored(executor: Executor) -> list[dict[str, list[tuple[list[int], str]]]]:
    """Shapes and dtypes of the factored moments (`Update.factored`) of each update rule, by parameter."""
    return [
        {name: [(list(x.shape), str(x.dtype)) for x in rule.factored[name]] for name in sorted(rule.factored)}
        for _, rule in executor.parameters()
    ]


def _make_factored(executor: Executor, data: Tensor) -> None:
    """Room for what rules keep beside, as it was in the copy."""
    # The last 8 bytes say how long the table before them is (`_parts`). A copy, since a view as int64 wants an aligned
    # begin.
    length = int(data[-8:].clone().view(torch.int64))
    factored_moments = json.loads(bytes(data[-8 - length : -8].tolist()))
    for (_, rule), moments in zip(executor.parameters(), factored_moments, strict=True):
        rule.factored.clear()
        for name, pair in moments.items():
            one, other = (
                torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch."))) for shape, dtype in pair
            )
            rule.factored[name] = one, other


def _numbers(executor: Executor) -> list[float]:
    """Updates behind each part, and the loss scale."""
    scaler = executor.state.loss_scale
    scale = () if scaler is None else (scaler.scale, float(scaler.good_steps))
    return [*(float(rule.steps) for _, rule in executor.parameters()), *scale]


def _set_numbers(executor: Executor, numbers: Sequence[float]) -> None:
    updates: Collection[float] = numbers
    if (scaler := executor.state.loss_scale) is not None:
        *updates, scaler.scale, good = numbers
        scaler.good_steps = int(good)
    for (_, rule), steps in zip(executor.parameters(), updates, strict=True):
        rule.steps = int(steps)
