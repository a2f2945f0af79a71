"""The grid on which an engine's own kernels are measured (`runtime.calibrate.served`), and what prices divide by.

`stored_linear`: rows times a packed matrix of SIDE x SIDE. `paged_decode`: SEQUENCES queries, each of 2 key-value heads
with `group` heads of HEAD wide each, over so many keys. `paged_prompt`: `new` queries of one sequence after `before`
keys, of 8 heads on 2. Leaves out seconds.
"""

from __future__ import annotations

FORMS = ("bf16", "int8", "int4-g64", "fp32")
"""How matrices are packed."""
SIDE = 1536
"""Of the matrices."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
KEYS = (64, 512, 2048)
GROUPS = (1, 3, 8)
"""Query heads of a key-value head."""
SEQUENCES, KV_HEADS = 4, 2
HEAD = 64
"""Wide."""
BLOCK = 16
"""Tokens of a page."""
NEW, BEFORE = (16, 128, 512, 2048), (1, 512, 2048)
PROMPT_HEADS = 8
