"""Method: a published system as one value, which says what turns it on, what it does and how far it goes here.

A method is turned on by a field of the plan. One that is named in `schedule.passes` rewrites the Program, and may ask
what the rewritten one takes (`Context`). Leaves out the list of them, which is the folder (`gnomon.methods`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from gnomon.errors import PlanError, nearest
from gnomon.graph import Graph
from gnomon.plans import Pass, Plan
from gnomon.plans.parts import Scalar
from gnomon.program import Program, Structure
from gnomon.simulate.play import Times

if TYPE_CHECKING:  # of methods that most plans do not name, which a prediction does not load then
    from gnomon.methods.learnt.costs import MethodCosts
    from gnomon.methods.learnt.teaching import Teaching
    from gnomon.storage.integers import Integers
    from gnomon.storage.sparse import Sparse

Mark = Literal["rewritten", "planned", "predicted", "run"]
"""How far a method goes: its Program can be made; `gnomon plan` can choose it; `gnomon predict` prices it; `gnomon run`
executes it."""

MARKS: tuple[Mark, ...] = get_args(Mark)

Exactness = Literal["bitwise", "up to the order of sums", "statistical"]
"""How its results compare with the plain model's: the same bits, the same sums in another order, or another
mathematics."""

Simulate = Callable[[Structure], Times]
"""Plays one step of a Program from rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a rewriting may ask."""

    simulate: Simulate
    """Times of every row under the plan's prices."""
    sizes: Mapping[str, float]
    """Bytes of a buffer by its label, as in `0S`: buffer S of stage 0."""
    limit: float
    """Bytes of buffers that a rank has room for."""


Params = Mapping[str, Scalar]
"""Parameter -> value, those that were left out at their defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """A parameter of a method in `schedule.passes`."""

    name: str
    """As in `params = [["rounds", 64]]`."""
    about: str
    """What it says."""
    default: Scalar | None = None
    """What it is where it is left out; None: it must be given, as text."""
    choices: tuple[Scalar, ...] = ()
    """What it can be; empty: anything of its default's type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """A batch of sequences of one length that a search takes in place of a batch of several lengths."""

    seq_len: int
    """Tokens of each sequence."""
    batch: int
    """Sequences of a step."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Field of a search's point -> the value that the method needs there."""
    forbid: tuple[str, ...] = ()
    """What its plans may not be, as in `zero>2`."""
    passes: tuple[Pass, ...] = ()
    """What turns the method on in the plans that are found."""


ROUND_TO = 1024
"""Tokens to a multiple of which a mean length is rounded up, where it is longer: context parallelism divides it."""


def mean_and_longest(lengths: Sequence[int]) -> tuple[int, ...]:
    """Tokens of the longest of these sequences (what must fit), and of the mean (how much there is to do)."""
    longest, mean = max(lengths), -(-sum(lengths) // len(lengths))
    return tuple(dict.fromkeys((longest, min(-(-mean // ROUND_TO) * ROUND_TO, longest))))


def halves(longest: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Keeps those of a search's usual sizes that are under the longest sequence; where all are as long, powers of two
    under it."""
    usual = tuple(size for size in sizes if size < longest)
    return usual or tuple(2**power for power in range((longest - 1).bit_length() - 1, 0, -1))[:4]


def _by_name(name: str) -> Callable[[Plan], bool]:
    return lambda plan: any(method_used.name == name for method_used in plan.schedule.passes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One published method."""

    name: str
    """As in `schedule.passes` and `--methods`."""
    paper: str
    """System, first author, venue and year."""
    about: str
    """What it does, in a line."""
    switch: str
    """Field of the plan that turns it on: `schedule.passes`, `optimizer.offload` …"""
    exactness: Exactness
    """How its results compare with those of a plan without it."""
    missing: Mapping[Mark, str] = field(default_factory=dict)
    """Marks that it has not, each with the reason."""
    params: tuple[Param, ...] = ()
    """What may be set of it; empty: nothing."""
    rewrite: Callable[[Program, Params, Context], Program] | None = None
    """The Program with the method; None where lowering itself makes the method's rows."""
    on: Callable[[Plan], bool] | None = None
    """Whether a plan uses it; None: whether `schedule.passes` names it."""
    refusal: Callable[[Plan], str | None] = lambda plan: None
    """Why it cannot be used in a plan that asks for it, and what to change; None where it can."""
    unfit: Callable[[Plan, Graph], str | None] = lambda plan, graph: None
    """Why it cannot be used with this model in a plan that asks for it; None where it can."""
    variants: Callable[[Plan], Iterator[Plan]] = lambda plan: iter(())
    """Plans with it, made from one without, the likeliest first; none where it means nothing there."""
    stand_ins: Callable[[Sequence[int], int], Iterator[StandIn]] | None = None
    """(lengths of the batch's sequences, devices) -> batches of one length whose best plans are a start for plans with
    it. None: it is not made for batches of several lengths."""
    costs: Callable[[Plan, Graph], MethodCosts] | None = None
    """What it takes beside the plan's own step; None: nothing that its Program does not show."""
    storage: Callable[[Plan], Integers | Sparse] | None = None
    """How the weights of a plan that uses it can be stored once it has trained; None: as before."""
    teaching: Callable[[Plan], Teaching] | None = None
    """The teacher that a plan that uses it asks for; None: none."""
    resumes: bool = True
    """Whether checkpoints hold all that it keeps, so that a run with it goes on after a stop or a loss."""
    searched: bool = False
    """Every search has it, as a field of its plans, a choice of `--refine`, or by an option of its own (`--mtbf`);
    otherwise `plan --methods` tries it."""

    @property
    def marks(self) -> tuple[Mark, ...]:
        """Lists the marks that the method has."""
        return tuple(mark for mark in MARKS if mark not in self.missing)

    def used(self, plan: Plan) -> bool:
        """Whether the plan uses it."""
        return (self.on or _by_name(self.name))(plan)

    def read_from(self, plan: Plan) -> dict[str, Scalar]:
        """Reads the parameters, as `read` does, of the pass of this name in a plan that has it."""
        return self.parameters_of(
            next(method_used for method_used in plan.schedule.passes if method_used.name == self.name)
        )

    def parameters_of(self, method_used: Pass) -> dict[str, Scalar]:
        """Its parameters from the plan, with defaults. PlanError for one that it has not, or a wrong value."""
        known = {param.name: param for param in self.params}
        stated = dict(method_used.params)
        if unknown := [name for name in stated if name not in known]:
            has = ", ".join(known) or "none"
            raise PlanError(
                f"pass {self.name} has no parameter {unknown[0]!r}{nearest(unknown[0], known)}; it has {has}"
            )
        read: dict[str, Scalar] = {}
        for name, param in known.items():
            value = stated.get(name, param.default)
            if value is None:
                raise PlanError(f"pass {self.name} needs {name}: {param.about}")
            if param.choices and value not in param.choices:
                raise PlanError(f"pass {self.name}: {name} is one of {', '.join(map(str, param.choices))}, not {value}")
            expected = str if param.default is None else type(param.default)
            if type(value) is not expected:
                raise PlanError(
                    f"pass {self.name}: {name} is {param.about}, given as {expected.__name__}, not {value!r}"
                )
            read[name] = value
        return read
