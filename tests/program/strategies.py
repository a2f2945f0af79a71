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
    STANDARD_KINDS,
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
    effects,
    parse_program,
    with_buffers,
    with_kinds,
)

WORDS = st.sampled_from(("a", "KV", "h2d.x", "send_f", "_1", "dp-2"))
KIND_NAMES = st.sampled_from(("F", "B", "SEND_F", "D2H", "A2A_F", "LOAD", "UNSHARD", "_X"[1:], "W"))
PRICE_NAMES = st.one_of(st.sampled_from(("", "cold", "F&B", "a b", 'q"\\', "x# y", "é\n")), st.text(max_size=4))


# Any Program


@st.composite
def units(draw: st.DrawFn) -> int | tuple[Unit, ...]:
    """Plain microbatches, or units with pieces, weights, workers and local sequences."""
    count = draw(st.integers(0, 4))
    if draw(st.booleans()):
        return count
    drawn = []
    for _ in range(count):
        pieces = draw(
            st.dictionaries(st.integers(0, 5), st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=3)
        )
        weight = draw(st.sampled_from((0.0, 1.0, 1e-05, 1 / 3)))
        spans = tuple((sequence, start, start + size) for sequence, (start, size) in pieces.items())
        whole = tuple((sequence, draw(st.integers(0, 3))) for sequence in pieces if draw(st.booleans()))
        drawn.append(Unit(pieces=spans, weight=weight, worker=draw(st.integers(0, 2)), local=whole))
    return tuple(drawn)


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
    drawn = []
    for name in names:
        semantics = draw(st.sampled_from(("buffered", "rendezvous", "collective")))
        capacity = draw(st.integers(0, 3)) if semantics == "buffered" else 0
        drawn.append(Communicator(name=name, semantics=semantics, capacity=capacity, ordered=draw(st.booleans())))
    return tuple(drawn)


@st.composite
def overrides(draw: st.DrawFn, buffers: tuple[BufferClass, ...], comms: tuple[str, ...], stages: int) -> Override:
    """What one row may say beyond its kind."""
    acts, adds = None, False
    if draw(st.booleans()):
        drawn = []
        for op in draw(st.lists(st.sampled_from(EFFECT_OPS), max_size=2)):
            buffer = draw(st.sampled_from(buffers))
            at = 0 if buffer.per == "stage" else draw(st.integers(0, 3))
            drawn.append(RowEffect(op, BufferRef(buffer.name, draw(st.integers(0, stages - 1)), at)))
        acts, adds = tuple(drawn), draw(st.booleans())
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


# Valid Programs, small, of every family

Step = tuple[str, int, int]
"""Kind, stage, unit."""


def gpipe(stage: int, stages: int, units: int) -> list[tuple[str, int]]:
    """All forwards, then all backwards."""
    return [("F", u) for u in range(units)] + [("B", u) for u in range(units)]


def one_f_one_b(stage: int, stages: int, units: int) -> list[tuple[str, int]]:
    """stages - 1 - stage forwards ahead, then one forward and one backward in turn."""
    warm = min(units, stages - 1 - stage)
    steady = [step for u in range(units - warm) for step in (("F", warm + u), ("B", u))]
    return [("F", u) for u in range(warm)] + steady + [("B", u) for u in range(units - warm, units)]


def with_messages(mine: set[int], stages: int, steps: list[Step], inputs: str = "resident") -> list[Step]:
    """A rank class's compute with the receives before and the sends after each action."""
    out: list[Step] = []
    for kind, stage, unit in steps:
        forward, backward = kind in ("F", "C"), kind in ("B", "I")
        if forward and stage == 0 and inputs == "loaded":
            out.append(("LOAD", stage, unit))
        if forward and stage > 0 and stage - 1 not in mine:
            out.append(("RECV_F", stage, unit))
        if backward and stage + 1 < stages and stage + 1 not in mine:
            out.append(("RECV_B", stage, unit))
        out.append((kind, stage, unit))
        if forward and stage + 1 < stages and stage + 1 not in mine:
            out.append(("SEND_F", stage, unit))
        if backward and stage > 0 and stage - 1 not in mine:
            out.append(("SEND_B", stage, unit))
    return out


def on_one_stream() -> tuple[Kind, ...]:
    """The standard kinds, all on the compute stream."""
    return tuple(replace(kind, stream="compute") for kind in STANDARD_KINDS)


