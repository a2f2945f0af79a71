"""The ladder: what each change of a plan frees and costs, alone and combined, the smallest first.

`alone` predicts every level of every option; `combined` every set of options, in the order of its size, of which no
smaller set fits, each then taken only as far as it must be. `asked_less` changes the job itself. A `Rung` holds the
prediction that its numbers are from. Leaves out plans that differ in other ways: that is the exact search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from gnomon.errors import GnomonError, GraphError, PlanError
from gnomon.graph import Graph
from gnomon.models.lora import Adapters, with_adapters
from gnomon.models.trained import Trained, with_trained
from gnomon.plans import Plan, Workload
from gnomon.plans.check import batch
from gnomon.prediction import Prediction, predict
from gnomon.prediction.changes import Single
from gnomon.prediction.loading import host_short
from gnomon.search.budget import KeepGoing, always
from gnomon.search.checkpointing.plan import least_recompute
from gnomon.search.fit.options import BY_NAME, OF_PROGRAM, OPTIONS, ORDER, Amounts, Option
from gnomon.search.fit.terms import Change, Terms
from gnomon.search.space.points import repeated_layers
from gnomon.software import Stack, proposes, unsupported

LARGEST = 5
"""Options in a combination, at most."""
EACH = 3
"""Combinations of one size that are looked into, the fastest; of single changes that fit all are."""
SHOWN = 10
"""Combinations that are given back, at most."""
NOTHING = 0.005
"""Share of the device under which what a change frees counts as nothing."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One change, or several together."""

    options: tuple[str, ...]
    """Names of the options."""
    changes: tuple[str, ...]
    """What changes, in words."""
    plan: Plan
    """The plan with the changes, whether or not it can run."""
    prediction: Prediction | None
    """None if it cannot run."""
    fits: bool = False
    """Whether every rank has room with it, and the host too."""
    why_not: str = ""
    """What it breaks, if it cannot run; or why it does not fit although the devices have room."""

    @property
    def what(self) -> str:
        """All changes in a line."""
        return " + ".join(self.changes)

    @property
    def step_s(self) -> float:
        """Seconds of a step, of a rung that can run."""
        assert self.prediction is not None
        return self.prediction.step_s

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of its tightest rank."""
        assert self.prediction is not None
        return self.prediction.tightest.peak_bytes


MOST_ROWS = 2**17
"""Forwards, backwards and gathers of layers in a step that is one of many to be looked at: seconds each."""


@dataclass(kw_only=True)
class Fitting:
    """A plan that is to fit, with every prediction that was made of its neighbours."""

    base: Prediction
    """The plan as it is."""
    limit_bytes: int | None = None
    """What a rank may fill; None is the device."""
    options: Sequence[Option] = OPTIONS
    """What may be changed; those that the program cannot do, or the file cannot say, are left out."""
    by_tensor: bool = False
    """Whether combinations with recompute choose what is recomputed tensor by tensor."""
    keep_going: KeepGoing = always
    """The budget, asked before each combination."""
    on_progress: Callable[[int], None] | None = None
    """Is called with the number of predictions so far."""
    terms: Terms | None = None
    """The words of the file that the plan came from: what it cannot say is not looked at."""
    count: int = 0
    """Predictions made."""
    incomplete: bool = False
    """Whether something was not looked at: the budget ended, or a plan would have taken minutes to play."""
    _strong: dict[str, str] = field(default_factory=dict)
    _seen: dict[tuple[Plan, Workload, Stack, str], Prediction | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        stack = self.base.pricing.stack
        able = [o for o in self.options if o.name not in BY_NAME or o.name in stack.runs.choices]
        if self.terms is not None:
            able = [o for o in able if o.name in self.terms.words]
        self.options = able

    def lines(self, rung: Rung) -> tuple[str, ...]:
        """A rung's changes in the terms of the user's own file; none where the plan is from no such file."""
        return self._lines_of(rung.options, rung.plan) or ()

    def _lines_of(self, options: Sequence[str], plan: Plan) -> tuple[str, ...] | None:
        if self.terms is None or any(name not in self.terms.words for name in options):
            return ()
        return self.terms.of(options, Change(before=self.base.plan, after=plan, workload=self.base.workload))

    def _stack(self, options: Sequence[str]) -> Stack:
        """The program's record with options that no plan says."""
        stack = self.base.pricing.stack
        for option in self.options:
            if option.name in options:
                stack = option.software(stack) or stack
                if self.terms is not None and option.name in self.terms.stack_changes:
                    stack = self.terms.stack_changes[option.name](stack)
        return stack

    def _amounts(self, option: Option, plan: Plan) -> Amounts | None:
        """How an option can be taken in part, where the user's file can say so."""
        if self.terms is not None and option.name not in self.terms.in_part:
            return None
        return option.amounts(plan, self.base.pricing.graph)

    def has_room(self, prediction: Prediction) -> bool:
        """Whether every rank fits with room, and stays under the limit."""
        limit = self.limit_bytes
        return prediction.has_room and (limit is None or prediction.tightest.peak_bytes <= limit)

    def rung(
        self,
        options: Sequence[str],
        changes: Sequence[str],
        plan: Plan,
        work: Workload | None = None,
        graph: Graph | None = None,
    ) -> Rung:
        """Predicts the plan, as the words of the user's file make it; a plan that was predicted before is not again.
        graph: in place of the job's."""
        if self.terms is not None:
            plan = self.terms.plan_of(Change(before=self.base.plan, after=plan, workload=work or self.base.workload))
        bare = Rung(options=tuple(options), changes=tuple(changes), plan=plan, prediction=None)
        stack, before = self.base.pricing.stack, self.base.plan
        if not proposes(stack, before, plan):
            lacking = [what for what in unsupported(stack, plan) if what not in unsupported(stack, before)]
            return replace(bare, why_not=f"{stack.name} does not run {'; '.join(lacking)}")
        if self._lines_of(options, plan) is None:
            return replace(bare, why_not=f"{stack.name} cannot be told to")
        outcome = self._predicted(plan, work or self.base.workload, self._stack(options), graph)
        if isinstance(outcome, str):
            return replace(bare, why_not=outcome)
        short = host_short(outcome, self.limit_bytes) if self.has_room(outcome) else ""
        return replace(bare, prediction=outcome, fits=self.has_room(outcome) and not short, why_not=short)

    def _predicted(self, plan: Plan, work: Workload, stack: Stack, other: Graph | None = None) -> Prediction | str:
        key = (plan, work, stack, "" if other is None else other.name)
        if key not in self._seen and (long := self._too_long(plan, work)):
            self._seen[key] = long
            self.incomplete = True
        if key not in self._seen:
            pricing = self.base.pricing
            try:
                self._seen[key] = predict(other or pricing.graph, pricing.cluster, plan, work, stack)
            except GnomonError as error:
                self._seen[key] = str(error).partition(";")[0]
            self.count += 1
            if self.on_progress is not None:
                self.on_progress(self.count)
        return self._seen[key]

    def _too_long(self, plan: Plan, work: Workload) -> str:
        """Why a change is not predicted though it may run: one of many is to take seconds, and a plan that is played
        layer by layer takes a minute for a million rows. Empty where it is short, or no longer than the plan asked."""
        if plan.optimizer.zero != 3 and plan.optimizer.offload is None:
            return ""
        layers = len(self.base.pricing.graph.layers())
        try:
            count, base_batch = batch(plan, work)[0], batch(self.base.plan, self.base.workload)[0]
        except PlanError:
            return ""  # predict says it better
        if 4 * count * layers <= MOST_ROWS or count <= base_batch:
            return ""
        return f"{count:,} microbatches of {layers} layers are not looked at: a step of them takes minutes to play"

    def levels(self, option: Option, plan: Plan) -> list[Single]:
        """Ways to take an option in a plan."""
        pricing = self.base.pricing
        plain = option.levels(plan, pricing.graph, pricing.cluster)
        if option.name in OF_PROGRAM and option.software(pricing.stack) is None:
            return []
        try:
            return list(plain)
        except PlanError:
            # Changes before this one may leave a plan that cannot run, as more stages than there are layers: nothing
            # is to be added to it.
            return []

    def single_changes(self) -> Iterator[Rung]:
        """Every level of every option by itself, and half of what can be taken in part."""
        plan = self.base.plan
        for option in self.options:
            amounts = self._amounts(option, plan)
            if amounts is not None and amounts.most > 1:
                words, changed = amounts.part(amounts.most // 2)
                if (half := self.rung((option.name,), (words,), changed)).prediction is not None:
                    yield half
            for words, changed in self.levels(option, plan):
                yield self.rung((option.name,), (words,), changed)

    def combined(self) -> list[Rung]:
        """Sets of options that fit where no smaller part of them does, each taken only as far as it must be; by the
        number of options, and the step."""
        rungs = self.enough()
        by_size = [sorted((r for r in rungs if len(r.options) == n), key=_step) for n in range(1, LARGEST + 1)]
        best = [*sorted(rungs, key=_step)[:EACH], *by_size[0], *(rung for of in by_size[1:] for rung in of[:EACH])]
        trimmed = {plan: self._trimmed(rung) for plan, rung in {rung.plan: rung for rung in best}.items()}
        by_tensors = [self._by_tensor(rung) for rung in trimmed.values()] if self.by_tensor else list(trimmed.values())
        unique = {rung.plan: rung for rung in by_tensors}
        return sorted(unique.values(), key=lambda rung: (len(rung.options), rung.step_s))[:SHOWN]

    def enough(self) -> list[Rung]:
        """Sets of options, each as far as it goes, that fit where no smaller part of them does: of one option first. Of
        one by itself the level that is fastest."""
        enough: list[frozenset[str]] = []
        rungs: list[Rung] = []
        for size in range(1, LARGEST + 1):
            for chosen in combinations(self.options, size):
                names = frozenset(option.name for option in chosen)
                if any(fewer <= names for fewer in enough):
                    continue
                if not self.keep_going():
                    self.incomplete = True
                    break
                rung = self._fastest_alone(chosen[0]) if size == 1 else self._strongest(chosen)
                if rung is not None and rung.fits:
                    enough.append(names)
                    rungs.append(rung)
        return rungs

    def _fastest_alone(self, option: Option) -> Rung | None:
        """Picks the fastest of one option's levels that fit, or the strongest where none does."""
        rungs = [self.rung((option.name,), (words,), plan) for words, plan in self.levels(option, self.base.plan)]
        fit = [rung for rung in rungs if rung.fits]
        return min(fit, key=_step) if fit else self._strongest((option,))

    def _strongest(self, chosen: Sequence[Option]) -> Rung | None:
        """The options together, each as far as it goes, or as far as it can where that cannot run; None where one of
        them has no room."""
        combination = self.together(chosen)
        return None if combination is None else self.rung(tuple(option.name for option in chosen), *combination)

    def together(self, chosen: Sequence[Option]) -> tuple[tuple[str, ...], Plan] | None:
        """(changes, plan) of several options at their strongest; None where one has no room beside the others."""
        plan, words = self.base.plan, dict[str, str]()
        for option in in_order(chosen):
            levels = self.levels(option, plan)
            if not levels:
                return None
            strongest = self._strongest_alone(option)
            words[option.name], plan = next((level for level in levels if level[0] == strongest), levels[-1])
        return tuple(words[option.name] for option in chosen), plan

    def _strongest_alone(self, option: Option) -> str:
        """Words of the level with the least memory by itself, of several the last; empty where none can run."""
        if option.name not in self._strong:
            rungs = [self.rung((option.name,), (words,), plan) for words, plan in self.levels(option, self.base.plan)]
            able = [rung for rung in reversed(rungs) if rung.prediction is not None]
            best = min(able, key=lambda rung: rung.peak_bytes, default=None)
            self._strong[option.name] = "" if best is None else best.what
        return self._strong[option.name]

    def _trimmed(self, rung: Rung) -> Rung:
        """A rung that fits with each option taken less far, as long as it still fits and is faster."""
        chosen = [option for option in self.options if option.name in rung.options]
        # None stands for the last level of an option (`_level`).
        levels = dict(zip(rung.options, [None] * len(chosen), strict=True))
        best = rung
        for option in chosen:
            for weaker in self._weaker(chosen, dict(levels), option):
                if weaker.fits and weaker.step_s < best.step_s:
                    best = weaker
                    levels[option.name] = weaker.changes[weaker.options.index(option.name)]  # type: ignore[assignment]
        return best

    def _by_tensor(self, rung: Rung) -> Rung:
        """A rung that fits by recompute, with the least recomputation with which it fits; as it is where that is no
        faster."""
        if "recompute" not in rung.options or rung.prediction is None or rung.plan.stages:
            return rung
        tightest = rung.prediction.tightest
        limit = min(self.limit_bytes or tightest.limit_bytes, tightest.limit_bytes)
        for _ in range(3):
            least = least_recompute(rung.prediction, limit)
            if least is None:
                return rung
            self.count += least.predicted
            changes = tuple(
                "recompute by tensor" if name == "recompute" else words
                for name, words in zip(rung.options, rung.changes, strict=True)
            )
            tensor_rung = self.rung(rung.options, changes, least.prediction.plan)
            if tensor_rung.fits:
                return tensor_rung if tensor_rung.step_s < rung.step_s else rung
            limit = int(
                limit * min(0.99, tightest.limit_bytes / max(rank.usual_bytes for rank in least.prediction.memory))
            )
        return rung

    def _weaker(self, chosen: Sequence[Option], levels: dict[str, str | None], of: Option) -> Iterator[Rung]:
        """The combination with one option at its other levels, and at the least amount that fits."""
        plan = self.base.plan
        count = max(len(self.levels(of, plan)), 3)
        seen: set[str] = set()
        for index in range(count):
            weaker = self._with(chosen, levels, of, index)
            if weaker is not None and weaker.what not in seen:
                seen.add(weaker.what)
                yield weaker
        low, high, best = 0, self._most(chosen, levels, of), None
        while high - low > 1:  # the least amount that fits, taking for granted that more frees more
            middle = (low + high) // 2
            weaker = self._with(chosen, levels, of, middle, part=True)
            if weaker is not None and weaker.fits:
                high, best = middle, weaker
            else:
                low = middle
        if best is not None:
            yield best

    def _most(self, chosen: Sequence[Option], levels: dict[str, str | None], of: Option) -> int:
        before = self._before(chosen, levels, of)
        amounts = None if before is None else self._amounts(of, before[0])
        return 0 if amounts is None else amounts.most

    def _before(
        self, chosen: Sequence[Option], levels: dict[str, str | None], of: Option
    ) -> tuple[Plan, dict[str, str]] | None:
        """The plan with the other options as they are taken, and their words."""
        plan, words = self.base.plan, dict[str, str]()
        for option in in_order(chosen):
            if option is of:
                continue
            leveled = self._level(option, plan, levels[option.name])
            if leveled is None:
                return None
            words[option.name], plan = leveled
        return plan, words

    def _level(self, option: Option, plan: Plan, amount: str | None) -> Single | None:
        """The level of these words, or the last."""
        levels = self.levels(option, plan)
        # Where words are given they may be of an amount too; without any, the last level is meant.
        amounts = self._amounts(option, plan)
        if amount is not None and amounts is not None:
            levels += [amounts.part(number) for number in range(1, amounts.most)]
            return next((level for level in levels if level[0] == amount), None)
        return next((level for level in levels if level[0] == amount), levels[-1] if levels else None)

    def _with(
        self,
        chosen: Sequence[Option],
        option_levels: dict[str, str | None],
        of: Option,
        index: int,
        *,
        part: bool = False,
    ) -> Rung | None:
        """The combination with one option at a level, or at an amount."""
        before = self._before(chosen, option_levels, of)
        if before is None:
            return None
        plan, words = before
        amounts = self._amounts(of, plan) if part else None
        if amounts is not None:
            words[of.name], plan = amounts.part(index)
        else:
            levels = self.levels(of, plan)
            if index >= len(levels):
                return None
            words[of.name], plan = levels[index]
        names = tuple(option.name for option in chosen)
        return self.rung(names, tuple(words[name] for name in names), plan)

    def asked_less(self) -> Iterator[Rung]:
        """The job itself made smaller or less exact: shorter sequences, fewer of them, narrower gradients and
        states."""
        plan, work = self.base.plan, self.base.workload
        if work.seq_len is not None and work.seq_len > 1:
            half = replace(work, seq_len=work.seq_len // 2)
            yield self.rung(("seq_len",), (f"sequences of {work.seq_len // 2} tokens",), plan, half)
        if work.global_batch_size is not None and work.global_batch_size > 1:
            half = replace(work, global_batch_size=work.global_batch_size // 2)
            yield self.rung(("global_batch",), (f"global batch {work.global_batch_size // 2}",), plan, half)
        precision = plan.precision
        for name, value in (("grad", precision.param), ("states", precision.param)):
            if getattr(precision, name) == "fp32" and value != "fp32":
                words = "gradients" if name == "grad" else "optimizer states"
                narrow = replace(plan, precision=replace(precision, **{name: value}))  # type: ignore[arg-type]
                yield self.rung((f"{name}_dtype",), (f"{words} in {value}",), narrow)
        yield from self.adapted()

    def adapted(self) -> Iterator[Rung]:
        """The network frozen, with adapters on all linears of its layers: where the job's program can be told so."""
        graph, plan = self.base.pricing.graph, self.base.plan
        if self.terms is None or graph.num_frozen():
            return
        narrow = plan.precision.compute
        precision = replace(plan.precision, param=narrow, grad=narrow, reduce=narrow, master="none", states=narrow)
        for option, base, what in (
            ("adapters", "compute", "LoRA of rank 16 on all linears"),
            ("adapters_nf4", "nf4", "QLoRA: the same, frozen weights in four bits"),
        ):
            if option not in self.terms.words:
                continue
            try:
                adapted_graph = with_adapters(graph, Adapters(rank=16, base=base))  # type: ignore[arg-type]
            except GraphError:
                return
            yield self.rung((option,), (what,), replace(plan, precision=precision), graph=adapted_graph)
        if "some_layers" in self.terms.words:
            count = repeated_layers(graph)[1]
            last = "|".join(str(number) for number in range(max(0, count - LAST), count))
            part = with_trained(graph, Trained(patterns=(rf"\.({last})\.",)))
            yield self.rung(("some_layers",), (f"only the last {LAST} layers are trained",), plan, graph=part)


LAST = 2
"""Layers that are trained where few are: LLaMA-Factory's default."""


def _step(rung: Rung) -> float:
    return rung.step_s


def in_order(chosen: Sequence[Option]) -> list[Option]:
    """Options in the order in which they are made."""
    return sorted(chosen, key=lambda option: ORDER.index(option.name) if option.name in ORDER else len(ORDER))


def freed_bytes(base: Prediction, rung: Rung) -> int:
    """What a rung frees on the tightest rank; negative where it takes more."""
    return base.tightest.peak_bytes - rung.peak_bytes


def cost(base: Prediction, rung: Rung) -> float:
    """Share by which a token takes longer; negative where it is faster."""
    assert rung.prediction is not None
    return base.tokens_per_s_per_device / rung.prediction.tokens_per_s_per_device - 1


def helps(base: Prediction, rung: Rung) -> bool:
    """Whether a rung can run and frees something."""
    if rung.prediction is None:
        return False
    return freed_bytes(base, rung) > NOTHING * base.tightest.limit_bytes
