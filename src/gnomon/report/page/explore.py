"""The live page of `gnomon explore`: a form made from options, the answer, and the report's own page under it.

`explore_html(fields, state)` returns the text. Its script sends the form's words to the server that gave it, shows the
answer, and keeps the state in the address's fragment. Leaves out the server (`cli.explore`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gnomon.report.page.html import embedded

_FOLDER = Path(__file__).parent
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What the browser lets the page do: ask its own server, and nothing else. It holds within the report's frame too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """An option of the form."""

    flag: str
    """`--tp`; empty for the model."""
    label: str
    """Its name on the page."""
    help: str
    """What it means, in a line."""
    kind: str
    """`text`, `choice` or `switch`."""
    choices: tuple[str, ...] = ()
    """Of a choice; of a text, what is offered."""
    shown: bool = False
    """Above the fold; the others wait under `more options`."""
    of: str = ""
    """`training` or `serving`, of which it is an option; empty: of both."""


def explore_html(fields: Sequence[Field], state: Mapping[str, object], token: str) -> str:
    """The page of `gnomon explore` as one HTML text: style, fields, first state and script are inside it."""
    data = {"fields": [asdict(field) for field in fields], "state": state, "token": token}
    text = (_FOLDER / "explore.html").read_text(encoding="utf-8")
    parts = {
        "{{style}}": (_FOLDER / "page.css").read_text(encoding="utf-8")
        + (_FOLDER / "explore.css").read_text(encoding="utf-8"),
        "{{data}}": embedded(json.loads(json.dumps(data))),
        "{{script}}": (_FOLDER / "explore.js").read_text(encoding="utf-8"),
    }
    for name, part in parts.items():
        text = text.replace(name, part)
    return text
