"""ChunkFlow: batches of long and short sequences cut into equal chunks, and a pipeline that knows which chunks belong
together (ICML 2025).

`chunks(lengths, chunk_size)` makes the units (its Algorithm 1): long sequences are cut into dependent chunks, short
ones are packed into as few chunks as possible. `chunkflow` is 1F1B over them with the chunks of one sequence going
backward in reverse, because a chunk's backward needs the gradients that later chunks leave at its keys and values
(buffer DKV); at most `keep` chunks of a sequence keep their activations, the others are run again right before their
backward. Left out: the choice of chunk size and `keep` (`gnomon.methods.chunkflow`), and prices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gnomon.errors import PlanError
from gnomon.plans import Schedule, Unit, normalised
from gnomon.plans.parts import CHUNKFLOW, pass_numbers
from gnomon.program import STANDARD_BUFFERS, BufferClass, Kind, effects, with_kinds
from gnomon.program.rows import Rows, check_counts, of_lists

KINDS = with_kinds(
    Kind(name="F", effects=effects("read P, read KV<, consume X, write S, write Y, write KV")),
    Kind(name="C", effects=effects("read P, read KV<, read X, write Y, write KV")),
    Kind(name="R", effects=effects("read P, read KV<, consume X, write S")),
    Kind(
        name="B",
        effects=effects(
            "read P, read KV<, consume S, consume DY, consume DKV, accumulate DKV<, write DX, accumulate G, free KV"
        ),
    ),
)
"""The standard kinds with attention over the chunks before: their keys and values are read forward and backward, and
backward adds to the gradients of theirs. A chunk that no other follows has neither KV nor DKV."""

BUFFERS = (
    *STANDARD_BUFFERS,
    BufferClass(name="KV", memory="activations"),
    BufferClass(name="DKV", memory="activations"),
)
"""The standard buffers, keys and values of a chunk, and their gradients."""

NAME = CHUNKFLOW
"""Of the pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPass:
    """What a plan asks of ChunkFlow."""

    chunk_size: int = 8192
    """Tokens of a chunk."""
    keep: int = 1
    """Chunks of a sequence whose activations stay (K); 0 keeps all."""
    extra: int = 0
    """Warm-up forwards beyond those of 1F1B."""


def chunk_pass(schedule: Schedule) -> ChunkPass | None:
    """What the schedule asks of ChunkFlow; None where it has no such pass."""
    chunk_settings = pass_numbers(schedule, NAME, ChunkPass())
    return None if chunk_settings is None else ChunkPass(**chunk_settings)


def chunks(lengths: Sequence[int], chunk_size: int) -> tuple[Unit, ...]:
    """Units of one batch: dependent chunks of the sequences longer than `chunk_size` tokens, in batch order, then
    packs of the others.

    lengths: tokens of each sequence. The packs are as few as possible, found as ChunkFlow does: for 1, 2 … bins, put
    sequences longest first into the emptiest bin, until all fit. A pack's sequences do not see each other. Weights are
    normalised. PlanError for a chunk size below 1 or an empty batch.
    """
    if chunk_size < 1 or not lengths or min(lengths) < 1:
        raise PlanError(f"{len(lengths)} sequences in chunks of {chunk_size} tokens: give at least one of each")
    units = [
        Unit(pieces=((sequence, start, min(start + chunk_size, length)),))
        for sequence, length in enumerate(lengths)
        if length > chunk_size
        for start in range(0, length, chunk_size)
    ]
    short = sorted((s for s, length in enumerate(lengths) if length <= chunk_size), key=lambda s: (-lengths[s], s))
    packs = _pack([(s, lengths[s]) for s in short], chunk_size)
    units += [Unit(pieces=tuple((s, 0, lengths[s]) for s in sorted(pack))) for pack in packs]
    return normalised(units)