@st.composite
def pipelines(draw: st.DrawFn) -> Program:
    """GPipe and 1F1B with messages of all semantics, split backward, recompute, loads, tied and replicated weights."""
    stages, count = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    schedule = draw(st.sampled_from((gpipe, one_f_one_b)))
    split, recompute = draw(st.booleans()), draw(st.booleans())
    inputs = draw(st.sampled_from(("resident", "loaded")))
    one_stream = draw(st.booleans())
    semantics = "buffered" if one_stream else draw(st.sampled_from(("buffered", "rendezvous")))
    capacity = draw(st.sampled_from((0, 1, 2))) if semantics == "buffered" and not one_stream else 0
    build = ProgramBuilder(num_stages=stages, units=count, kinds=on_one_stream() if one_stream else STANDARD_KINDS)
    for stage in range(stages):
        steps: list[Step] = []
        for kind, unit in schedule(stage, stages, count):
            if kind == "F":
                steps.append(("C" if recompute else "F", stage, unit))
                continue
            steps += [("R", stage, unit)] if recompute else []
            steps += [("I", stage, unit), ("W", stage, unit)] if split else [("B", stage, unit)]
        cls = build.rank_class(2)
        build.add_all(cls, with_messages({stage}, stages, steps, inputs))
        if stage in (0, stages - 1):  # the embedding is tied to the head
            build.add(cls, "AR", stage, group=0, override=Override(stream="tied", name="tied"))
        build.add(cls, "AR", stage, group=10 + stage)
        build.add(cls, "OPT", stage)
    comms = tuple(
        Communicator(name=name, semantics=semantics, capacity=capacity, ordered=draw(st.booleans()))
        for name in ("fwd", "bwd")
    )
    # One communicator for the tied embedding; replicas of a stage have theirs each, which groups on "dp" stand for.
    return build.build(comms=comms, inputs=inputs) if stages == 1 else _apart(build, comms, inputs)


def _apart(build: ProgramBuilder, comms: tuple[Communicator, ...], inputs: str) -> Program:
    """Each stage's replicas reduce on a communicator of their own."""
    for cls, (rows, given) in enumerate(zip(build._rows, build._overrides, strict=True)):
        for i, row in enumerate(rows):
            if build.kinds[row[0]].name == "AR" and row[3] >= 10:
                given[i] = Override(comm=f"dp{cls}")
    own = tuple(Communicator(name=f"dp{cls}", semantics="collective") for cls in range(len(build.counts)))
    return build.build(comms=comms + own, inputs="loaded" if inputs == "loaded" else "resident")


@st.composite
def several_stages_a_rank(draw: st.DrawFn) -> Program:
    """Two ranks with two stages each: interleaved (0 2, 1 3) or folded like a V (0 3, 1 2; stages 1 and 2 share)."""
    count = draw(st.integers(1, 2))
    places = draw(st.sampled_from((((0, 2), (1, 3)), ((0, 3), (1, 2)))))
    build = ProgramBuilder(num_stages=4, units=count)
    for mine in places:
        steps = [("F", stage, unit) for stage in mine for unit in range(count)]
        steps += [("B", stage, unit) for stage in reversed(mine) for unit in range(count)]
        cls = build.rank_class()
        build.add_all(cls, with_messages(set(mine), 4, steps))
        build.add_all(cls, [("OPT", stage, NO_UNIT) for stage in mine])
    tied = ((BufferRef("P", 0), BufferRef("P", 3)),) if places[0] == (0, 3) and draw(st.booleans()) else ()
    return build.build(aliases=tied)


FSDP = """gnomon.program/1
stages 2
units 1
buffer P step per stage pool gathered
buffer PS carried per stage
buffer GS step per stage
pool gathered {pool}
kind UNSHARD on gather comm fsdp: read PS, write P
kind RESHARD on compute: free P
kind SCATTER on scatter comm fsdp_reduce: consume G, accumulate GS
kind OPT on compute: consume GS, write PS
class 0 count 4
  {rows}
"""


@st.composite
def sharded(draw: st.DrawFn) -> Program:
    """FSDP over two blocks with prefetch: parameters are gathered into a pool, on a stream of their own."""
    ahead = draw(st.booleans())
    forward = "0UNSHARD 1UNSHARD 0F0 0RESHARD" if ahead else "0UNSHARD 0F0 0RESHARD 1UNSHARD"
    turn = "1F0 0UNSHARD 1B0 1RESHARD" if ahead else "1F0 1B0 1RESHARD 0UNSHARD"
    rows = f"{forward} {turn} 1SCATTER 0B0 0RESHARD 0SCATTER 0OPT 1OPT"
    return parse_program(FSDP.format(pool=draw(st.sampled_from((2, 3) if ahead else (1, 2))), rows=rows))


