"""Commands with other values of some options: an option given twice is an error."""

from __future__ import annotations

from collections.abc import Sequence


def in_place(words: Sequence[str], *more: str) -> list[str]:
    """The words and `more`, without the options (and their one value) that `more` gives again."""
    again = {word for word in more if word.startswith("--")}
    kept = [w for i, w in enumerate(words) if w not in again and not (i and words[i - 1] in again)]
    return [*kept, *more]
