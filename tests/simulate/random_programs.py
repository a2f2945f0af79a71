"""Random Programs for the simulator's tests: several ranks and streams, every kind of effect, messages, groups, pools.

`random_program(rng)` returns a Program that is valid except, now and then, for a deadlock (a pool or a capacity too
small, a rendezvous the wrong way round), which the caller skips.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from gnomon.program import (
    BufferClass,
    BufferRef,
    Communicator,
    EffectOp,
    Kind,
    Override,
    Pool,
    Program,
    ProgramBuilder,
    RowEffect,
)

_BUFFERS = (
    BufferClass(name="T", pool="small", memory="activations"),
    BufferClass(name="U", slots=2, memory="activations"),
    BufferClass(name="Q", lifetime="carried", per="stage", memory="activations"),
    BufferClass(name="Z", lifetime="carried", per="stage", slots=2, memory="activations"),
    BufferClass(name="A", per="stage", memory="activations"),
    BufferClass(name="M", memory="activations"),
)
_KINDS = (
    Kind(name="WORK"),
    Kind(name="PUT", stream="out", comm="net", message="send", hop=0),
    Kind(name="GET", stream="in", comm="net", message="recv", hop=0),
    Kind(name="ALL", stream="ring", comm="world"),
)
_STREAMS = ("compute", "copy", "host")
_UNITS = 3


def random_program(rng: np.random.Generator) -> Program:
    """One stage per rank class; messages between classes, collectives over all of them, local work with random
    effects."""
    classes = int(rng.integers(1, 4))
    builder = ProgramBuilder(num_stages=classes, units=_UNITS, kinds=_KINDS)
    ranks = [_Rank(builder.rank_class(), builder, rng) for _ in range(classes)]
    for _ in range(int(rng.integers(2, 14))):
        choice = rng.random()
        if choice < 0.25 and classes > 1:
            _message(ranks, rng)
        elif choice < 0.35:
            _collective(ranks, rng)
        else:
            ranks[int(rng.integers(classes))].work()
    for rank in ranks:
        rank.finish()
    semantics: Literal["buffered", "rendezvous"] = ("buffered", "buffered", "rendezvous")[int(rng.integers(3))]
    capacity = int(rng.integers(0, 3)) if semantics == "buffered" else 0
    return builder.build(
        buffers=_BUFFERS,
        comms=(
            Communicator(name="net", semantics=semantics, capacity=capacity, ordered=False),
            Communicator(name="world", semantics="collective"),
        ),
        pools=(Pool(name="small", size=int(rng.integers(1, 4))),),
    )


class _Rank:
    """The rows of one rank class so far, and which step buffers are live."""

    def __init__(self, cls: int, builder: ProgramBuilder, rng: np.random.Generator) -> None:
        self.cls, self.builder, self.rng = cls, builder, rng
        self.live: set[tuple[str, int]] = set()

    def row(self, kind: str, effects: list[tuple[EffectOp, str, int]], unit: int = -1, **more: object) -> None:
        given = tuple(RowEffect(op, BufferRef(name, self.cls, at)) for op, name, at in effects)
        stream = _STREAMS[int(self.rng.integers(3))] if kind == "WORK" else ""
        override = Override(effects=given, stream=stream, peer=more.pop("peer", None))  # type: ignore[arg-type]
        self.builder.add(self.cls, kind, self.cls, unit, override=override, **more)  # type: ignore[arg-type]

    def work(self) -> None:
        effects: list[tuple[EffectOp, str, int]] = []
        for name, at in (("T", int(self.rng.integers(_UNITS))), ("U", int(self.rng.integers(_UNITS))), ("A", 0)):
            effects += self._step_effect(name, at)
        for name in "QZ":
            ops: tuple[EffectOp, ...] = ("read", "read", "write", "accumulate")
            if self.rng.random() < 0.3:
                effects.append((ops[int(self.rng.integers(4))], name, 0))
        self.row("WORK", effects, int(self.rng.integers(-1, _UNITS)))

    def _step_effect(self, name: str, at: int) -> list[tuple[EffectOp, str, int]]:
        if self.rng.random() < 0.4:
            return []
        if (name, at) not in self.live:
            self.live.add((name, at))
            return [("accumulate" if name == "A" else "write", name, at)]
        ops: tuple[EffectOp, ...] = ("read", "accumulate", "consume", "free")
        op = ops[int(self.rng.integers(4))]
        if op in ("consume", "free"):
            self.live.discard((name, at))
        return [(op, name, at)]

    def finish(self) -> None:
        for name, at in sorted(self.live):
            self.row("WORK", [("consume" if self.rng.random() < 0.5 else "free", name, at)])


def _message(ranks: list[_Rank], rng: np.random.Generator) -> None:
    a, b = (ranks[i] for i in rng.permutation(len(ranks))[:2])
    free = [u for u in range(_UNITS) if ("M", u) not in b.live and ("sent", u) not in b.live | a.live]
    if not free:
        return
    unit = int(rng.choice(free))
    b.live.add(("M", unit))
    a.builder.add(a.cls, "PUT", a.cls, unit, override=Override(peer=b.cls, effects=()))
    b.builder.add(
        b.cls,
        "GET",
        b.cls,
        unit,
        override=Override(peer=a.cls, effects=(RowEffect("write", BufferRef("M", b.cls, unit)),)),
    )


def _collective(ranks: list[_Rank], rng: np.random.Generator) -> None:
    group = max((row[3] for rows in ranks[0].builder._rows for row in rows), default=-1) + 1
    for rank in ranks:
        effect = RowEffect("accumulate" if rng.random() < 0.5 else "read", BufferRef("Q", rank.cls, 0))
        rank.builder.add(rank.cls, "ALL", rank.cls, group=group, override=Override(effects=(effect,)))
