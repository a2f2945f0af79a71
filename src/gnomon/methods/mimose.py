"""Mimose (IPDPS 2023): the length of each microbatch says which layers are recomputed, within a budget of bytes.

The first microbatches run with every repeated layer recomputed, and what each layer held is a `Sample`. `estimate` fits
a polynomial of second degree in the tokens of a microbatch to what each layer holds; `recomputed` chooses the fewest
layers whose recomputation keeps a microbatch within the budget; `RecomputeController` keeps one choice for each size.
Depends on samples alone. Leaves out measuring (`runtime.watch.layer_bytes`) and running (`runtime.step.mimose`), and
the paper's cost in seconds: repeated layers take alike.

Source: Liao et al., "Exploiting Input Tensor Dynamics in Activation Checkpointing for Efficient Training on GPU".
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import PlanError
from gnomon.methods.method import Method, Param
from gnomon.orders.one_f_one_b import ORDER as ONE_F_ONE_B
from gnomon.plans import Plan, Saved
from gnomon.units import parse_bytes

NAME = "mimose"

ROUND = 32
"""Tokens: microbatches whose sizes differ by less share a choice, that of the largest."""
SIZES = 3
"""Different sizes that a polynomial of second degree needs."""
MARGIN = 0.01
"""Of the budget, which estimates leave free."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MimoseSettings:
    """What the plan asks for."""

    budget: int
    """Bytes of tensors on a rank's device."""
    collect: int = 10
    """Microbatches that are measured before the first choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBytes:
    """Bytes of each layer, in the order of their forwards."""

    kept_bytes: tuple[float, ...]
    """What its forward leaves where it is not recomputed: what backward reads, and its output."""
    left_bytes: tuple[float, ...]
    """What its forward leaves where it is; the same as `kept` for a layer that never is."""
    work: tuple[float, ...]
    """Most that its forward or backward takes besides what the layers before it left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A microbatch that ran with every repeated layer recomputed."""

    tokens: int
    """Positions, of all its rows."""
    base: int
    """Bytes on the device that are no microbatch's: parameters, gradients, states, the batch."""
    forward_bytes: ForwardBytes
    """What the forwards of its layers kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What layers hold, as polynomials of second degree in tokens that are below no sample and never fall."""

    coefficients: Numbers
    """(3 quantities of `ForwardBytes`, layers, powers 0 to 2), raised so that no sample is above."""
    error: float
    """Largest share of a layer's largest sample by which the polynomials, before that, were off."""
    least: int
    """Tokens of the smallest sample. Smaller microbatches count as one of these."""
    most: int
    """Tokens of the largest sample. Of larger ones nothing is said."""

    def at(self, tokens: int) -> ForwardBytes:
        """Predicts the bytes of a microbatch of up to `most` tokens, in whole bytes."""
        # A polynomial says nothing outside of what it was fitted to. With coefficients >= 0 it never falls, so the
        # smallest sample's bytes are enough for less.
        size = min(max(tokens, self.least), self.most)
        values = np.ceil(self.coefficients @ np.array([1.0, size, float(size) ** 2]))
        saved, input_bytes, work = (tuple(row) for row in values.tolist())
        return ForwardBytes(kept_bytes=saved, left_bytes=input_bytes, work=work)


def estimate(samples: Sequence[Sample]) -> Estimate:
    """Fitted to all samples."""
    tokens = np.array([sample.tokens for sample in samples], dtype=np.float64)
    seen = np.array(
        [
            (sample.forward_bytes.kept_bytes, sample.forward_bytes.left_bytes, sample.forward_bytes.work)
            for sample in samples
        ]
    )
    most = tokens.max()
    if len(set(tokens.tolist())) < SIZES:  # too few sizes for a curve: the most that was seen, whatever the size
        flat = np.zeros((*seen.shape[1:], 3))
        flat[..., 0] = seen.max(axis=0)
        return Estimate(coefficients=flat, error=0.0, least=int(most), most=int(most))
    # Scaled to 1, or the three columns would differ by 1e8 and the fit lose its digits.
    powers = (tokens / most)[:, None] ** np.arange(3)
    fitted = np.apply_along_axis(lambda y: _nonnegative(powers, y), 0, seen)  # (powers, quantities, layers)
    values = np.tensordot(powers, fitted, axes=1)
    scale = np.maximum(seen.max(axis=0), 1.0)
    error = float((np.abs(values - seen) / scale).max())
    short = np.maximum(seen - values, 0.0).max(axis=0)
    # Raised by the worst miss, so that no sample lies above: too much recomputation is slow, too little runs out of
    # memory.
    fitted[0] += short
    # Fitted in tokens / most: each power is scaled back, so that `at` takes tokens.
    coefficients = np.moveaxis(fitted, 0, -1) / np.array([1.0, most, most**2])
    return Estimate(coefficients=coefficients, error=error, least=int(tokens.min()), most=int(most))


def _nonnegative(columns: Numbers, values: Numbers) -> Numbers:
    """The coefficients >= 0 with the least squared error: of all subsets of columns the best whose solution has no
    negative one, which for three columns is the exact answer (Lawson and Hanson 1974)."""
    best, least = np.zeros(columns.shape[1]), float(values @ values)
    for count in range(1, columns.shape[1] + 1):
        for chosen in combinations(range(columns.shape[1]), count):
            some = columns[:, chosen]
            found = np.linalg.lstsq(some, values, rcond=None)[0]
            if found.min() < 0:
                continue
            off = some @ found - values
            if (squares := float(off @ off)) < least:
                best, least = np.zeros(columns.shape[1]), squares
                best[list(chosen)] = found
    return best