COMPOSITE = """gnomon.program/1
stages 2
units 3
class 0
  0F0 1F0 0F1 (1F1&1B0) 0B0 (0F2&0AR@compute!) 1F2 1B1 0B1 (1I2&1W2) 0B2 0OPT 1OPT
"""
CHUNKS = """gnomon.program/1
stages 2
unit 0 = 0:0:2
unit 1 = 0:2:4
unit 2 = 0:4:6
unit 3 = 1:0:2
buffer K step per unit
buffer DK step per unit
kind F on compute: read P, consume X, write S, write Y, read K<, write K
kind B on compute: read P, consume S, consume DY, write DX, accumulate G, read K<, accumulate DK<, consume K, consume DK
{comm}class 0
  0F0 0SEND_F0 0F3 0SEND_F3 0F1 0SEND_F1 0F2 0SEND_F2
  0RECV_B2 0B2 0RECV_B1 0B1 0RECV_B0 0B0 0RECV_B3 0B3 0OPT
class 1
  1RECV_F0 1F0 1RECV_F3 1RECV_F1 1F1 1RECV_F2 1F2 1B2 1SEND_B2 1B1 1SEND_B1 1B0 1SEND_B0 1F3 1B3 1SEND_B3 1OPT
"""
TWO_CHAINS = """gnomon.program/1
stages 2
units 2
chains 0 1
buffer E step per unit
buffer DE step per unit
kind SEND_E on send_f comm skip send 1: consume E
kind RECV_E on recv_f comm skip recv 1: write E
kind SEND_D on send_b comm skip send -1: consume DE
kind RECV_D on recv_b comm skip recv -1: write DE
class 0
  0F0{+ write E 0 0} 0SEND_E0 0F1{+ write E 0 1} 0SEND_E1
  0RECV_D0 0B0{+ consume DE 0 0} 0RECV_D1 0B1{+ consume DE 0 1} 0OPT
class 1
  1RECV_E0 1F0{+ consume E 1 0} 1B0{+ write DE 1 0} 1SEND_D0
  1RECV_E1 1F1{+ consume E 1 1} 1B1{+ write DE 1 1} 1SEND_D1 1OPT
"""
DECODE = """gnomon.program/1
stages 1
unit 0 = 0:0:4
unit 1 = 0:4:5 1:0:2
unit 2 = 0:5:6 1:2:3
unit 3 = 1:3:4 2:0:2
buffer KV sequence per sequence pool seats
pool seats {seats}
kind DEC on compute: read P, extend KV
kind END on host
class 0
  0DEC0 0DEC1 0DEC2 0END{{free KV 0 0}} 0DEC3 0END{{free KV 0 1, free KV 0 2}}
"""
OFFLOAD = """gnomon.program/1
stages 2
units 1
buffer M carried per stage slots {slots}
buffer T step per stage slots {slots}
kind D2H on down: consume G, write T
kind ADAM on host: consume T, accumulate M, write P
kind AVG on host: read M, write M
class 0
  0F0 1F0 1B0 1D2H 1ADAM 0B0 0D2H 0ADAM 0AVG 1AVG {again}
"""
MEETINGS = """gnomon.program/1
stages 3
units 1
kind TP on compute comm tp: read G
class 0
  0F0 0SEND_F0 0RECV_B0 0B0 0TP#1 0AR#2 0TP#3 0AR#4 0OPT
class 1
  1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0 1AR#2 1AR#4 1OPT
class 2
  2RECV_F0 2F0 2B0 2SEND_B0 2TP#1 2AR#2 2TP#3 2AR#4 2OPT
"""
TURNS = """gnomon.program/1
stages 2
units 1
buffer T step per stage slots {slots} pool ring
buffer ACC carried per stage slots {slots}
pool ring {slots}
kind PUT on copy: write T
kind USE on compute: consume T, read ACC
kind ADD on side: accumulate ACC
kind NEW on copy: write ACC
class 0
  0PUT 0USE 0PUT 0ADD 1NEW 0USE 1PUT 1USE 0NEW 0PUT 1ADD 0USE
"""


@st.composite
def texts(draw: st.DrawFn) -> Program:
    """Programs by hand: composites, KV chains, decoding, offload, collectives across classes, slots and pools."""
    several = draw(st.integers(1, 2))
    rendezvous = draw(st.sampled_from(("", "comm fwd rendezvous\ncomm bwd rendezvous\n", "comm bwd buffered 1\n")))
    text = draw(
        st.sampled_from(
            (
                COMPOSITE,
                CHUNKS.format(comm=rendezvous),
                DECODE.format(seats=several + 1),
                OFFLOAD.format(slots=several, again="0F0 1F0 1B0 0B0 1D2H 1ADAM 0D2H 0ADAM" if several > 1 else ""),
                TURNS.format(slots=several),
                MEETINGS,
                TWO_CHAINS,
            )
        )
    )
    return parse_program(text)


def valid_programs() -> st.SearchStrategy[Program]:
    """A small Program that can run."""
    return st.one_of(pipelines(), several_stages_a_rank(), sharded(), texts())


# Mutations

Rows = list[list[tuple[str, int, int, int, Override | None]]]


