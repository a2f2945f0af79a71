"""A plan of which some fields cannot be read: what a memo is keyed by, so that its key says all that its value follows
from.

`without(plan, "saved", "precision")` is equal to any other plan that differs from it in these fields alone, and code
that reads one of them fails instead of returning what belongs to another plan. Leaves out which fields a value reads.
"""

from __future__ import annotations

from copy import copy
from functools import cache
from typing import NoReturn

from gnomon.plans.plan import Plan


class Unread:
    """Stands in place of a field's value and raises when it is read."""

    __slots__ = ("_field",)

    def __init__(self, field: str) -> None:
        object.__setattr__(self, "_field", field)

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(
            f"plan.{object.__getattribute__(self, '_field')} is read where its memo's key does not hold it"
        )

    def __iter__(self) -> NoReturn:
        self.__getattr__("__iter__")

    def __len__(self) -> NoReturn:
        self.__getattr__("__len__")

    def __bool__(self) -> NoReturn:
        self.__getattr__("__bool__")


@cache
def _unread(field: str) -> Unread:
    """One for each field, so that plans without it are equal."""
    return Unread(field)


def without(plan: Plan, *fields: str) -> Plan:
    """The plan with fields that nobody may read. It is a key and an argument: `replace` does not take it."""
    masked = copy(plan)
    for name in fields:
        object.__setattr__(masked, name, _unread(name))
    return masked
