"""Each group is tried once on its first inputs: equal to eager within its dtype, and not slower; else it is given
back.

`Trial` runs kernel and ATen on the same inputs, and on inputs that it makes itself (the user's first may be zeros),
compares, times both in turn and remembers the verdict by what decides it (kernel, sizes, strides, threads), in the
process and on disk, so that layers that are alike are tried once and a second process does not try again. `Again`
compares once more on a later call. Returns ATen's results while it tries. Leaves out repair: a group that
is wrong is ATen's for good.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gnomon.compiler.build import cache_folder, key_of
from gnomon.compiler.machine import this_machine

log = logging.getLogger("gnomon.compiler")
SLOWER = 1.0
"""The ratio to ATen's time up to which a kernel is kept."""
# Rounds of a timing, and the seconds of work after which it ends early. Kernels on a GPU are timed IN_A_ROW launches at
# a time.
REPEATS, ENOUGH_S = 7, 0.06
IN_A_ROW = 10
# Two rounds are enough where one side is so many times slower and a call takes that long: noise is less, and only the
# order of the two is asked. Of shorter calls the difference counts too (`backend.CALL_S`), and rounds cost nothing.
DECISIVE, LONG_S = 2.0, 1e-3
TOLERANCE = {
    torch.float64: (1e-9, 1e-10),
    torch.float32: (2e-4, 1e-5),
    torch.bfloat16: (4e-2, 2e-2),
}
"""Tolerances (relative, in units of the largest element) by dtype; sums are in another order than eager's."""

NEAR = 4.0
"""The multiple of the distances of eager and of moved inputs from the result in double that a kernel may be away from
it."""
MOVES, MOVED = 2, 4.0
"""The number of times that inputs are moved, and by how many units in the last place at most."""

_verdicts: dict[str, dict[str, Any]] = {}
_lock = threading.Lock()


class Trial:
    """A callable in a group's place: gives ATen's results, and its verdict in `kept` once it has been called."""

    def __init__(
        self, source: str, run: Callable[..., Any], aten: Callable[..., Any], *, share: float = 1.0,
        second: tuple[str, Callable[..., Any]] | None = None, second_share: float = 1.0, on_made_inputs: bool = False,
        whole: bool = False, cold: Sequence[bool] = (),
    ) -> None:  # fmt: skip
        """Is not tried yet. share: of ATen's time that the kernel may take; below 1 where a trial does not see all that
        a call costs. on_made_inputs: whether it is tried on inputs of the checker's own too: any floats may be given to
        it, and where whole any integers. second: another kernel and its source, which is tried beside the better of the
        two, and second_share: of whose time it may take. cold: which arguments every call finds in memory, as so much
        is read between two calls that no cache holds them; none of them where it is empty."""
        self.source, self.run, self.aten, self.share, self.second = source, run, aten, share, second
        self.second_share, self.made, self.whole = second_share, on_made_inputs, whole
        self.cold = tuple(cold)
        self.kept: bool | None = None
        self.second_kept = False
        self.verdict: dict[str, Any] = {}

    def __call__(self, *args: Any) -> Any:
        expected = self.aten(*args)
        key = _key(self._of_memory(self.source), args)
        with _lock:
            known = _verdicts.get(key)
        if known is None:
            with _disable_current_modes():  # AOTAutograd looks at each operation of the first call, for 24 us each
                known = self._tried(key, args, expected)
            with _lock:
                _verdicts[key] = known
        self.second_kept = bool(known.get("second", {}).get("kept"))
        self.verdict, self.kept = known, bool(known["kept"])
        return expected

    def _tried(self, key: str, args: tuple[Any, ...], expected: Any) -> dict[str, Any]:
        verdict = self._judged(key, self.run, self.aten, args, expected, self.share)
        if self.second is None:
            return verdict
        source, run = self.second
        # Against whom the second is timed decides its verdict, so that is part of its key.
        best = self.run if verdict["kept"] else self.aten
        key = _key(self._of_memory(f"{source}// {self.source} {verdict['kept']}"), args)
        return {**verdict, "second": self._judged(key, run, best, args, expected, self.second_share)}

    def _of_memory(self, source: str) -> str:
        """What a verdict is kept by: what is fastest from memory need not be in a cache."""
        return f"{source}// from memory: {self.cold}" if any(self.cold) else source

    def _judged(
        self, key: str, run: Callable[..., Any], other: Callable[..., Any], args: tuple[Any, ...], expected: Any,
        share: float,
    ) -> dict[str, Any]:  # fmt: skip
        """Whether a kernel is equal to ATen, and takes at most this share of another's time."""
        try:
            result = run(*args)
        except RuntimeError as error:  # a library that does not take these tensors
            log.debug("a kernel does not run: %s", error)
            return {"kept": False, "wrong": f"it does not run: {error}"}
        wrong = different(result, expected)
        if wrong and not as_right(result, expected, self.aten, args):
            log.warning("a kernel differs from eager (%s): its operations stay PyTorch's", wrong)
            return {"kept": False, "wrong": wrong}
        # Results are compared in every process before a stored verdict is believed: what is on disk answers for the
        # speed of these sizes, by powers of two, and not for these numbers.
        stored = _read(key)
        if stored is not None:
            return stored
        if self.made and (wrong := wrong_on_made(run, self.aten, args, self.whole)):
            log.warning("a kernel differs from eager on made inputs (%s): its operations stay PyTorch's", wrong)
            verdict = {"kept": False, "wrong": wrong}
            _write(key, verdict)
            return verdict
        kernel_s, aten_s = _times(
            run, other, args, after=_other_memory([*args, *result]), before=_forget(args, self.cold)
        )
        verdict = {"kept": kernel_s <= SLOWER * share * aten_s, "kernel_s": kernel_s, "aten_s": aten_s}
        _write(key, verdict)
        return verdict


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether dtype, shape and layout are the same; the stride of a dim of one element says nothing."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return not a.numel() or all(
        one == other for size, one, other in zip(a.shape, a.stride(), b.stride(), strict=True) if size > 1
    )


