"""Vocabulary parallelism: the embedding and the head divided by vocabulary over all pipeline ranks (Yeung et al. 2024,
"Balancing pipeline parallelism with vocabulary parallelism", arXiv 2411.05288).

`with_heads`, `interlaced` and `v_half_with_heads` return the rows of an order with, on every rank and for every
microbatch: S and T, a part of the head; EMBED and EGRAD, a part of the embedding; and what the ranks exchange, on a
stream and a communicator of its own in one order: SUM_E (embedded tokens to the first stage), CAST_H (hidden states
from the last), SUM_V (maximum and sum of the softmax), SUM_H (gradient of the hidden states to the last stage), CAST_E
(gradient of the embedded tokens from the first). Under `vocab_1` S computes logits and T, after SUM_V, both gradients;
under `vocab_2` S computes the input's gradient too, which SUM_V adds up, so that T can come at any time. The gradient
is there one or two exchanges after the last stage's forward, and each rank holds as many microbatches more. Under
`interlaced` all ranks meet in S, which is the whole head, and the warm-up is half as long again.

Orders of 1F1B are those of sail-sg/VocabularyParallelism 6191c3b megatron/core/pipeline_parallel, files
vocab_parallel_schedule.py and interlaced_schedule.py, for a backward of twice a forward; that of V-Half is from branch
v-half-vocab of sail-sg/zero-bubble-pipeline-parallelism, zbv_greedy.py and passes.py (92895b9). Left out: orders for
other times.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from gnomon.orders.order import Vocabulary
from gnomon.orders.patterns.building_block import CELLS, fits, v_passes, weight_cells
from gnomon.program.kinds import STANDARD_KINDS, BufferClass, Effect, Kind, effects, with_kinds
from gnomon.program.program import BufferRef, Communicator, Override, RowEffect
from gnomon.program.rows import Rows

COMM = "vocabulary"
"""Stream and communicator of what pipeline ranks exchange for the embedding and the head."""

BUFFERS = (
    BufferClass(name="HX", memory="activations"),
    BufferClass(name="VS", memory="logits"),
    BufferClass(name="VL", memory="communication"),
    BufferClass(name="HG", memory="communication"),
    BufferClass(name="EX", memory="activations"),
    BufferClass(name="EG", memory="communication"),
)
"""HX hidden states of the last stage; VS logits of a rank's part; VL their statistics and, under vocab_2, the part's
gradient of the hidden states; HG that gradient; EX embedded tokens; EG their gradient."""

SHARED = ("CAST_H", "SUM_V", "SUM_H", "SUM_E", "CAST_E")
"""Kinds that are collectives of all pipeline ranks, on a stream that overlaps with computing."""

PARTS = ("S", "T", "EMBED", "EGRAD")
"""Kinds that compute a rank's part of the head or the embedding."""

Action = tuple[str, int]
"""(kind, unit); the stage follows from the kind and the rank."""


def _kinds(how: Vocabulary) -> tuple[Kind, ...]:
    if how == "interlaced":  # every rank waits for every other in these
        return tuple(
            Kind(name=name, comm=COMM, effects=effects(text))
            for name, text in (("S", "read P, accumulate G"), ("EMBED", "read P"), ("EGRAD", "accumulate G"))
        )
    gradient = ", write HG" if how == "vocab_1" else ""
    texts = {
        "S": "read P, read HX, write VS, write VL",
        "T": f"read P, consume HX, consume VS, consume VL{gradient}, accumulate G",
        "EMBED": "read P, write EX",
        "EGRAD": "consume EG, accumulate G",
    }
    shared = {
        "CAST_H": "write HX",
        "SUM_V": "accumulate VL",
        **({"SUM_H": "consume HG"} if how == "vocab_1" else {}),
        "SUM_E": "consume EX",
        "CAST_E": "write EG",
    }
    return (
        *(Kind(name=name, effects=effects(text)) for name, text in texts.items()),
        *(Kind(name=name, stream=COMM, comm=COMM, effects=effects(text)) for name, text in shared.items()),
    )


def with_heads(how: Vocabulary, num_ranks: int, num_microbatches: int) -> Rows:
    """Rows of 1F1B under vocab_1 or vocab_2."""
    barriers = 2 if how == "vocab_1" else 1
    ranks = [_rank(r, num_ranks, num_microbatches, barriers) for r in range(num_ranks)]
    return _rows(ranks, how, num_ranks, num_microbatches, turned=False)


