"""Messages between pipeline ranks as a Program has them: the channels they go through, and when one was surely taken.

`channels(program)` lists (source, destination, buffer), each a process group: NCCL matches what goes through a group by
order, not by tag, so `out_of_order` names a message whose order differs at the two ends. gloo does not say when a send
is over. But a message that arrives was sent by a rank that had posted, before, the receives that stand before that send
in its rows: what they wait for is on its way or there. `proofs(program, cls)` returns, for each message that a rank
class receives, those of its own. Pure; left out: waiting (`buffers`).
"""

from __future__ import annotations

from collections.abc import Iterator

from gnomon.program import Program

Message = tuple[str, int, int]
"""Buffer that it arrives in: (X, DY or that of a skip, stage, unit)."""
Channel = tuple[int, int, str]
"""Rank class that sends, one that receives, buffer."""
# Kind -> (buffer that it arrives in, stage of that buffer less the row's own).
_ARRIVES = {"SEND_F": ("X", 1), "RECV_F": ("X", 0), "SEND_B": ("DY", -1), "RECV_B": ("DY", 0)}
# Kind -> stage of the sender less the row's own.
_SOURCE = {"RECV_F": -1, "RECV_B": 1}


def proofs(program: Program, cls: int) -> dict[Message, tuple[Message, ...]]:
    """Message that `cls` receives -> its own messages that the sender had asked for by then."""
    needs: dict[int, list[Message]] = {}
    proven: dict[Message, tuple[Message, ...]] = {}
    # Rows come class by class. So of each peer its receives from `cls` and its sends to `cls` are met in the peer's own
    # order, whichever class is read first.
    for message, (source, destination, _), sends in _messages(program):
        if sends and destination == cls:
            # Taken out: the first message after a receive proves it, later ones need not again.
            proven[message] = tuple(needs.pop(source, ()))
        elif not sends and source == cls:
            needs.setdefault(destination, []).append(message)
    return proven


def channels(program: Program) -> tuple[Channel, ...]:
    """Every channel that messages go through, sorted."""
    return tuple(sorted({channel for _, channel, _ in _messages(program)}))


def out_of_order(program: Program) -> Message | None:
    """A message that is not received in the order in which its channel sends; None where all are."""
    ends: dict[Channel, tuple[list[Message], list[Message]]] = {}
    for message, channel, sends in _messages(program):
        # The flag is the index: 0 received, 1 sent.
        ends.setdefault(channel, ([], []))[sends].append(message)
    for received, sent in ends.values():
        for one, other in zip(received, sent, strict=True):
            if one != other:
                return one
    return None


def _messages(program: Program) -> Iterator[tuple[Message, Channel, bool]]:
    """(message, its channel, whether the row sends it) of each row that sends or receives, class by class."""
    home = _homes(program)
    for cls in range(program.num_classes):
        for row in range(int(program.class_ptr[cls]), int(program.class_ptr[cls + 1])):
            kind, stage, unit = program.kinds[program.kind[row]].name, int(program.stage[row]), int(program.unit[row])
            if kind in _ARRIVES:
                buffer, hop = _ARRIVES[kind]
                other = stage + (_SOURCE[kind] if kind in _SOURCE else hop)
            elif "_SKIP" in kind and program.comm_of(row):
                override = program.overrides[row]
                assert override.peer is not None, "rows of skips name the other end"
                buffer, other = override.name, override.peer
            else:
                continue
            if kind.startswith("RECV"):
                yield (buffer, stage, unit), (home[other], cls, buffer), False
            else:
                yield (buffer, other, unit), (cls, home[other], buffer), True


def _homes(program: Program) -> dict[int, int]:
    """Stage -> its rank class."""
    return {
        int(stage): cls
        for cls in range(program.num_classes)
        for stage in program.stage[program.class_ptr[cls] : program.class_ptr[cls + 1]]
    }