def different(result: Any, expected: Any) -> str:
    """What is unequal between a kernel's results and eager's, or nothing."""
    for n, (a, b) in enumerate(zip(result, expected, strict=True)):
        if not alike(a, b):
            return f"result {n}: {a.dtype} {tuple(a.shape)} in place of {b.dtype} {tuple(b.shape)}"
        if not a.numel():
            continue
        if not b.dtype.is_floating_point:
            if not torch.equal(a, b):
                return f"result {n}: other {b.dtype} values"
            continue
        relative, least = TOLERANCE[b.dtype]
        top = _top(b)
        if not _near(a, b, relative, max(least * top, 1e-30)):
            apart = float((a.double() - b.double()).abs().nan_to_num().max())
            return f"result {n}: {apart:.3g} apart, largest {top:.3g}"
    return ""


def wrong_on_made(run: Callable[..., Any], aten: Callable[..., Any], args: tuple[Any, ...], whole: bool) -> str:
    """What is wrong with a kernel's results on inputs as those given, whose numbers the user's may not have: ordinary
    ones, and special ones among them. whole: whether integers may be any of their type; else they stay, as
    ATen reads memory by them."""
    for special in (False, True):
        inputs = tuple(_made_like(a, n, special, whole) for n, a in enumerate(args))
        try:
            expected = aten(*inputs)
        except (RuntimeError, IndexError):  # integers that choose rows
            continue
        result = run(*inputs)
        if (wrong := different(result, expected)) and not as_right(result, expected, aten, inputs):
            return f"{'special' if special else 'ordinary'} numbers: {wrong}"
    return ""


def made_like(like: torch.Tensor, number: int) -> torch.Tensor:
    """A tensor of these dtype, sizes and strides with ordinary numbers, integers 0; number: which input it is."""
    most = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    zeros = torch.zeros(most, dtype=like.dtype, device="cpu").as_strided(like.shape, like.stride())
    tensor: torch.Tensor = _made_like(zeros, number, special=False, whole=False)
    return tensor


