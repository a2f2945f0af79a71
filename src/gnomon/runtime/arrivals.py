"""Which messages have surely been taken when another one arrives, so that what was sent can be freed.

gloo does not say when a send is over. But a message that arrives was sent by a rank that had posted, before, the
receives that stand before that send in its rows: what they wait for is on its way or there. `proofs(program, cls)`
returns, for each message that a rank class receives, those of its own messages. Pure; left out: waiting (`buffers`).
"""

from __future__ import annotations

from gnomon.program import Program

Message = tuple[str, int, int]
"""Buffer that it arrives in: (X or DY, stage, unit)."""
_ARRIVES = {"SEND_F": ("X", 1), "RECV_F": ("X", 0), "SEND_B": ("DY", -1), "RECV_B": ("DY", 0)}
_SOURCE = {"RECV_F": -1, "RECV_B": 1}


def proofs(program: Program, cls: int) -> dict[Message, tuple[Message, ...]]:
    """Message that `cls` receives -> its own messages that the sender had asked for by then."""
    home = _homes(program)
    found: dict[Message, tuple[Message, ...]] = {}
    for other in range(program.num_classes):
        if other == cls:
            continue
        asked: list[Message] = []
        for row in range(int(program.class_ptr[other]), int(program.class_ptr[other + 1])):
            kind, stage, unit = program.kinds[program.kind[row]].name, int(program.stage[row]), int(program.unit[row])
            if kind not in _ARRIVES:
                continue
            buffer, hop = _ARRIVES[kind]
            if kind in _SOURCE and home[stage + _SOURCE[kind]] == cls:
                asked.append((buffer, stage, unit))
            elif kind not in _SOURCE and home[stage + hop] == cls:
                found[buffer, stage + hop, unit] = tuple(asked)
                asked = []
    return found


def _homes(program: Program) -> dict[int, int]:
    """Stage -> its rank class."""
    return {
        int(stage): cls
        for cls in range(program.num_classes)
        for stage in program.stage[program.class_ptr[cls] : program.class_ptr[cls + 1]]
    }
