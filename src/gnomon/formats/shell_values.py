"""Tests, arithmetic and programs of shell commands, on words that are known.

`is_true` decides `[ A -gt B ]`, `calculate` computes `$((…))`, `program_of` finds what a command starts. Leaves out
variables (`shell`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from itertools import pairwise


def is_true(test: list[str]) -> bool | None:
    """`-n X`, `A == B`, `A -gt B` …; None when it is none of these."""
    if test[:1] == ["!"]:
        inner = is_true(test[1:])
        return None if inner is None else not inner
    match test:
        case ["-z", text]:
            return not text
        case ["-n", text] | [text] if text != "-n":
            return None if text in ("-z",) else bool(text)
        case [a, "=" | "==", b]:
            return a == b
        case [a, "!=", b]:
            return a != b
        case [a, "-eq" | "-ne" | "-gt" | "-ge" | "-lt" | "-le" as op, b] if is_integer(a) and is_integer(b):
            order = (int(a) > int(b)) - (int(a) < int(b))
            return order in {"-eq": (0,), "-ne": (-1, 1), "-gt": (1,), "-ge": (0, 1), "-lt": (-1,), "-le": (-1, 0)}[op]
    return None


def is_integer(text: str) -> bool:
    """Whether it is a short decimal integer."""
    return re.fullmatch(r"-?\d{1,18}", text) is not None


def calculate(node: ast.expr) -> int:
    """Calculates an integer expression. ValueError for anything else."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -calculate(operand)
        case ast.BinOp(left=left_operand, op=op, right=right):
            a, b = calculate(left_operand), calculate(right)
            match op:
                case ast.Add():
                    result = a + b
                case ast.Sub():
                    result = a - b
                case ast.Mult():
                    result = a * b
                case ast.Div():
                    result = _quotient(a, b)
                case ast.Mod():
                    result = a - b * _quotient(a, b)
                case _:
                    raise ValueError
            # A shell's 64 bits wrap round, which nobody means.
            if max(abs(a), abs(b), abs(result)) >= 2**63:
                raise ValueError
            return result
    raise ValueError


def _quotient(a: int, b: int) -> int:
    """A shell's quotient, cut towards zero (Python's is rounded down); its remainder has the sign of `a`."""
    size = abs(a) // abs(b)
    return size if (a < 0) == (b < 0) else -size


LAUNCHERS = ("torch.distributed", "accelerate", "deepspeed.launcher")
"""Modules that start another program."""

CONSOLE: Mapping[str, frozenset[str]] = {
    "llamafactory-cli": frozenset({"train"}),
    "lmf": frozenset({"train"}),
    "swift": frozenset({"sft", "pt", "rlhf"}),
    "megatron": frozenset({"sft", "pt", "rlhf"}),
    "trl": frozenset({"sft", "dpo", "grpo", "kto", "reward", "rloo"}),
    "axolotl": frozenset({"train"}),
    "tune": frozenset({"run"}),
}
"""Commands that packages install and that train -> the words behind them that say so."""


def program_of(words: list[str]) -> int | None:
    """Index of the program that a command starts: the first `.py` file, the module after `-m`, or a command of CONSOLE
    with its word."""
    files = [i for i, w in enumerate(words) if w.endswith(".py") and not w.startswith("-")]
    modules = [i + 1 for i, w in enumerate(words[:-1]) if w in ("-m", "--module")]
    installed = [
        i
        for i, (word, following) in enumerate(pairwise(words))
        if following in CONSOLE.get(word.rpartition("/")[2], ())
    ]
    programs = [*files[:1], *[i for i in modules if not words[i].startswith(LAUNCHERS)][:1], *installed[:1]]
    return min(programs, default=None)
