"""What an action does: its kind, the stream it runs on, and its effects on buffers.

A `Kind` gives the defaults of every row of that kind: stream, communicator, message direction and effects. The
standard kinds are those of a pipeline schedule as PyTorch writes it (`F`, `B`, `I` input gradient, `W` weight
gradient, `SEND_F` …) plus checkpointed forward `C` and recompute `R`; a Program may declare others or override these.
Effects name buffer classes; which instance is meant follows from the row's stage and unit, so rows stay `2F0`.
Left out: durations (prices are looked up by key) and what a kind computes (that is the graph's).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

EffectOp = Literal["read", "accumulate", "extend", "write", "consume", "free"]
EFFECT_OPS: tuple[EffectOp, ...] = ("read", "accumulate", "extend", "write", "consume", "free")
"""In the order in which effects of one row on one buffer apply. `consume` is the last read: it reads and frees."""

READ, ACCUMULATE, EXTEND, WRITE, CONSUME, FREE = range(6)

Which = Literal["own", "prefix", "suffix"]
"""`own`: the row's unit. `prefix`: every unit that holds earlier tokens of the same sequences; `suffix`: later ones."""

Lifetime = Literal["action", "step", "sequence", "carried"]
Per = Literal["stage", "unit", "sequence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One effect of a kind on a buffer class; the instance is that of the row's stage and unit."""

    op: EffectOp
    """read, accumulate (read-modify-write; the first one allocates), extend (grow by the unit's tokens), write,
    consume, free."""
    buffer: str
    """Name of the buffer class."""
    which: Which = "own"
    """Own unit, or the units before or after it in the same sequences (a KV prefix)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Defaults of the rows of one kind."""

    name: str
    """Upper case, not ending in a digit: `F`, `SEND_F`, `D2H`."""
    stream: str = "compute"
    """Stream its rows are issued on, unless a row says otherwise."""
    effects: tuple[Effect, ...] = ()
    """Default effects. Effects on a buffer that does not exist at the row's stage are dropped."""
    comm: str = ""
    """Communicator its rows use; empty for compute and copies."""
    message: Literal["", "send", "recv"] = ""
    """A point-to-point action: which side of the message it is."""
    hop: int = 0
    """Stage of the receiver minus stage of the sender (+1 forward, -1 backward), unless a row names its peer."""

    def __post_init__(self) -> None:
        if not self.name or not self.name[0].isalpha() or self.name[-1].isdigit() or self.name != self.name.upper():
            raise ValueError(f"kind {self.name!r}: upper case, starting with a letter and not ending in a digit")
        if self.message and not self.comm:
            raise ValueError(f"kind {self.name} is a message without a communicator; its rows would match nothing")
        if self.hop and not self.message:
            raise ValueError(f"kind {self.name} has hop {self.hop} but is not a message")


MemoryClass: TypeAlias = Literal[
    "parameters",
    "gradients",
    "activations",
    "logits",
    "communication",
    "not in the step's",  # in host memory, or counted between steps with what a rank always holds
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferClass:
    """A family of buffers, one instance per stage, per unit of a stage, or per sequence of a stage."""

    name: str
    """Name in effects and in the table of sizes."""
    memory: MemoryClass = field(compare=False)
    """What class of device memory it is counted in, which text leaves out (two Programs of the same text are equal)."""
    lifetime: Lifetime = "step"
    """action: within one row. step: written and freed in the step. sequence: until an action frees it. carried:
    always there."""
    per: Per = "unit"
    """What an instance belongs to, besides its stage."""
    slots: int = 1
    """Versions that may exist: a rewrite waits for the release of the version `slots` before it."""
    pool: str = ""
    """Name of a pool whose k-th allocation waits for the (k - n)-th free; sizes of pools are the Program's."""

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"buffer {self.name}: slots must be at least 1, not {self.slots}")


def effects(text: str) -> tuple[Effect, ...]:
    """Effects from their text form: `"read P, consume X, write S"`; `KV<` is the prefix, `KV>` the suffix."""
    return tuple(_effect(part) for part in text.split(",") if part.strip())


def _effect(part: str) -> Effect:
    op, _, name = part.strip().partition(" ")
    name = name.strip()
    if op not in EFFECT_OPS or not name:
        raise ValueError(f"effect {part.strip()!r}: write `op BUFFER` with op one of {', '.join(EFFECT_OPS)}")
    which: Which = "prefix" if name.endswith("<") else "suffix" if name.endswith(">") else "own"
    return Effect(op=op, buffer=name.rstrip("<>"), which=which)


def effects_text(values: tuple[Effect, ...]) -> str:
    """The text form that `effects` reads."""
    mark = {"own": "", "prefix": "<", "suffix": ">"}
    return ", ".join(f"{e.op} {e.buffer}{mark[e.which]}" for e in values)


STANDARD_BUFFERS = (
    BufferClass(name="X", memory="activations"),  # input of a stage
    BufferClass(name="S", memory="activations"),  # what the backward needs
    BufferClass(name="Y", memory="communication"),  # output; the next stage's X when both are on one rank
    BufferClass(name="DY", memory="communication"),  # gradient of the output
    BufferClass(
        name="DX", memory="communication"
    ),  # gradient of the input; the previous stage's DY when both are on one rank
    BufferClass(name="P", memory="parameters", lifetime="carried", per="stage"),
    BufferClass(name="G", memory="gradients", per="stage"),
)
"""X Y DX DY are the chain between stages: the first stage has no DX (and no X unless inputs are loaded), the last
no Y and no DY."""

STANDARD_KINDS = (
    Kind(name="F", effects=effects("read P, consume X, write S, write Y")),
    Kind(name="C", effects=effects("read P, read X, write Y")),
    Kind(name="R", effects=effects("read P, consume X, write S")),
    Kind(name="B", effects=effects("read P, consume S, consume DY, write DX, accumulate G")),
    Kind(name="I", effects=effects("read P, read S, read DY, write DX")),
    Kind(name="W", effects=effects("consume S, consume DY, accumulate G")),
    Kind(name="SEND_F", stream="send_f", effects=effects("consume Y"), comm="fwd", message="send", hop=1),
    Kind(name="RECV_F", stream="recv_f", effects=effects("write X"), comm="fwd", message="recv", hop=1),
    Kind(name="SEND_B", stream="send_b", effects=effects("consume DX"), comm="bwd", message="send", hop=-1),
    Kind(name="RECV_B", stream="recv_b", effects=effects("write DY"), comm="bwd", message="recv", hop=-1),
    Kind(name="LOAD", stream="load", effects=effects("write X")),
    Kind(name="AR", stream="reduce", effects=effects("accumulate G"), comm="dp"),
    Kind(name="OPT", effects=effects("consume G, read P, write P")),
)
"""Full backward is `B`; a backward split in two is `I` (input gradient, on the critical path) and `W` (weight
gradient, free to move)."""


def with_kinds(*changed: Kind, base: tuple[Kind, ...] = STANDARD_KINDS) -> tuple[Kind, ...]:
    """The standard kinds with some replaced by name and new ones appended."""
    by_name = {kind.name: kind for kind in base}
    by_name.update({kind.name: kind for kind in changed})
    return tuple(by_name.values())


def with_buffers(*changed: BufferClass, base: tuple[BufferClass, ...] = STANDARD_BUFFERS) -> tuple[BufferClass, ...]:
    """The standard buffer classes with some replaced by name and new ones appended."""
    by_name = {buffer.name: buffer for buffer in base}
    by_name.update({buffer.name: buffer for buffer in changed})
    return tuple(by_name.values())
