"""Steps of a trace as a Block with relative names, so that equal layers give equal blocks.

`write_block(converter, steps, …)` writes a call that a kind of the graph says as that kind, a view as a `reshape`, the
rest as `opaque` with its ATen ops. Leaves out which steps make a block (`blocks`).
"""

from __future__ import annotations

from collections.abc import Sequence

from gnomon.frontend.convert import Converter
from gnomon.frontend.draft import Draft, DraftPart
from gnomon.frontend.records import Step
from gnomon.frontend.write_captured import CapturedWriter
from gnomon.frontend.write_kinds import KindWriter


def write_block(converter: Converter, steps: Sequence[Step], prefix: str, name: str, needs_grad: set[int]) -> DraftPart:
    """The steps as one block. prefix: of the module that they lie under. wanted: values that others read."""
    draft = Draft(converter, prefix, name, needs_grad)
    kinds, captured = KindWriter(draft), CapturedWriter(draft)
    for step in steps:
        kind = converter.kinds.get(id(step))
        if kind is None or not kinds.write(step, kind):
            captured.write(step)
    return draft.finish()
