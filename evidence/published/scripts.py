"""What the scripts that a source ran say where its page, and so the row, does not: sizes, lengths and batches.

`with_script_facts(row)` returns the row with the columns that rules of its source give (`columns` of `rules`), and
notes. A column that the row has is kept, but for the few that a rule corrects. Leaves out what readers of their own
read: Megatron-LM's tests, NVIDIA's scripts, NeMo AutoModel's recipes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from evidence.published.row import Row
from evidence.published.rules import matching


def with_script_facts(row: Row) -> tuple[Row, tuple[str, ...]]:
    """The row with what its script settles, and what that was."""
    notes: list[str] = []
    given = row
    for rule in matching(given, "columns"):
        says: Mapping[str, Any] = rule.set["columns"]
        fill = {name: value for name, value in says.get("gives", {}).items() if getattr(row, name) is None}
        fill |= says.get("corrects", {})
        fill |= {"framework": f"{row.framework}, {says['runs_model_of']}"} if "runs_model_of" in says else {}
        if fill:
            row = replace(row, **fill)
            notes.append(f"{', '.join(sorted(fill))}: {rule.source}; read {rule.date}")
    return _whole_stages(row, notes), tuple(notes)


VOCABULARY_OF_BLOOM = 250_880
BY_STAGE = r"tr11-176b-ml/chronicles-prequel\.md"
"""Page that names models by parameters alone, with as many layers on each stage as on every other."""


def _whole_stages(row: Row, notes: list[str]) -> Row:
    """Layers by the parameters that a model is named by: 12 h² each beside the embedding, as many on each stage."""
    known = re.search(BY_STAGE, (row.source or "").lower()) and row.hidden and row.params_b and row.pp
    if not known or row.layers is not None:
        return row
    embedding, share = VOCABULARY_OF_BLOOM * (row.hidden or 0), 12 * (row.hidden or 0) ** 2
    stages = row.pp or 1
    layers = round((1e9 * (row.params_b or 0.0) - embedding) / share / stages) * stages
    notes.append(f"{layers} layers: what {row.params_b:g} billion parameters leave, as many on each stage")
    return replace(row, layers=layers)
