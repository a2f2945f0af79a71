"""Programs for property tests: any that can be written down, and small valid ones of every family with mutations.

`programs()` draws Programs with every feature of the text form, mostly unable to run. `FAMILIES` are functions that
return a valid Program from a few numbers; `mutated` changes one by swapping, dropping, duplicating and moving actions.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from gnomon.plans import Unit
from gnomon.program import (
    EFFECT_OPS,
    NO_UNIT,
    STANDARD_BUFFERS,
    BufferClass,
    BufferRef,
    Communicator,
    Effect,
    Kind,
    Override,
    Pool,
    Program,
    ProgramBuilder,
    RowEffect,
    with_buffers,
    with_kinds,
)

WORDS = st.sampled_from(("a", "KV", "h2d.x", "send_f", "_1", "dp-2"))
KIND_NAMES = st.sampled_from(("F", "B", "SEND_F", "D2H", "A2A_F", "LOAD", "UNSHARD", "_X"[1:], "W"))
PRICE_NAMES = st.one_of(st.sampled_from(("", "cold", "F&B", "a b", 'q"\\', "x# y", "é\n")), st.text(max_size=4))


# Any Program


@st.composite
def units(draw: st.DrawFn) -> int | tuple[Unit, ...]:
    """Plain microbatches, or units with pieces, weights and workers."""
    count = draw(st.integers(0, 4))
    if draw(st.booleans()):
        return count
    found = []
    for _ in range(count):
        pieces = draw(
            st.dictionaries(st.integers(0, 5), st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=3)
        )
        weight = draw(st.sampled_from((0.0, 1.0, 1e-05, 1 / 3)))
        spans = tuple((sequence, start, start + size) for sequence, (start, size) in pieces.items())
        found.append(Unit(pieces=spans, weight=weight, worker=draw(st.integers(0, 2))))
    return tuple(found)


@st.composite
def buffer_classes(draw: st.DrawFn, pools: tuple[Pool, ...]) -> tuple[BufferClass, ...]:
    """The standard ones with some changed, or others alone."""
    pool_names = st.sampled_from(("", *(pool.name for pool in pools)))
    one = st.builds(
        BufferClass,
        name=st.one_of(WORDS, st.sampled_from([b.name for b in STANDARD_BUFFERS])),
        lifetime=st.sampled_from(("action", "step", "sequence", "carried")),
        per=st.sampled_from(("stage", "unit", "sequence")),
        slots=st.integers(1, 3),
        pool=pool_names,
    )
    changed = draw(st.lists(one, max_size=3, unique_by=lambda b: b.name))
    return tuple(changed) if changed and draw(st.booleans()) else with_buffers(*changed)


@st.composite
def kinds_of(draw: st.DrawFn, buffers: tuple[BufferClass, ...]) -> tuple[Kind, ...]:
    """The standard ones with some changed, or others alone."""
    one_effect = st.builds(
        Effect,
        op=st.sampled_from(EFFECT_OPS),
        buffer=st.sampled_from([b.name for b in buffers]),
        which=st.sampled_from(("own", "prefix", "suffix")),
    )
    changed = []
    for name in draw(st.lists(KIND_NAMES, max_size=4, unique=True)):
        message = draw(st.sampled_from(("", "send", "recv")))
        comm = draw(WORDS) if message else draw(st.one_of(st.just(""), WORDS))
        hop = draw(st.integers(-3, 3)) if message else 0
        acts = tuple(draw(st.lists(one_effect, max_size=3)))
        changed.append(Kind(name=name, stream=draw(WORDS), effects=acts, comm=comm, message=message, hop=hop))
    standard_fits = {b.name for b in STANDARD_BUFFERS} <= {b.name for b in buffers}
    if changed and (not standard_fits or draw(st.booleans())):
        return tuple(changed)
    return with_kinds(*changed)


@st.composite
def comms_of(draw: st.DrawFn, kinds: tuple[Kind, ...]) -> tuple[Communicator, ...]:
    """Some declared communicators, those of the kinds among them."""
    names = draw(st.lists(st.one_of(WORDS, st.sampled_from(["fwd", "bwd", "dp"])), max_size=3, unique=True))
    found = []
    for name in names:
        semantics = draw(st.sampled_from(("buffered", "rendezvous", "collective")))
        capacity = draw(st.integers(0, 3)) if semantics == "buffered" else 0
        found.append(Communicator(name=name, semantics=semantics, capacity=capacity, ordered=draw(st.booleans())))
    return tuple(found)


@st.composite
def overrides(draw: st.DrawFn, buffers: tuple[BufferClass, ...], comms: tuple[str, ...], stages: int) -> Override:
    """What one row may say beyond its kind."""
    acts, adds = None, False
    if draw(st.booleans()):
        found = []
        for op in draw(st.lists(st.sampled_from(EFFECT_OPS), max_size=2)):
            buffer = draw(st.sampled_from(buffers))
            at = 0 if buffer.per == "stage" else draw(st.integers(0, 3))
            found.append(RowEffect(op, BufferRef(buffer.name, draw(st.integers(0, stages - 1)), at)))
        acts, adds = tuple(found), draw(st.booleans())
    return Override(
        stream=draw(st.one_of(st.just(""), WORDS)),
        comm=draw(st.sampled_from(("", *comms))),
        peer=draw(st.one_of(st.none(), st.integers(0, stages - 1))),
        name=draw(PRICE_NAMES),
        effects=acts,
        adds=adds,
        inside=draw(st.booleans()),
    )


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Any Program that can be written down."""
    stages = draw(st.integers(1, 5))
    pools = tuple(draw(st.lists(st.builds(Pool, name=WORDS, size=st.integers(1, 9)), max_size=2, unique_by=_name)))
    buffers = draw(buffer_classes(pools))
    kinds = draw(kinds_of(buffers))
    comms = draw(comms_of(kinds))
    build = ProgramBuilder(num_stages=stages, units=draw(units()), kinds=kinds)
    comm_names = tuple({c.name for c in comms} | {k.comm for k in kinds if k.comm})
    any_override = overrides(buffers, tuple(sorted(comm_names)), stages)
    for _ in range(draw(st.integers(0, 3))):
        cls = build.rank_class(draw(st.sampled_from((1, 1, 8, 1000))))
        for _ in range(draw(st.integers(0, 6))):
            _any_rows(draw, build, cls, any_override)
    ref = st.builds(BufferRef, st.sampled_from([b.name for b in buffers]), st.integers(0, stages - 1), st.just(0))
    return build.build(
        buffers=buffers,
        comms=comms,
        pools=pools,
        chains=draw(st.sampled_from(((0,), (0,), (0, stages - 1), ()))),
        inputs=draw(st.sampled_from(("resident", "loaded"))),
        aliases=tuple(draw(st.lists(st.tuples(ref, ref), max_size=2))),
    )


def _any_rows(draw: st.DrawFn, build: ProgramBuilder, cls: int, any_override: st.SearchStrategy[Override]) -> None:
    """One row, or a composite."""
    names = [kind.name for kind in build.kinds]
    size = draw(st.sampled_from((1, 1, 1, 2, 3)))
    chosen = [draw(st.sampled_from(names)) for _ in range(size)]
    group = draw(st.integers(-1, 4))
    joined = "&".join(chosen)
    for name in chosen:
        unit = draw(st.integers(NO_UNIT, len(build.units) - 1))
        override = draw(st.one_of(st.none(), any_override))
        if size > 1 and draw(st.integers(0, 5)):
            override = replace(override or Override(), name=joined)
        build.add(cls, name, draw(st.integers(0, build.num_stages - 1)), unit, group=group, override=override)


def _name(pool: Pool) -> str:
    return pool.name
