"""The update of the part of each stage that a rank has, and the global gradient norm.

`Update.of(kind, parameters).update(parameters, …)` changes master copy and parameters in place, with torch's fused
kernels where it has them (AdamW, Adam, SGD); `squares` is a rank's term of the squared norm, in which every element of
the model counts once over all ranks. What takes weight decay follows from the op that reads a parameter
(`sharding.matrices.takes_decay`): matrices and tables do; norms, biases and the vectors of a scan do not. Rules that
look at whole matrices (Adafactor, Muon) are `matrix`. Left out: communication.
Sources: Kingma and Ba 2015; Loshchilov and Hutter 2019; Chen et al. 2023 (Lion).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gnomon.runtime.optim.learning_rate import LearningRate
from gnomon.runtime.optim.matrix import ALONE, Ranks, adafactor, is_orthogonal, moments_of, muon
from gnomon.runtime.parameters.parameters import Parameters, Range

CHUNK = 1 << 18
"""Elements that are converted or updated at once: what is made on the way (1 MiB in float32) never adds to the peak."""
CUDA_CHUNK = 1 << 26
"""The same on a GPU, where a launch costs as much as the arithmetic on a million elements (256 MiB in float32)."""
SUMMED = 1 << 16
"""Elements whose squares are added up in float32 on a CPU; sums of these are added up in float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWSettings:
    """Numbers of the update; each rule takes those that it has."""

    lr: float = 3e-4
    """Learning rate."""
    rate: LearningRate = LearningRate()
    """How it changes over steps."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Of matrices."""
    momentum: float = 0.9
    """Of `momentum` and `muon`."""
    clip_norm: float = 1.0
    """Largest global gradient norm, where the plan clips."""


@dataclass(slots=True, kw_only=True)
class Update:
    """States of one flat part."""

    kind: str
    """Name of the rule, as in `plan.optimizer.kind`."""
    first: Tensor | None
    """Running mean of the gradient; None for SGD without momentum."""
    second: Tensor | None
    """Running mean of its square; None for rules without."""
    factored: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By parameter what a rule keeps beside: Adafactor's means over columns and rows (of a vector, its second moment),
    and Muon's second moment of what it leaves to AdamW (embeddings and vectors)."""
    steps: int = 0
    """Updates so far."""

    @staticmethod
    def of(parameters: Parameters, kind: str = "adamw") -> Update:
        """An update rule with its states at 0."""
        size, dtype, device = parameters.mine[1] - parameters.mine[0], parameters.dtypes.states, parameters.device
        first, second = (torch.zeros(size, dtype=dtype, device=device) if n in STATES[kind] else None for n in (1, 2))
        return Update(kind=kind, first=first, second=second, factored=moments_of(kind, parameters))

    @property
    def nbytes(self) -> int:
        """Bytes of the states."""
        pairs = (tensor for pair in self.factored.values() for tensor in pair)
        return sum(tensor.nbytes for tensor in (self.first, self.second, *pairs) if tensor is not None)

    def update(
        self, parameters: Parameters, settings: AdamWSettings, *, scale: Tensor | float, ranks: Ranks = ALONE
    ) -> None:
        """One step on this rank's part. scale: what gradients are multiplied by (clipping). ranks: that have the rest
        of its matrices, who all come here."""
        # Before the count goes up: the schedule counts updates made.
        lr = settings.lr * settings.rate.factor(self.steps)
        self.steps += 1
        # With a master copy that is what is updated, and parameters are rounded from it.
        target = parameters.shard.to(parameters.device) if parameters.master is None else parameters.master
        grads = parameters.my_grad()
        by = scale.to(grads.dtype) if isinstance(scale, Tensor) else None if scale == 1.0 else scale
        # These look at whole matrices, so all gradients are scaled before the first of them.
        if self.kind in MATRIX_RULES:
            if by is not None:
                grads.mul_(by)
            MATRIX_RULES[self.kind](self, parameters, target, grads, settings, lr, ranks)
        else:
            for (low, high), decays in runs(parameters):
                for part in chunks(low, high, CUDA_CHUNK if target.is_cuda else CHUNK):
                    if by is not None:  # here, while the part is in the cache
                        grads[part].mul_(by)
                    self._rule(target, grads, part, settings, lr, settings.weight_decay if decays else 0.0)
        if target is not parameters.shard:
            parameters.shard.copy_(target)

    def _rule(
        self, target: Tensor, grads: Tensor, part: slice, settings: AdamWSettings, lr: float, decay: float
    ) -> None:
        p, g = target[part], grads[part]
        m, v = (None if state is None else state[part] for state in (self.first, self.second))
        states = [x for x in (m, v) if x is not None]
        # All of one dtype: the kernel writes in place.
        if {p.dtype} == {x.dtype for x in (g, *states)}:
            RULES[self.kind](p, g, m, v, settings, lr, decay, self.steps)
            return
        wide = torch.promote_types(p.dtype, states[0].dtype if states else g.dtype)  # the kernels take one dtype
        copies = [None if x is None else x.to(wide) for x in (p, m, v)]
        assert copies[0] is not None
        RULES[self.kind](copies[0], g.to(wide), copies[1], copies[2], settings, lr, decay, self.steps)
        for before, after in zip((p, m, v), copies, strict=True):
            # `to` returns the tensor itself where the dtype is that already.
            if before is not None and after is not None and before is not after:
                before.copy_(after)