def _made_like(value: Any, number: int, special: bool, whole: bool) -> Any:
    """A tensor of the same dtype, sizes and strides; number: which input it is, as no two are alike."""
    if not isinstance(value, torch.Tensor) or not value.numel():
        return value
    if not (value.is_floating_point() or value.dtype == torch.bool or (special and whole)):
        return value
    pool = _pool(value.dtype, special).roll(997 * number)
    most = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    # All memory from the first element to the last is filled, and the strides laid over it: broadcast dims (stride 0)
    # and elements that overlap stay what they are.
    memory = pool.repeat(-(-most // POOL))[:most].to(value.device)
    return memory.as_strided(value.shape, value.stride())


POOL = 4099
"""Numbers before they come again: a prime, so that no row is another."""
SPECIAL = 512
"""Of them, among which each sixteenth is special: most rows have none."""


@cache
def _pool(dtype: torch.dtype, special: bool) -> torch.Tensor:
    chance = torch.Generator().manual_seed(0)
    if dtype == torch.bool:
        return torch.rand(POOL, generator=chance) < 0.5
    if not dtype.is_floating_point:
        ends = torch.iinfo(dtype)
        pool = torch.randint(ends.min, ends.max, (POOL,), generator=chance, dtype=dtype)
        pool[: POOL // 2] %= 7
        pool[:: POOL // 8], pool[1 :: POOL // 8] = ends.min, ends.max
        return pool
    pool = torch.randn(POOL, generator=chance, dtype=torch.float64).to(dtype)
    if special:
        # Where formulas leave their range: in float32 exp overflows beyond 88.7, squares of 1e20 overflow and those of
        # 1e-20 are subnormal, and so is tiny / 8 itself.
        tiny = torch.finfo(dtype).tiny
        some = [0.0, 1.0, 1e-3, 9.5, 30.0, 89.5, 1e3, 1e4, 1e20, tiny / 8, 1e-20, math.inf]
        numbers = torch.tensor([*some, *(-x for x in some), math.nan], dtype=dtype)
        places = range(0, SPECIAL, 16)
        for n, place in enumerate(places):
            pool[place] = numbers[n % len(numbers)]
    return pool


def as_right(result: Any, expected: Any, aten: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether results that differ from eager's are as right as those are: of each element one of these holds.

    - It is what the same operations give in double, or in double of inputs moved by MOVED units in the last place.
    - It is within NEAR times what eager and those moved inputs are away from the result in double, at this element;
      or, where eager is not right itself, at any element of its row (the last dim): terms that cancel leave either
      of them with rounding alone.
    - Eager has overflowed on the way, and so has it.

    Integers that no float32 holds are moved too where a result is of floats: the ends of their type cancel in a sum of
    floats, and leave what the order of the sum makes of them. Results of integers are then compared without."""
    eps = [torch.finfo(b.dtype).eps if b.is_floating_point() else 0.0 for b in expected]
    whole_eps = max(eps, default=0.0)
    try:
        # Seed 0 moves nothing: the same operations in double.
        exact, *moved = (aten(*_wide(args, seed, whole_eps)) for seed in range(1 + MOVES))
        held = moved if all(eps) or not whole_eps else [aten(*_wide(args, seed, 0.0)) for seed in range(1, 1 + MOVES)]
    except (RuntimeError, TypeError, IndexError):  # IndexError: of a table with so many rows
        return False
    for n, (a, b) in enumerate(zip(result, expected, strict=True)):
        if not alike(a, b):
            return False
        near = moved if b.is_floating_point() else held
        if bool((~_right(a, b, exact[n], [one[n] for one in near])).any()):
            return False
    return True


LARGEST_EXACT = 1 << 24
"""Integers up to which all are float32."""


def _wide(args: tuple[Any, ...], seed: int, whole_eps: float) -> list[Any]:
    """Widens floating arguments to double; under any seed but 0 each is moved by at most MOVED of its eps, and integers
    beyond LARGEST_EXACT by MOVED of `whole_eps` towards 0, so that none leaves its type."""
    chance, out = torch.Generator().manual_seed(seed), []
    for a in args:
        if isinstance(a, torch.Tensor) and a.is_floating_point():
            eps = torch.finfo(a.dtype).eps
            a = a.double()
            if seed:
                by = torch.rand(a.shape, generator=chance, dtype=torch.float64) - 0.5
                a = a * (1 + by.to(a.device) * (2 * MOVED * eps))
        elif seed and whole_eps and isinstance(a, torch.Tensor) and a.dtype in (torch.int32, torch.int64):
            by = torch.rand(a.shape, generator=chance, dtype=torch.float64).to(a.device) * (MOVED * whole_eps)
            large = (a > LARGEST_EXACT) | (a < -LARGEST_EXACT)
            a = torch.where(large, a - (a.double() * by).to(a.dtype), a)
        out.append(a)
    return out


def _right(a: torch.Tensor, b: torch.Tensor, exact: torch.Tensor, moved: Sequence[torch.Tensor]) -> torch.Tensor:
    """Says where the elements of a are as right as those of b."""
    if not b.is_floating_point():
        return torch.stack([a == one for one in (b, exact, *moved)]).any(0)
    relative, least = TOLERANCE[b.dtype]
    absolute = max(least * _top(b), 1e-30)

    def like(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.isclose(x, y.to(b.dtype), rtol=relative, atol=absolute, equal_nan=True)

    eager_right = like(b, exact)
    right = torch.stack([like(a, one) for one in (b, exact, *moved)]).any(0)
    away = torch.stack([(one.double() - exact).abs() for one in (b, *moved)])
    # Differences with infinities are infinite or NaN and say nothing of rounding: they count as 0.
    limit = NEAR * away.nan_to_num(0.0, 0.0, 0.0).sum(0)
    apart = (a.double() - exact).abs()
    finite = a.isfinite() & exact.isfinite()
    row = limit.amax(-1, keepdim=True) if limit.dim() and limit.numel() else limit
    right |= finite & ((apart <= limit) | ~eager_right & (apart <= row))
    return right | ~eager_right & ~b.isfinite() & ~a.isfinite()


class Again:
    """Compares a kernel with ATen on a later call; gives the kernel's results, and in `wrong` why not."""

    def __init__(self, run: Callable[..., Any], aten: Callable[..., Any]) -> None:
        self.run, self.aten = run, aten
        self.wrong = ""

    def __call__(self, *args: Any) -> Any:
        result, expected = self.run(*args), self.aten(*args)
        wrong = different(result, expected)
        if wrong and not as_right(result, expected, self.aten, args):
            self.wrong = wrong
            log.warning("a kernel differs from eager on a later call (%s): its operations stay PyTorch's", wrong)
            return expected
        return result


BLOCK = 1 << 16
"""Elements that are compared at a time: what is made on the way stays in cache. The gradient of a table of words, of
which all but a few rows are zeros, takes a tenth of the time of whole passes."""


def _blocks(*alike_tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """The same tensors of one layout in blocks, flat where they fill their memory, in the order of that memory; whole
    on a GPU, and where elements lie apart or on each other."""
    first = alike_tensors[0]
    order = sorted(range(first.dim()), key=lambda dim: (first.stride(dim), first.shape[dim]), reverse=True)
    laid = [x.permute(order) for x in alike_tensors]
    if first.is_cuda or first.numel() <= BLOCK or not all(x.is_contiguous() for x in laid):
        return [alike_tensors]
    return list(zip(*(x.view(-1).split(BLOCK) for x in laid), strict=True))


def _top(x: torch.Tensor) -> float:
    """The largest finite size of a number; 1 where there is none."""
    low, high = (float(one) for one in torch.aminmax(x))
    if not (math.isfinite(low) and math.isfinite(high)):
        # Sizes are 0 or more, so what is below stands for no finite number at all.
        top = max(float(torch.where(part.isfinite(), part.abs(), -1).amax()) for (part,) in _blocks(x))
        return top if top >= 0 else 1.0
    return max(abs(low), abs(high))


def _near(a: torch.Tensor, b: torch.Tensor, relative: float, absolute: float) -> bool:
    """`torch.allclose` where NaN is NaN, of tensors that are `alike`; in half its passes where all is finite."""
    return all(_near_in_block(x, y, relative, absolute) for x, y in _blocks(a, b))


def _near_in_block(a: torch.Tensor, b: torch.Tensor, relative: float, absolute: float) -> bool:
    if torch.equal(a, b):  # ends at the first that differs
        return True
    if bool(((a - b).abs_() <= b.abs().mul_(relative).add_(absolute)).all()):
        return not bool(torch.isinf(b).any()) or torch.allclose(a, b, rtol=relative, atol=absolute, equal_nan=True)
    return torch.allclose(a, b, rtol=relative, atol=absolute, equal_nan=True)


def _other_memory(tensors: Sequence[Any]) -> Callable[[], Any] | None:
    """What is read after each call of a trial: so much that the last cache forgets inputs and results which it would
    not hold in use either. None where they are small."""
    half = this_machine().l3_bytes // 2
    here = [t for t in tensors if isinstance(t, torch.Tensor) and not t.is_cuda]
    if sum(t.numel() * t.itemsize for t in here) < half:
        return None
    return torch.ones(half // 4, dtype=torch.float32, device="cpu").sum


def _forget(args: Sequence[Any], cold: Sequence[bool]) -> Callable[[], Any] | None:
    """What takes arguments that are cold out of the caches, and brings the others into them again; None where none
    is."""
    if not any(cold) or any(isinstance(a, torch.Tensor) and a.is_cuda for a in args):
        return None
    other = torch.ones(this_machine().l3_bytes // 4, dtype=torch.float32, device="cpu")
    warm = [a for a, is_cold in zip(args, cold, strict=True) if isinstance(a, torch.Tensor) and not is_cold]

    def forget() -> None:
        other.sum()
        for one in warm:
            one.sum()

    return forget


def _times(
    run: Callable[..., Any], aten: Callable[..., Any], args: tuple[Any, ...], after: Callable[[], Any] | None,
    before: Callable[[], Any] | None = None,
) -> tuple[float, float]:  # fmt: skip
    """The least seconds of each, taken in turn: what disturbs one call only ever adds. One thread is timed by its
    own CPU time, which others on the machine disturb less. after: called after each, and its own time taken off; what
    a call left in the caches to be written is written meanwhile, and counts. before: called before each, outside of its
    time."""
    if any(isinstance(a, torch.Tensor) and a.is_cuda for a in args):
        return _cuda_times(run, aten, args)
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    calls = [run, aten, lambda *_: None] if after else [run, aten]
    # The third is what `after` takes by itself, which is taken off both.
    best = [float("inf")] * 2 + [0.0 if after is None else float("inf")]
    spent = 0.0
    for number in range(REPEATS):
        for which, call in enumerate(calls):
            began = clock()
            if before is not None:
                before()
            start = clock()
            call(*args)
            if after is not None:
                after()
            end = clock()
            best[which] = min(best[which], end - start)
            spent += end - began
        low, high = sorted(one - best[2] for one in best[:2])
        if spent > ENOUGH_S or (number and low > LONG_S and high > DECISIVE * low):
            break
    return best[0] - best[2], best[1] - best[2]


def _cuda_times(run: Callable[..., Any], aten: Callable[..., Any], args: tuple[Any, ...]) -> tuple[float, float]:
    """The least seconds of a call among several in a row, so that a kernel hides the launch of the next as in use."""
    best = [float("inf"), float("inf")]
    for _ in range(REPEATS):
        for which, call in enumerate((run, aten)):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(IN_A_ROW):
                call(*args)
            torch.cuda.synchronize()
            best[which] = min(best[which], (time.perf_counter() - start) / IN_A_ROW)
    return best[0], best[1]


def _key(source: str, args: tuple[Any, ...]) -> str:
    """What a verdict depends on: sizes and strides by powers of two, so that a new length asks nothing new."""
    sizes = [f"{a.dtype}{_sizes(a.shape)}{_layout(a)}" for a in args if isinstance(a, torch.Tensor)]
    sizes += sorted({torch.cuda.get_device_name(a.device) for a in args if isinstance(a, torch.Tensor) and a.is_cuda})
    return f"{key_of(source)}-{torch.get_num_threads()}-{hash_of(','.join(sizes))}"


def _sizes(shape: Sequence[int]) -> list[int]:
    return [(int(size) - 1).bit_length() for size in shape]


def _layout(x: torch.Tensor) -> list[int]:
    """Says which dims are broadcast (-1), side by side (0) or further apart."""
    strides = zip(x.shape, x.stride(), strict=True)
    return [0 if size <= 1 else (int(stride) - 1).bit_length() if stride else -1 for size, stride in strides]


def hash_of(text: str) -> str:
    return key_of(text)[:12]


def _path(key: str) -> Path:
    return cache_folder() / f"{key}.json"


def _read(key: str) -> dict[str, Any] | None:
    try:
        verdict = json.loads(_path(key).read_text(encoding="utf-8"))
        return verdict if isinstance(verdict.get("kept"), bool) else None
    except (OSError, ValueError, AttributeError):
        return None


def _write(key: str, verdict: dict[str, Any]) -> None:
    path = _path(key)
    # Renamed when it is complete, under a name of this process and thread: a reader sees a whole verdict or none.
    part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")
    try:
        part.write_text(json.dumps(verdict), encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        log.debug("a verdict is not kept: %s", error)