def peak(forward: ForwardBytes, chosen: Collection[int]) -> float:
    """Most bytes of a microbatch where these layers are recomputed."""
    before, most = 0.0, 0.0
    for layer, work in enumerate(forward.work):
        own = forward.left_bytes[layer] if layer in chosen else forward.kept_bytes[layer]
        most = max(most, before + work, before + own)
        before += own
    return most


def recomputed(forward: ForwardBytes, layers: Sequence[int], room: float) -> tuple[int, ...] | None:
    """The fewest of `layers` whose recomputation keeps `peak` within `room`; None where all are not enough.

    Layers in forward order; whenever the next one does not fit, the one before it that frees most is recomputed, the
    earliest of equals. No choice of as few frees more before any layer, so fewer are never enough.
    """
    may, before = frozenset(layers), 0.0
    chosen: list[int] = []
    waiting: list[tuple[float, int]] = []
    for layer, work in enumerate(forward.work):
        saved, input_bytes = forward.kept_bytes[layer], forward.left_bytes[layer]
        # Only layers whose forward has run are in the heap: recomputing a later one frees nothing at this point.
        while before + work > room and waiting:
            freed, earlier = heappop(waiting)
            before += freed
            chosen.append(earlier)
        if before + work > room:
            return None
        before += saved
        if layer in may and saved > input_bytes:
            # Negative, so that the smallest of the heap is the layer that frees most, and the earliest of equals.
            # Adding it to `before` takes off what is freed.
            heappush(waiting, (input_bytes - saved, layer))
        while before > room and waiting:
            freed, earlier = heappop(waiting)
            before += freed
            chosen.append(earlier)
        if before > room:
            return None
    return tuple(sorted(chosen))


class RecomputeController:
    """Says of each microbatch which layers are recomputed, or that it is to be measured. Choices are kept by size."""

    def __init__(self, settings: MimoseSettings, layers: Sequence[int]) -> None:
        """layers: those that may be recomputed, in forward order."""
        self.settings, self.layers = settings, tuple(layers)
        self.samples: list[Sample] = []
        self.estimate: Estimate | None = None
        self.choices: dict[int, tuple[int, ...]] = {}
        self.num_made = self.found = 0
        """Choices that were worked out, and those that were there."""

    @property
    def room(self) -> float:
        """Bytes for a microbatch."""
        return self.settings.budget * (1 - MARGIN) - max(sample.base for sample in self.samples)

    def choose(self, tokens: int) -> tuple[int, ...] | None:
        """Chooses the layers to recompute; None: all of them, and the microbatch is to be measured, because too few
        were, or all were smaller."""
        if len(self.samples) < self.settings.collect or tokens > max(sample.tokens for sample in self.samples):
            return None
        if self.estimate is None:
            self.estimate = estimate(self.samples)
        # Rounded up: the choice of the largest size that shares it holds for all.
        size = -(-tokens // ROUND) * ROUND
        if size in self.choices:
            self.found += 1
        else:
            self.num_made += 1
            choice = recomputed(self.estimate.at(size), self.layers, self.room)
            self.choices[size] = self.layers if choice is None else choice  # all of them is what was measured
        return self.choices[size]

    def take(self, sample: Sample) -> None:
        """One more measured microbatch: what was chosen before is chosen anew."""
        self.samples.append(sample)
        self.estimate = None
        self.choices.clear()


def settings_of(plan: Plan) -> MimoseSettings:
    """What a plan that names the method asks for. PlanError for parameters that mean nothing."""
    read = METHOD.read_from(plan)
    budget, collect = parse_bytes(str(read["budget"])), int(read["collect"])
    if budget < 1 or collect < 1:
        raise PlanError(f"pass {NAME}: budget = {read['budget']!r} and collect = {collect} must be above 0")
    return MimoseSettings(budget=budget, collect=collect)


def _refusal(plan: Plan) -> str | None:
    settings_of(plan)
    mesh = plan.mesh
    if plan.num_stages > 1 or mesh.pp > 1:
        return "stages of a pipeline hold several microbatches at once, and it plans for one; use pp = 1"
    if mesh.tp > 1 or mesh.cp > 1 or mesh.ep > 1:
        return (
            f"tp = {mesh.tp}, cp = {mesh.cp}, ep = {mesh.ep} share out a layer, and ranks that recompute different "
            f"ones would wait for each other; use data parallelism"
        )
    if plan.optimizer.zero == 3 or plan.optimizer.offload is not None:
        return "a layer is a stage of its own under ZeRO 3 and a streamed update; use zero <= 2 without offload"
    if plan.saved != Saved():
        return "it decides what is recomputed; leave saved out"
    if plan.schedule.name != ONE_F_ONE_B.name:
        return f"microbatches must go back before the next goes forward, which {plan.schedule.name} is not; use " + (
            ONE_F_ONE_B.name
        )
    if others := [one.name for one in plan.schedule.passes if one.name != NAME]:
        return f"{others[0]} changes the same rows; leave one out"
    if plan.placement:
        return "logical workers take turns in one process; leave placement (--processes) out"
    return None


METHOD = Method(
    name=NAME,
    paper="Mimose, Liao et al., IPDPS 2023",
    about="layers are recomputed as the length of each microbatch asks, within a budget of memory",
    switch="schedule.passes",
    exactness="bitwise",
    missing={
        "rewritten": "its rows are those of the plan: what differs is which layers a forward keeps",
        "planned": "its choices follow from lengths that are met while it runs; a search has one length",
        "predicted": "its choices follow from what the first microbatches held; saved.preset = 'full' is its most",
    },
    params=(
        Param(name="budget", about="bytes of tensors on a rank, as in '2 GiB'"),
        Param(name="collect", about="microbatches that are measured first", default=MimoseSettings(budget=1).collect),
    ),
    refusal=_refusal,
)