def interlaced(num_ranks: int, num_microbatches: int) -> Rows:
    """Rows of 1F1B in which all ranks meet for each head and each embedding."""
    return _rows(_interlaced(num_ranks, num_microbatches), "interlaced", num_ranks, num_microbatches, turned=False)


def v_half_with_heads(how: Vocabulary, num_ranks: int, num_microbatches: int) -> Rows:
    """Rows of V-Half under vocab_1 or vocab_2."""
    ranks = _v_half(num_ranks, num_microbatches, 2 if how == "vocab_1" else 1)
    return _rows(ranks, how, num_ranks, num_microbatches, turned=True)


@lru_cache(maxsize=32)
def _turns(num_ranks: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """(heads that each rank computes before its first backward, beside those of its first forwards; whether it computes
    one between a backward and the forward after it, or else after that forward), for B = 2F and a head that takes no
    time: its place in a rank's turn moves by a forward from each rank to the one before, and by whole turns."""
    # Filled from the last rank to the first, and reversed below. at: where the head stands in a rank's turn.
    forward, backward, at = 1, 2, 0
    between = [True]
    while len(between) < num_ranks:
        if at - forward >= -backward:
            at -= forward
        else:
            between.append(False)
            at += backward - forward
        between.append(True)
    between = between[:num_ranks][::-1]
    before = [0] * num_ranks
    for rank in range(num_ranks - 2, -1, -1):
        before[rank] = before[rank + 1] + (between[rank + 1] or not between[rank])
    return tuple(before), tuple(between)


class _Heads:
    """What a rank of 1F1B does for the vocabulary, head after head: all ranks exchange in this order."""

    def __init__(self, rows: list[Action], count: int, barriers: int, *, embeds: int, returns: int) -> None:
        """embeds: head from which on tokens are embedded in turn with heads. returns: the same of their gradients."""
        self.rows, self.count, self.barriers = rows, count, barriers
        self.embeds, self.returns = embeds, returns
        self.next = self.embedded = self.returned = 0
        # With two barriers T of a microbatch comes in the turn after its S, once SUM_V is over.
        self.end = count + (barriers == 2)
        """The last turn of vocab_1 is a T alone."""

    def embed(self) -> None:
        """Embedding of the next microbatch."""
        if self.embedded < self.count:
            self.rows += [("EMBED", self.embedded), ("SUM_E", self.embedded)]
            self.embedded += 1

    def back(self) -> None:
        """Gradient of the next embedding."""
        if self.returned < self.count:
            self.rows += [("CAST_E", self.returned), ("EGRAD", self.returned)]
            self.returned += 1

    def head(self) -> None:
        """T of the microbatch before, S of the next one."""
        unit, rows = self.next, self.rows
        if unit >= self.end:
            return
        # The order within a turn is that of the communicator on every rank: CAST_E, CAST_H, SUM_E, SUM_V, SUM_H. Ranks
        # that differed in it would wait for each other for ever.
        returns = self.returned if unit >= self.returns and self.returned < self.count else -1
        rows += [("CAST_E", returns)] * (returns >= 0) + [("CAST_H", unit)] * (unit < self.count)
        rows += [("T", unit - 1)] * (unit > 0) + [("S", unit)] * (unit < self.count)
        if unit >= self.embeds:
            self.embed()
        if returns >= 0:
            rows.append(("EGRAD", returns))
            self.returned += 1
        rows += [("SUM_V", unit)] * (unit < self.count) + [("SUM_H", unit - 1)] * (unit > 0 and self.barriers == 2)
        self.next += 1


def _rank(rank: int, num_ranks: int, count: int, barriers: int) -> list[Action]:
    """Actions of one rank of 1F1B under vocab_1 (two barriers) and vocab_2 (one)."""
    rows: list[Action] = []
    before, between = _turns(num_ranks)
    first = before[0] + barriers - 1
    heads = _Heads(rows, count, barriers, embeds=first, returns=first + 2)
    forward = min(num_ranks - rank, count)
    # Later ranks have fewer forwards before their first backward, but all take part in each SUM_E: they embed first
    # what earlier ranks embed between forwards.
    for _ in range(min(num_ranks, count) - forward + 1):
        heads.embed()
    for unit in range(forward):
        heads.embed()
        rows.append(("F", unit))
    for barrier in range(barriers):
        heads.head()
        if barriers == 2 and not barrier:
            heads.embed()
        if forward < count:
            rows.append(("F", forward))
            forward += 1
    for _ in range(before[rank]):
        heads.head()
    for unit in range(count):
        rows.append(("B", unit))
        if forward < count:
            if between[rank]:
                heads.head()
            rows.append(("F", forward))
            forward += 1
            if not between[rank]:
                heads.head()
        elif heads.next < heads.end:
            heads.head()
        else:
            heads.back()
    while heads.returned < count:
        heads.back()
    # Under vocab_2 turns end with the last S, whose T is left.
    return rows if barriers == 2 else [*rows, ("T", count - 1)]


def _interlaced(num_ranks: int, count: int) -> list[list[Action]]:
    """Actions of every rank of 1F1B in which all ranks meet for each head and each embedding."""
    first_turns = num_ranks % 2 == 0
    by_rank = []
    for rank in range(num_ranks):
        rows: list[Action] = []
        # Half as many microbatches again as 1F1B has in flight, since all ranks wait for each head.
        warm = min(num_ranks * 3 // 2 - rank, count)
        cool = min(num_ranks - rank, count)
        waiting = max(0, warm - cool - (num_ranks - rank - 1) // 2)
        embedded = returned = head = 0
        for _ in range(min(num_ranks * 3 // 2, count) - warm + 1):
            embedded = _meet(rows, "EMBED", embedded, count)
        for unit in range(warm):
            embedded = _meet(rows, "EMBED", embedded, count)
            rows.append(("F", unit))
        forward, backward = warm, 0
        backward_first = rank % 2 != num_ranks % 2
        while head < count or backward < count:
            if head >= cool and backward < count:
                turn: list[Action] = [("B", backward)]
                if head >= cool + waiting and forward < count:
                    turn.append(("F", forward))
                    forward += 1
                rows += turn if backward_first else turn[::-1]
                backward += 1
            if head >= count:
                returned = _meet(rows, "EGRAD", returned, count)
                continue
            rows.append(("S", head))
            if head >= num_ranks - 1:
                embedded = _meet(rows, "EMBED", embedded, count)
            if head >= num_ranks + 1 or (not first_turns and head == num_ranks):
                returned = _meet(rows, "EGRAD", returned, count)
            head += 1
        while returned < count:
            returned = _meet(rows, "EGRAD", returned, count)
        by_rank.append(rows)
    return by_rank


def _meet(rows: list[Action], kind: str, unit: int, count: int) -> int:
    """Adds a row of the next unit, if there is one; the unit after it."""
    if unit < count:
        rows.append((kind, unit))
        unit += 1
    return unit


def _v_half(num_ranks: int, count: int, barriers: int) -> list[list[Action]]:
    """Actions of every rank of V-Half: a building block in which a microbatch goes down two cells a rank and back up
    one, and turns back an interval later for each barrier, with parts of the vocabulary between two cells: the first
    head's a cell after its forward, so that the hidden states have that cell to be sent."""
    later = 3 * (num_ranks % 2 == 0) + CELLS * barriers
    block = v_passes(num_ranks, (2, 1, 2, 1), (1, 1 + later, 2))
    weights, warm = weight_cells(block), num_ranks // 2 + 1
    assert fits(block), "two actions of a rank stand in one cell"
    # Places are half cells: actions stand at odd ones, parts of the vocabulary between them at even ones.
    first = 2 * (int(block[0, 1]) + 2)
    by_rank = []
    for rank in range(num_ranks):
        rows: list[Action] = []
        # `heads` writes to `rows`; each slot takes what one call has added, so that it can be put into the block at its
        # time.
        heads = _Heads(rows, count, barriers, embeds=0, returns=warm + 2)
        for _ in range(warm):
            heads.embed()
        # Before every cell: time 1 is the first action's.
        slots = [(-1, rows[:])]
        for head in range(count + 1):
            begin = len(rows)
            if head < heads.end:
                heads.head()
            else:
                rows.append(("T", head - 1))
            slots.append((first + 2 * (CELLS * head - 2 * (head == count)), rows[begin:]))
        begin = len(rows)
        while heads.returned < count:
            heads.back()
        cells = [*block[rank].tolist(), *weights[rank].tolist()]
        timed = [
            (2 * (cell + CELLS * unit) + 1, [(kind, unit)])
            for kind, cell in zip(("F", "F'", "I'", "I", "W'", "W"), cells, strict=True)
            for unit in range(count)
        ]
        slots.append((max(time for time, _ in timed) + 1, rows[begin:]))
        placed = sorted([*timed, *slots], key=lambda slot: slot[0])
        by_rank.append([action for _, actions in placed for action in actions])
    return by_rank


def _rows(ranks: Sequence[Sequence[Action]], how: Vocabulary, num_ranks: int, count: int, *, turned: bool) -> Rows:
    """Rows of every rank's actions. F' is the forward of the second stage of a rank. turned: two stages a rank."""
    kinds = with_kinds(*_kinds(how), base=STANDARD_KINDS)
    # meet: number of each kind that is a collective, so that (kind, unit) has a group number of its own.
    index = {kind.name: i for i, kind in enumerate(kinds)}
    meet = {kind.name: n for n, kind in enumerate(kind for kind in kinds if kind.comm == COMM)}
    last = 2 * num_ranks - 1 if turned else num_ranks - 1
    table: list[tuple[int, int, int, int]] = []
    overrides: dict[int, Override] = {}
    for rank, actions in enumerate(ranks):
        for name, unit in actions:
            kind, second = name.rstrip("'"), name.endswith("'")
            stage = 2 * num_ranks - 1 - rank if second else rank
            # Rows of one kind and unit on all ranks are one collective.
            group = meet[kind] * count + unit if kind in meet else -1
            special = _special(kind, stage, unit, how, rank, 0 if turned else num_ranks - 1, last)
            if special is not None:
                overrides[len(table)] = special
            table.append((index[kind], stage, unit, group))
    columns = np.array(table, np.int64).reshape(-1, 4)
    return Rows(
        num_stages=last + 1,
        num_units=count,
        class_ptr=np.cumsum([0, *map(len, ranks)]).astype(np.int64),
        kind=columns[:, 0].astype(np.int8),
        stage=columns[:, 1].astype(np.int16),
        unit=columns[:, 2].astype(np.int32),
        group=columns[:, 3].astype(np.int32),
        kinds=kinds,
        overrides=overrides,
        comms=(Communicator(name=COMM, semantics="collective"),),
    )


def _special(kind: str, stage: int, unit: int, how: Vocabulary, rank: int, loss: int, last: int) -> Override | None:
    """Says where an action of the first or the last stage, or of its rank, differs from its kind: it makes what the
    others get, or gets what they make. loss: the rank of the last stage."""

    def on(text: str, *, adds: bool = True) -> Override:
        return Override(effects=tuple(_at(effect, rank, unit) for effect in effects(text)), adds=adds)

    if stage == last and kind == "F":
        # The last stage's rank has the original of HX: its F writes it and CAST_H only reads it there, while CAST_H
        # writes the copies of the others.
        return on("write HX")
    if stage == last and kind in ("B", "I"):
        return on("consume HG")
    if stage == 0 and kind == "F":
        return on("read EX")
    if stage == 0 and kind in ("B", "I"):
        return on("consume EX, write EG")
    if rank == loss and kind == "CAST_H":
        return on("read HX", adds=False)
    if rank == loss and kind == "SUM_V" and how == "vocab_2":
        return on("write HG")
    if rank == loss and kind == "SUM_H":
        return on("accumulate HG", adds=False)
    if rank == loss and kind == "S" and how == "interlaced":
        return on("consume HX, write HG")
    if rank == 0 and kind == "SUM_E":
        return on("accumulate EX", adds=False)
    if rank == 0 and kind == "CAST_E":
        return on("read EG", adds=False)
    if rank == 0 and how == "interlaced" and kind == "EMBED":
        return on("write EX")
    if rank == 0 and how == "interlaced" and kind == "EGRAD":
        return on("consume EG")
    return None


def _at(effect: Effect, stage: int, unit: int) -> RowEffect:
    return RowEffect(effect.op, BufferRef(effect.buffer, stage, unit))