def _pack(items: Sequence[tuple[int, int]], capacity: int) -> list[list[int]]:
    """Sequences of the fewest bins into which longest-first, emptiest-bin packing fits; bins by first sequence."""
    # From the bound by volume up to one bin for each.
    for count in range(-(-sum(size for _, size in items) // capacity), len(items) + 1):
        bins: list[list[int]] = [[] for _ in range(count)]
        load = [0] * count
        for sequence, size in items:
            at = min(range(count), key=load.__getitem__)
            bins[at].append(sequence)
            load[at] += size
        if max(load, default=0) <= capacity:
            return sorted(bins, key=min)
    raise AssertionError("one bin for each sequence always fits")


def chunkflow(num_ranks: int, units: Sequence[Unit], *, keep: int | None = None, extra: int = 0) -> Rows:
    """1F1B over chunks, state-aware: rows of compute actions for `num_ranks` stages, to be made a Program with BUFFERS.

    keep: chunks of one sequence whose activations stay (K); None keeps all. extra: warm-up forwards beyond those of
    1F1B; one of them often hides the wait for the last chunk of a sequence. Where the next backward's forward has not
    run, forwards are issued until it has. PlanError for keep < 1 or extra < 0.
    """
    check_counts("chunkflow", num_ranks, len(units))
    if (keep is not None and keep < 1) or extra < 0:
        raise PlanError(f"chunkflow needs keep >= 1 and extra >= 0, not {keep} and {extra}")
    again = _run_twice(units, keep)
    order = backward_order(units)
    rows = [
        [(kind, stage, unit) for kind, unit in _rank(num_ranks - 1 - stage + extra, order, again)]
        for stage in range(num_ranks)
    ]
    return replace(of_lists(rows, num_stages=num_ranks, num_units=len(units)), kinds=KINDS)


def backward_order(units: Sequence[Unit]) -> tuple[int, ...]:
    """Units in the order of their backwards: sequences in order of their first chunk, chunks of a sequence
    reversed."""
    return tuple(unit for chain in _sequences(units) for unit in reversed(chain))


def _sequences(units: Sequence[Unit]) -> list[list[int]]:
    """Units of each sequence that is cut, and each other unit by itself, in order of first unit.

    PlanError for a unit that holds pieces of several sequences of which one is cut: its backward would have to come
    both before and after others."""
    holders: dict[int, list[tuple[int, int]]] = {}
    for index, unit in enumerate(units):
        for sequence, start, _ in unit.pieces:
            holders.setdefault(sequence, []).append((start, index))
    chains = {
        sequence: [index for _, index in sorted(pieces)] for sequence, pieces in holders.items() if len(pieces) > 1
    }
    for sequence, chain in chains.items():
        if any(len(units[index].pieces) > 1 for index in chain):
            raise PlanError(f"sequence {sequence} is cut, but one of its chunks holds another piece; give it its own")
        # A chunk reads keys of those before it, so they must be issued first.
        if chain != sorted(chain):
            raise PlanError(f"chunks of sequence {sequence} must be units in the order of their tokens")
    unchained = [[index] for index in range(len(units)) if not any(index in chain for chain in chains.values())]
    return sorted([*chains.values(), *unchained])


def _run_twice(units: Sequence[Unit], keep: int | None) -> frozenset[int]:
    """Units that give up their activations: all but the last `keep` of each sequence."""
    if keep is None:
        return frozenset()
    # The last chunks of a sequence go backward first, right after their forward.
    return frozenset(unit for chain in _sequences(units) for unit in chain[:-keep])


def _rank(warm_up: int, backwards: Sequence[int], again: frozenset[int]) -> Iterator[tuple[str, int]]:
    """(kind, unit) of one rank: `warm_up` forwards, then one forward and one backward in turn."""
    count, issued = len(backwards), 0
    for turn, unit in enumerate(backwards):
        # A chunk goes backward only after the last of its sequence has gone forward, which may be beyond the warm-up.
        while issued < count and (issued <= unit or issued <= turn + warm_up):
            yield "C" if issued in again else "F", issued
            issued += 1
        if unit in again:
            yield "R", unit
        yield "B", unit