Rule = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, AdamWSettings, float, float, int], None]
"""(parameters, gradients, first, second, settings, learning rate, weight decay, updates so far, this one included)."""


def _adam(fused: Callable[..., None]) -> Rule:
    def rule(
        p: Tensor, g: Tensor, m: Tensor | None, v: Tensor | None, s: AdamWSettings, lr: float, decay: float, steps: int
    ) -> None:
        assert m is not None and v is not None
        if p.device.type == "meta":  # which has no fused kernels
            return
        one, two = s.betas
        count = torch.full((), float(steps), device=p.device)
        fused(
            [p], [g], [m], [v], [], [count], amsgrad=False, lr=lr, beta1=one, beta2=two, weight_decay=decay,
            eps=s.eps, maximize=False,
        )  # fmt: skip

    return rule


def _sgd(
    p: Tensor, g: Tensor, m: Tensor | None, v: Tensor | None, s: AdamWSettings, lr: float, decay: float, steps: int
) -> None:
    # is_first_step sets the buffer to the gradient; a buffer that begins at 0, without dampening, comes to the same.
    torch._fused_sgd_(
        [p], [g], [] if m is None else [m], weight_decay=decay, momentum=0.0 if m is None else s.momentum, lr=lr,
        dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
    )  # fmt: skip


def _lion(
    p: Tensor, g: Tensor, m: Tensor | None, v: Tensor | None, s: AdamWSettings, lr: float, decay: float, steps: int
) -> None:
    assert m is not None
    # Algorithm 2 of the Lion paper: the sign of an interpolation by beta1, and only then the momentum by beta2.
    p.mul_(1 - lr * decay).add_(torch.lerp(g, m, s.betas[0]).sign_(), alpha=-lr)
    m.lerp_(g, 1 - s.betas[1])


RULES: Mapping[str, Rule] = {
    "adamw": _adam(torch._fused_adamw_),
    "adam": _adam(torch._fused_adam_),
    "sgd": _sgd,
    "momentum": _sgd,
    "lion": _lion,
}
"""Rules that see element after element, whatever part of a matrix a rank has."""

STATES: Mapping[str, tuple[int, ...]] = {
    "adamw": (1, 2),
    "adam": (1, 2),
    "sgd": (),
    "momentum": (1,),
    "lion": (1,),
    "adafactor": (),
    "muon": (1,),
}
"""Moments of a parameter's size that each rule keeps; Adafactor's second is rows and columns."""


def _adafactor(
    update: Update, parameters: Parameters, target: Tensor, grads: Tensor, s: AdamWSettings, lr: float, ranks: Ranks
) -> None:
    adafactor(parameters, target, grads, update.factored, lr=lr, decay=s.weight_decay, steps=update.steps, ranks=ranks)


