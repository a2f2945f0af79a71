"""`Order`: one pipeline schedule with every fact about it.

An `Order` says how rows are built, for which numbers of ranks, microbatches and stages, where stages lie, what becomes
of the backward, how many microbatches are in flight, and what other programs call it. Plans are checked against it, the
search takes its space and bounds from it, formats and documentation their names. Leaves out times, prices and messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from gnomon.errors import PlanError

if TYPE_CHECKING:  # rows need numpy, which whoever only asks for names does not
    from gnomon.program.rows import Rows

DEFAULT = "one_f_one_b"
"""The order of a plan that names none."""

Placement = Literal["loop", "v"]
Vocabulary = Literal["ends", "vocab_1", "vocab_2", "interlaced"]

Count = Callable[[int, int, int, int], int]
"""(rank, pipeline ranks, microbatches, stages a rank) -> how many."""


def any_number(ranks: int, microbatches: int, virtual: int) -> str:
    """No rule on the number of microbatches."""
    return ""


def multiple_of_ranks(ranks: int, microbatches: int, virtual: int) -> str:
    """What is wrong with a number of microbatches that is no multiple of the pipeline ranks."""
    if microbatches % ranks == 0:
        return ""
    nearest = max(1, round(microbatches / ranks)) * ranks
    return (
        f"needs a multiple of {ranks} microbatches (its pipeline ranks), not {microbatches}; the nearest is {nearest}"
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Order:
    """A pipeline schedule: the order in which every rank computes forwards and backwards. It stands in a file of its
    own, under the name `ORDER`."""

    name: str
    """As in a plan, and as its file is called: the paper's name."""
    title: str
    """What people call it, as in `1F1B`."""
    paper: str
    """Where it is from."""
    build: Callable[[int, int, int], Rows]
    """(pipeline ranks, microbatches, stages a rank) -> rows of compute actions, for numbers that are legal."""
    stages: tuple[int, int | None] = (1, 1)
    """Fewest and most stages that a rank holds; None: no limit."""
    placement: Placement = "loop"
    """Where stage s of a rank's several lies. `loop`: on rank s mod p. `v`: 0 … p - 1 and back again."""
    least_ranks: int = 1
    """Fewest pipeline ranks."""
    microbatches: Callable[[int, int, int], str] = any_number
    """(pipeline ranks, microbatches, stages a rank) -> what is wrong with the number of microbatches, after the words
    `schedule NAME`, with the nearest legal one; empty when nothing is."""
    backward: Literal["whole", "split", "both"] = "whole"
    """`whole`: one action B. `split`: input gradient I and weight gradient W apart. `both`: some are one, some are
    split."""
    composite: bool = False
    """Whether some forwards and backwards are one action, which starts and ends together (a row group)."""
    in_flight: Count | None = None
    """The most units (a microbatch counts once for each stage of the rank) between the start of their forward and the
    end of their input gradient, exactly: the search leaves out plans by it. None: nobody has counted; the search knows
    of one."""
    activations: Count | None = None
    """The same until the end of the last part of their backward, W where it is split: whose activations are held. None:
    as many as are in flight."""
    vocabulary: Mapping[Vocabulary, Callable[[int, int], Rows]] = field(default_factory=lambda: MappingProxyType({}))
    """Ways to divide the vocabulary over the pipeline -> (pipeline ranks, microbatches) -> rows with its parts."""
    names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Software (the name of its stack) -> what it calls this order."""
    aliases: tuple[str, ...] = ()
    """What else people write, in lower case with `_`, for a hint."""
    preference: int = 1000
    """Of equally fast plans the search returns that of the smallest; ties go by name."""
    tried: bool = False
    """Whether `explain` tries it as one change of a plan."""
    bubble: str = ""
    """What a rank waits in a step from rest, in p, v, F, B and, where the backward is split, T = F = I = W."""
    held: str = ""
    """`activations` in words: microbatches of a rank's layers."""
    asks: str = ""
    """`microbatches` in words."""

    def __post_init__(self) -> None:
        least, most = self.stages
        if not self.name.isidentifier() or least < 1 or (most is not None and most < least) or self.least_ranks < 1:
            raise PlanError(
                f"order {self.name!r} with stages = {self.stages} and least_ranks = {self.least_ranks}: a name is an "
                f"identifier, a rank holds at least 1 stage and there is at least 1 rank"
            )

    @property
    def split(self) -> bool:
        """Whether some weight gradients are actions of their own."""
        return self.backward != "whole"

    @property
    def looped(self) -> bool:
        """Whether the number of stages on a rank is a choice."""
        return self.stages[1] is None or self.stages[1] > self.stages[0]

    def takes(self, virtual: int) -> bool:
        """Whether a rank can hold so many stages."""
        least, most = self.stages
        return least <= virtual and (most is None or virtual <= most)

    @property
    def stages_text(self) -> str:
        """How many stages a rank holds, in words."""
        least, most = self.stages
        return f"{least} or more" if most is None else f"{least}" if most == least else f"{least} to {most}"

    def stages_reason(self, ranks: int, virtual: int, placement: Placement | None = None) -> str | None:
        """Why it has no rows for so many pipeline ranks and stages on each, or None. placement: of the plan's stages,
        where it has one."""
        least, most = self.stages
        wrong = virtual > 1 and placement not in (None, self.placement)
        if ranks >= self.least_ranks and self.takes(virtual) and not wrong:
            return None
        if self.looped and not wrong:
            limit = "" if most is None else f" (at most {most})"
            return (
                f"schedule {self.name} needs at least {self.least_ranks} pipeline ranks and {least} virtual stages"
                f"{limit}, but has {ranks} and {virtual}; raise them, or use {DEFAULT}"
            )
        if least == 1 and not self.looped:
            return f"schedule {self.name} takes one stage on each rank, but has {virtual}; use an interleaved one"
        stages = f"virtual_stages = {virtual if self.looped else least}"
        had = f"{virtual}" if placement is None else f"{virtual} and {placement!r}"
        return f"schedule {self.name} needs {stages} and placement = {self.placement!r}, but has {had}; set both"

    def legal(self, ranks: int, microbatches: int, virtual: int) -> str | None:
        """Why it has no rows for these numbers, with what to do; None when it has."""
        if ranks < 1 or microbatches < 1:
            return (
                f"schedule {self.name} needs at least 1 pipeline rank and 1 microbatch, but has {ranks} and "
                f"{microbatches}"
            )
        if (reason := self.stages_reason(ranks, virtual)) is not None:
            return reason
        wrong = self.microbatches(ranks, microbatches, virtual)
        return f"schedule {self.name} {wrong}" if wrong else None

    def rows(
        self, ranks: int, microbatches: int, virtual: int | None = None, *, vocabulary: Vocabulary = "ends"
    ) -> Rows:
        """Rows of compute actions. virtual: stages on each rank, left out the fewest. PlanError for numbers that are
        not legal, or a vocabulary that it is not known with."""
        virtual = self.stages[0] if virtual is None else virtual
        if (reason := self.legal(ranks, microbatches, virtual)) is not None:
            raise PlanError(reason)
        if vocabulary == "ends":
            return self.build(ranks, microbatches, virtual)
        if vocabulary not in self.vocabulary:
            raise PlanError(f"schedule {self.name} has no rows with vocabulary = {vocabulary!r}; use 'ends'")
        return self.vocabulary[vocabulary](ranks, microbatches)

    def rank_of(self, stage: int, ranks: int) -> int:
        """Pipeline rank of a stage."""
        # `turn` is the chunk: its place among the stages of its rank. In a V odd ones come back from the last rank.
        turn, at = divmod(stage, ranks)
        return ranks - 1 - at if self.placement == "v" and turn % 2 else at

    def least_in_flight(self, rank: int, ranks: int, microbatches: int, virtual: int) -> int:
        """`in_flight` where somebody has counted, else 1, which always holds."""
        return 1 if self.in_flight is None else self.in_flight(rank, ranks, microbatches, virtual)

    def most_held(self, rank: int, ranks: int, microbatches: int, virtual: int) -> int | None:
        """Units whose activations a rank holds at most; None where nobody has counted."""
        count = self.activations or self.in_flight
        return None if count is None else count(rank, ranks, microbatches, virtual)
