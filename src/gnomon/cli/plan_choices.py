"""`gnomon plan`: what `--fix`, `--forbid`, `--allow`, `--refine` and `--methods` say of choices and fields.

`PlanChoices.read(options, stack)` tells apart what the exact search fixes or forbids from what the refinement does;
`PlanChoices.passes` is what follows that search. Leaves out both searches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gnomon import orders
from gnomon.cli.options.plan import PlanOptions
from gnomon.errors import InputError, PlanError, nearest
from gnomon.methods import bamboo, methods_named
from gnomon.plans import Plan
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.search import Limit, Point
from gnomon.search.passes import Passes
from gnomon.search.refinement.choices import (
    NAMES,
    Choice,
    Value,
    allowed,
    choice,
    of_method,
    parse_choice_limit,
    read_value,
    runs,
    runs_value,
)
from gnomon.search.refinement.make_fit import Spare
from gnomon.search.refinement.refine import QUICK, THOROUGH, Effort
from gnomon.search.results import FoundPlan, Result
from gnomon.search.space.points import EXTRA_CHOICES
from gnomon.search.stages.cut import Cut
from gnomon.software import Stack, own

FLAGS = ("sequence_parallel", "keep_gathered", "overlap")
"""Fields that are yes or no."""

WORDS = {
    "recompute": ("none", "selective", "full"),
    "context": ("ring", "all_gather", "ulysses"),
    "zero": ("0", "1", "2", "3"),
}
"""Fields with few values, and what they are; a schedule is one of `gnomon.orders`."""


@dataclass(frozen=True, kw_only=True)
class PlanChoices:
    """The choices that options fix or open, and the plan that they start from."""

    point: Mapping[str, object]
    """Field of a point -> its one value."""
    fixed: Mapping[str, Value]
    """Choice -> its one value, in the base plan where the exact search can have it."""
    late: Mapping[str, Value]
    """Of these, the ones that only the refinement makes."""
    forbid: tuple[str, ...]
    """Limits on fields of points."""
    limits: tuple[Limit, ...]
    """Limits on choices."""
    open: tuple[Choice, ...]
    """Choices that the refinement tries."""
    extra_choices: tuple[str, ...]
    """Of these, what the exact search has too: all of its values are allowed."""
    effort: Effort | None
    """How much the refinement tries; None where it is left out."""
    is_requested: bool
    """Whether the user asks for it, or fixes what only it can do."""

    @staticmethod
    def read(options: PlanOptions, stack: Stack) -> PlanChoices:
        """Reads the choices from the options. InputError or PlanError for what cannot be."""
        point: dict[str, object] = {}
        fixed: dict[str, Value] = {}
        for text in options.fix:
            name, equals, value = (part.strip() for part in text.partition("="))
            name = name.replace("-", "_")
            if not equals or not value:
                raise InputError(f"--fix {text[:40]!r} has no value; write NAME=VALUE, as in prefetch=2")
            if name in point or name in fixed:
                raise InputError(f"--fix gives {name} twice; keep one")
            if name in Point._fields:
                point[name] = _field(name, value)
            elif name in NAMES:
                fixed[name] = read_value(choice(name), value)
            else:
                known = (*NAMES, *Point._fields)
                raise InputError(
                    f"--fix {text[:40]!r} names no field{nearest(name, known)}; there are {', '.join(known)}"
                )
        if unknown := [name for name, v in fixed.items() if v and not _runs(stack, name, v)]:
            raise PlanError(
                f"--fix {unknown[0]}: stack {stack.name} is not known to run it; it runs "
                f"{', '.join((*stack.runs.choices, *stack.runs.overlaps)) or 'none of the choices'}"
            )
        limits = {text: parse_choice_limit(text) for text in options.forbid}
        on_choices = tuple(limit for limit in limits.values() if limit is not None)
        late = {name: value for name, value in fixed.items() if not choice(name).searched}
        if options.allow and options.refine is False:
            raise InputError(
                f"--allow {options.allow[0][:20]} is for what --no-refine leaves out; drop one of them, or fix a value "
                f"with --fix"
            )
        methods = _methods(options, stack)
        is_requested = bool(options.refine or late or methods)
        opened = (*allowed(stack, allow=options.allow, forbid=on_choices, fixed=fixed), *methods)
        names = [] if options.refine is False else [option.name for option in opened]
        return PlanChoices(
            point=point,
            fixed=fixed,
            late=late,
            forbid=tuple(text for text, limit in limits.items() if limit is None),
            limits=tuple(limit for limit in on_choices if limit.op),
            open=() if options.refine is False else opened,
            extra_choices=tuple(
                name for name in names if name in EXTRA_CHOICES and all(limit.field != name for limit in on_choices)
            ),
            effort=THOROUGH if options.refine or late else QUICK if options.refine is None and opened else None,
            is_requested=is_requested,
        )

    def idle(self, candidate: FoundPlan, result: Result) -> tuple[str, ...]:
        """Choices that are fixed in the base plan and mean nothing in the plan found."""
        names = [name for name in self.fixed if name not in self.late]
        return tuple(name for name in names if not choice(name).values(candidate.plan, result.graph, result.cluster))

    def passes(
        self,
        *,
        uneven_stages: bool,
        layers_per_stage: Cut | None,
        by_tensor: bool = False,
        replicas: Plan | None = None,
    ) -> Passes:
        """What follows the exact search."""
        return Passes(
            uneven_stages=uneven_stages,
            layers_per_stage=layers_per_stage,
            by_tensor=by_tensor,
            effort=self.effort,
            choices=self.open,
            forbid=self.limits,
            fixed=self.late,
            replicas=replicas,
        )

    def spare(self) -> Spare:
        """What may make further work fit; nothing where the refinement is left out."""
        return Spare() if self.effort is None else Spare(choices=self.open, forbid=self.limits)


def _methods(options: PlanOptions, stack: Stack) -> tuple[Choice, ...]:
    """What `--methods` adds to the choices. InputError with --no-refine; PlanError for what is no method, or one that
    the stack does not run."""
    if options.methods is None or options.lengths:  # with --lengths they are no choices: `plan_lengths`
        return ()
    if options.refine is False:
        raise InputError("--methods are tried with the choices that --no-refine leaves out; drop one of them")
    named = methods_named(options.methods)
    if options.mtbf is None and options.methods.strip() != "all" and bamboo.METHOD in named:
        raise InputError("--methods bamboo: copies of stages only cost until something is lost; say how often (--mtbf)")
    known = [method for method in named if stack is PLAIN_STACK or (stack.name == own.NAME and "run" in method.marks)]
    lacking = [method.name for method in named if method not in known]
    if lacking and options.methods.strip() != "all":
        raise PlanError(f"--methods {lacking[0]}: stack {stack.name} is not known to run it; leave it out, or --stack")
    listed = [method.name for method in known if method.stand_ins is not None]
    if listed and options.methods.strip() != "all":
        raise PlanError(f"--methods {listed[0]} is for batches of several lengths; give them with --lengths")
    return tuple(of_method(method) for method in known if not method.searched and method.stand_ins is None)


def _runs(stack: Stack, name: str, value: Value) -> bool:
    return runs(stack, name) and runs_value(stack, choice(name), value)


def _field(name: str, text: str) -> object:
    """A value of a field of a point."""
    if name == "schedule":
        return orders.find(text).name
    if name in WORDS:
        if text not in WORDS[name]:
            raise InputError(f"--fix {name} is one of {', '.join(WORDS[name])}, not {text[:20]!r}")
        return int(text) if name == "zero" else text
    if name in FLAGS:
        if text.lower() not in ("yes", "no", "true", "false"):
            raise InputError(f"--fix {name} is yes or no, not {text[:20]!r}")
        return text.lower() in ("yes", "true")
    if not text.isdigit():
        raise InputError(f"--fix {name} is a whole number, not {text[:20]!r}")
    return int(text)
