"""Skrull: which sequences of a batch go together, and which of them context parallelism divides (NeurIPS 2025).

`dacp` decides for one microbatch which sequences stay whole on one rank, `gds` packs a global batch into microbatches
for the data-parallel ranks; both are heuristics on lengths alone. `skrull_pass` reads what a plan asks. Leaves out rows
and prices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from gnomon.errors import PlanError
from gnomon.plans import Schedule, Unit, normalised
from gnomon.plans.parts import SKRULL, Context, pass_numbers

NAME = SKRULL
"""Of the pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkrullPass:
    """What a plan asks of Skrull."""

    capacity: int = 16384
    """Tokens that a context-parallel rank holds (the paper's BucketSize)."""
    gather_up_to: int = 0
    """Divided sequences of at most so many tokens attend to gathered keys and values, whatever `layout.context` says;
    0: none."""
    ulysses_up_to: int = 0
    """The same by heads in place of positions (Ulysses), for those that are longer than `gather_up_to`."""

    def style(self, tokens: int, usual: Context) -> Context:
        """How ranks attend to a divided sequence of so many tokens. usual: of the layout."""
        if tokens <= self.gather_up_to:
            return "all_gather"
        return "ulysses" if tokens <= self.ulysses_up_to else usual


def skrull_pass(schedule: Schedule) -> SkrullPass | None:
    """What the schedule asks of Skrull; None where it has no such pass."""
    skrull_settings = pass_numbers(schedule, NAME, SkrullPass())
    return None if skrull_settings is None else SkrullPass(**skrull_settings)


DIVIDED = -1
"""Placement of a sequence that all context-parallel ranks share."""

Work = Callable[[int], int]
"""FLOPs (or any measure of work) of a sequence of so many tokens."""


def dacp(lengths: Sequence[int], *, capacity: int, cp: int, work: Work) -> tuple[int, ...]:
    """Chooses for each sequence of a microbatch the rank that has it whole, or DIVIDED (distribution-aware context
    parallelism).

    lengths: tokens; capacity: tokens that a rank can hold; cp: ranks. Shortest first, a sequence goes to the rank with
    least work if it has room, else to the one with most room, else it is divided. Where no room is left for its part,
    the fullest rank's longest whole sequence is divided instead and the placement tried again. PlanError when the
    sequences do not even fit with all of them divided.
    """
    placed = _place(lengths, capacity, cp, work)
    if placed is None:
        total = sum(lengths)
        raise PlanError(
            f"{len(lengths)} sequences of {total} tokens do not fit {cp} ranks of {capacity} tokens; raise cp, or "
            f"make the microbatch smaller"
        )
    return placed


@dataclass(slots=True, kw_only=True)
class _Ranks:
    """Room and work of each rank while sequences are placed."""

    lengths: Sequence[int]
    work: Work
    room: list[Fraction]
    load: list[Fraction]
    placed: dict[int, int] = field(default_factory=dict)

    def keep(self, sequence: int, rank: int, sign: int = 1) -> None:
        """Places a sequence whole on a rank; with sign -1 takes it away."""
        self.room[rank] -= sign * self.lengths[sequence]
        self.load[rank] += sign * self.work(self.lengths[sequence])
        self.placed[sequence] = rank

    def divide(self, sequence: int) -> None:
        """Gives each rank its part of a sequence."""
        for rank in range(len(self.room)):
            self.room[rank] -= Fraction(self.lengths[sequence], len(self.room))
            self.load[rank] += Fraction(self.work(self.lengths[sequence]), len(self.room))
        self.placed[sequence] = DIVIDED

    def roll_back(self) -> bool:
        """Divides the longest whole sequence of the fullest rank. False when it has none."""
        # Least room: the fullest.
        rank = min(range(len(self.room)), key=self.room.__getitem__)
        whole = [sequence for sequence, where in self.placed.items() if where == rank]
        if whole:
            longest = max(whole, key=lambda sequence: self.lengths[sequence])
            self.keep(longest, rank, sign=-1)
            self.divide(longest)
        return bool(whole)