@st.composite
def mutated(draw: st.DrawFn) -> Program:
    """A valid Program after one to three swaps, drops, duplications and moves of its actions."""
    program = draw(valid_programs())
    rows = _rows(program)
    for _ in range(draw(st.integers(1, 3))):
        mine = draw(st.sampled_from(rows))
        if not mine:
            continue
        a, b = draw(st.integers(0, len(mine) - 1)), draw(st.integers(0, len(mine) - 1))
        match draw(st.sampled_from(("swap", "next", "move", "drop", "duplicate"))):
            case "swap":
                mine[a], mine[b] = mine[b], mine[a]
            case "next":
                mine[a - 1], mine[a] = mine[a], mine[a - 1]
            case "move":
                mine.insert(b, mine.pop(a))
            case "drop":
                del mine[a]
            case "duplicate":
                mine.insert(b, mine[a])
    return rebuilt(program, rows)


@st.composite
def tangled(draw: st.DrawFn) -> Program:
    """Messages and groups between two or three ranks on a few streams, in any order: most of these deadlock."""
    streams = ("s", "t", "u")[: draw(st.integers(1, 3))]
    kinds = (
        *(Kind(name=f"{s.upper()}_GO", stream=s) for s in streams),
        *(Kind(name=f"{s.upper()}_SEND", stream=s, comm="net", message="send") for s in streams),
        *(Kind(name=f"{s.upper()}_RECV", stream=s, comm="net", message="recv") for s in streams),
        *(Kind(name=f"{s.upper()}_LET", stream=s, effects=effects("write A")) for s in streams),
        *(Kind(name=f"{s.upper()}_SEE", stream=s, effects=effects("read A")) for s in streams),
        *(Kind(name=f"{s.upper()}_END", stream=s, effects=effects("consume A")) for s in streams),
    )
    ranks = draw(st.integers(2, 3))
    build = ProgramBuilder(num_stages=ranks, units=5, kinds=kinds)
    life = [f"_{verb}" for verb in ("LET", "SEE", "END") * draw(st.integers(0, 2))]
    rows: Rows = [
        [(draw(st.sampled_from(streams)).upper() + verb, rank, 0, -1, None) for verb in life] for rank in range(ranks)
    ]
    for number in range(draw(st.integers(1, 5))):
        stream = st.sampled_from(streams)
        if draw(st.booleans()):
            for rank in draw(st.lists(st.integers(0, ranks - 1), min_size=2, max_size=4)):
                _put(draw, rows[rank], (f"{draw(stream).upper()}_GO", rank, number, number, None))
        else:
            here, there = draw(st.permutations(range(ranks)))[:2]
            ends = ((here, there, "SEND"), (there, here, "RECV"))
            for rank, other, side in ends:
                _put(draw, rows[rank], (f"{draw(stream).upper()}_{side}", rank, number, -1, Override(peer=other)))
    for mine in rows:
        cls = build.rank_class()
        for kind, stage, unit, group, override in mine:
            build.add(cls, kind, stage, unit, group=group, override=override)
    net = draw(
        st.sampled_from(
            (
                Communicator(name="net", semantics="rendezvous", ordered=False),
                Communicator(name="net", ordered=False),
                Communicator(name="net", capacity=1, ordered=False),
                Communicator(name="net", capacity=2, ordered=False),
            )
        )
    )
    pool = draw(st.sampled_from(("", "one")))
    return build.build(
        comms=(net,),
        buffers=(BufferClass(name="A", pool=pool, memory="activations"),),
        pools=(Pool(name="one", size=1),),
    )


def _put(
    draw: st.DrawFn,
    rows: list[tuple[str, int, int, int, Override | None]],
    row: tuple[str, int, int, int, Override | None],
) -> None:
    rows.insert(draw(st.integers(0, len(rows))), row)


def _rows(program: Program) -> Rows:
    out: Rows = []
    for cls in range(program.num_classes):
        out.append([])
        for row in range(int(program.class_ptr[cls]), int(program.class_ptr[cls + 1])):
            kind = program.kinds[program.kind[row]].name
            stage, unit, group = int(program.stage[row]), int(program.unit[row]), int(program.group[row])
            out[cls].append((kind, stage, unit, group, program.overrides.get(row)))
    return out


def rebuilt(program: Program, rows: Rows) -> Program:
    """The Program with other rows."""
    build = ProgramBuilder(num_stages=program.num_stages, units=program.units, kinds=program.kinds)
    for count, mine in zip(program.counts, rows, strict=True):
        cls = build.rank_class(count)
        for kind, stage, unit, group, override in mine:
            build.add(cls, kind, stage, unit, group=group, override=override)
    return build.build(
        buffers=program.buffers,
        comms=program.comms,
        pools=program.pools,
        chains=program.chains,
        inputs=program.inputs,
        aliases=program.aliases,
    )
