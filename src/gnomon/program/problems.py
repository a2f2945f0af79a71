"""What is wrong with a Program: one `Problem` each, with the rank, the action and the reason in one message.

Only the type and the list of kinds; finding them is the business of `dependencies`, `messages`, `order` and `validate`.
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.program.program import Program

PROBLEMS = (
    "missing buffer",
    "use after free",
    "double free",
    "overwrite",
    "carried buffer freed",
    "leak",
    "send without receive",
    "receive without send",
    "duplicate message",
    "wrong order on a communicator",
    "communicator orders disagree",
    "deadlock",
)
"""Every kind of problem, in the order in which causes are looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One reason why a Program cannot run."""

    what: str
    """One of PROBLEMS."""
    rank_class: int
    """Rank class of the action."""
    row: int
    """Row of the Program."""
    action: str
    """The action, `2F0`."""
    why: str
    """The buffer, message or cycle, in words."""

    def __post_init__(self) -> None:
        assert self.what in PROBLEMS, self.what

    @staticmethod
    def of(program: Program, what: str, row: int, why: str) -> Problem:
        """The problem at one row."""
        return Problem(what=what, rank_class=program.rank_class(row), row=row, action=program.token(row), why=why)

    def __str__(self) -> str:
        return f"{self.what}: rank class {self.rank_class}, action {self.action}: {self.why}"
