"""Lengths of real text, in tokens: what `run.py` makes batches of.

`docstrings()` are those of the Python's standard library: every module's, class's and function's docstring is a
document, in tokens of a byte-level BPE of 8,192 that `tokenizers` learns from the same text (the text is the same on
every machine with this Python, and no tokenizer has to be fetched). `column(file)` are numbers of a CSV that somebody
has counted. `drawn` takes some of a corpus as an epoch in random order does, cut at a context.
"""

from __future__ import annotations

import ast
import csv
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

VOCABULARY = 8192
NOT_TEXT = ("site-packages", "test", "tests", "idlelib", "lib2to3")
"""Folders of the library that are somebody else's, or tests."""


def _documents() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if set(path.relative_to(root).parts) & {*NOT_TEXT}:
            continue
        try:
            with warnings.catch_warnings(action="ignore"):  # escapes that this Python has come to dislike
                tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                if text := ast.get_docstring(node):
                    yield text


def docstrings() -> tuple[int, ...]:
    """Tokens of each docstring of the standard library, in the order of its files."""
    from tokenizers import ByteLevelBPETokenizer

    texts = list(_documents())
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=VOCABULARY, min_frequency=2, show_progress=False)
    return tuple(len(one.ids) for one in tokenizer.encode_batch(texts) if one.ids)


def column(file: str, name: str) -> tuple[int, ...]:
    """Numbers above 0 of a CSV's column."""
    with open(file, newline="") as opened:
        return tuple(n for row in csv.DictReader(opened) if (n := int(row[name])) > 0)


def drawn(lengths: Sequence[int], count: int, context: int, seed: int = 0) -> tuple[int, ...]:
    """So many of them, each at most once; longer ones end at the context."""
    chosen = np.random.default_rng(seed).permutation(len(lengths))[:count]
    return tuple(min(int(lengths[i]), context) for i in chosen)


def said(lengths: Sequence[int]) -> str:
    """Their distribution in a line."""
    some = np.percentile(lengths, (50, 90, 99)).astype(int)
    return (
        f"{len(lengths):,} documents, {sum(lengths):,} tokens; median {some[0]:,}, nine of ten under {some[1]:,}, "
        f"99 of 100 under {some[2]:,}, longest {max(lengths):,}"
    )