def _place(lengths: Sequence[int], capacity: int, cp: int, work: Work) -> tuple[int, ...] | None:
    if cp < 1 or capacity < 1 or (lengths and min(lengths) < 1):
        raise PlanError(f"cp = {cp}, capacity = {capacity} tokens and all lengths must be at least 1")
    ranks = _Ranks(lengths=lengths, work=work, room=[Fraction(capacity)] * cp, load=[Fraction(0)] * cp)
    for sequence in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        # Each roll-back divides one more sequence, and none becomes whole again: it ends.
        while sequence not in ranks.placed:
            lightest = min(range(cp), key=ranks.load.__getitem__)
            emptiest = max(range(cp), key=ranks.room.__getitem__)
            fits = [rank for rank in (lightest, emptiest) if ranks.room[rank] >= lengths[sequence]]
            if fits:
                ranks.keep(sequence, fits[0])
            # Every rank must have room for its part.
            elif min(ranks.room) >= Fraction(lengths[sequence], cp):
                ranks.divide(sequence)
            elif not ranks.roll_back():
                return None
            while min(ranks.room) < 0:  # dividing a rolled-back sequence can overfill another rank
                if not ranks.roll_back():
                    return None
    return tuple(ranks.placed[sequence] for sequence in range(len(lengths)))


def gds(lengths: Sequence[int], *, data_ranks: int, capacity: int, cp: int, work: Work) -> tuple[Unit, ...]:
    """Makes the units of one global batch, each with its whole (`local`) sequences (global data scheduling).

    Sequences go to the data-parallel ranks by work, largest first to the least loaded; each rank takes the fewest
    microbatches for which `dacp` finds room, and deals its sequences to them by length, so that each gets long and
    short ones. Weights are normalised. PlanError for a sequence longer than `cp` ranks can hold together, or an idle
    rank.
    """
    if data_ranks < 1 or len(lengths) < data_ranks:
        raise PlanError(f"{len(lengths)} sequences do not give each of {data_ranks} data-parallel ranks one")
    shares: list[list[int]] = [[] for _ in range(data_ranks)]
    load = [0] * data_ranks
    # Longest processing time first, by FLOPs and not by tokens: attention grows with the square.
    for sequence in sorted(range(len(lengths)), key=lambda i: (-work(lengths[i]), i)):
        worker = min(range(data_ranks), key=load.__getitem__)
        shares[worker].append(sequence)
        load[worker] += work(lengths[sequence])
    units = []
    for worker, share in enumerate(shares):
        share.sort(key=lambda i: (lengths[i], i))
        for members, placed in _microbatches(lengths, share, capacity, cp, work):
            pieces = tuple((sequence, 0, lengths[sequence]) for sequence in members)
            local = tuple((s, rank) for s, rank in zip(members, placed, strict=True) if rank != DIVIDED)
            units.append(Unit(pieces=pieces, worker=worker, local=local))
    return normalised(units)


def _microbatches(
    lengths: Sequence[int], share: Sequence[int], capacity: int, cp: int, work: Work
) -> list[tuple[Sequence[int], tuple[int, ...]]]:
    """The sequences of each microbatch of one worker, with their placement."""
    total = sum(lengths[sequence] for sequence in share)
    for count in range(max(1, -(-total // (capacity * cp))), len(share) + 1):
        # Sorted by length and dealt in turn, so that each microbatch has short ones to fill up with.
        dealt = [share[first::count] for first in range(count)]
        placed = [_place([lengths[sequence] for sequence in members], capacity, cp, work) for members in dealt]
        microbatches = [(members, where) for members, where in zip(dealt, placed, strict=True) if where is not None]
        if len(microbatches) == count:
            return microbatches
    longest = max(lengths[sequence] for sequence in share)
    raise PlanError(f"a sequence of {longest} tokens does not fit {cp} ranks of {capacity} tokens; raise cp")