def _muon(
    update: Update, parameters: Parameters, target: Tensor, grads: Tensor, s: AdamWSettings, lr: float, ranks: Ranks
) -> None:
    assert update.first is not None
    for slot, (low, high) in parameters.pieces():
        if is_orthogonal(slot):
            continue
        p, g, m = (x[low:high] for x in (target, grads, update.first))
        decay = s.weight_decay if slot.decays else 0.0
        RULES["adamw"](p, g.to(p.dtype), m, update.factored[slot.name][0], s, lr, decay, update.steps)
    muon(parameters, target, grads, update.first, lr=lr, decay=s.weight_decay, mu=s.momentum, ranks=ranks)


MATRIX_RULES: Mapping[str, Callable[[Update, Parameters, Tensor, Tensor, AdamWSettings, float, Ranks], None]] = {
    "adafactor": _adafactor,
    "muon": _muon,
}
"""Rules that look at whole matrices, of which other ranks may have parts."""


def runs(parameters: Parameters) -> Iterator[tuple[Range, bool]]:
    """Ranges within `mine` of parameters next to each other that decay alike, and whether they do."""
    ranges: list[tuple[int, int, bool]] = []
    for slot, (low, high) in parameters.pieces():
        # Neighbours that decay alike are one call of the kernel.
        if ranges and ranges[-1][1] == low and ranges[-1][2] == slot.decays:
            ranges[-1] = (ranges[-1][0], high, slot.decays)
        else:
            ranges.append((low, high, slot.decays))
    for low, high, decays in ranges:
        yield (low, high), decays


def chunks(low: int, high: int, most: int) -> Iterator[slice]:
    """Parts of at most so many elements."""
    for first in range(low, high, most):
        yield slice(first, min(first + most, high))


def squares(parameters: Parameters) -> Tensor:
    """This rank's terms of the squared norm, in float64. Elements that several ranks hold count in part on each."""
    grad = parameters.my_grad()
    terms = [
        torch.stack([sum_of_squares(grad[part]) for part in pieces]).double() / holders
        for holders, pieces in _by_holders(parameters, CUDA_CHUNK if grad.is_cuda else SUMMED)
    ]
    return torch.cat(terms) if terms else torch.zeros(0, dtype=torch.float64, device=parameters.device)


def summed(terms: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of vectors in float64. On a CPU rounded once, so that it does not matter how layers share a buffer."""
    # fsum rounds once, exactly: the norm is the same number however elements are divided over calls.
    terms = [term.to(device) for term in terms]
    if device.type == "cpu":
        return torch.tensor(math.fsum(x for term in terms for x in term.tolist()), dtype=torch.float64)
    return torch.cat(terms).sum() if terms else torch.zeros((), dtype=torch.float64, device=device)


def _by_holders(parameters: Parameters, most: int) -> Iterator[tuple[int, list[slice]]]:
    """(ranks that have the same elements, ranges within `mine` of those that so many have, of at most `most`)."""
    ranges: dict[int, list[slice]] = {}
    for slot, (low, high) in parameters.pieces():
        if not slot.holders:
            continue
        first = parameters.mine[0]
        for one, (begin, end) in slot.each_expert():
            begin, end = max(low, begin - first), min(high, end - first)
            # Each of so many ranks adds a share, so that over all ranks every element counts once.
            count = one.holders * parameters.replicas * (one.held_by[0] if one.held_by else 1)
            if begin < end:
                ranges.setdefault(count, []).extend(chunks(begin, end, most))
    yield from ranges.items()


def sum_of_squares(x: Tensor) -> Tensor:
    """The sum of a vector's squares: on a GPU in float64, on a CPU in float32 or x's wider dtype, so of a short one."""
    if x.is_cuda:  # one kernel, which widens as it reads
        return torch.linalg.vector_norm(x, dtype=torch.float64).square()
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    return torch.dot(wide, wide)


def clip_scale(norm: Tensor, limit: float) -> Tensor:
    """What gradients are multiplied by so that their norm is at most `limit`."""
    # 1e-6 as in torch.nn.utils.clip_grad_norm_.
    return torch.clamp(limit / (norm + 1e-6), max=1.0)
