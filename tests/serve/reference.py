"""Answers against the types of OpenAI's client, strictly: `differences(answer)` says what those do not have, what they
want and is not there, and what is of another type. The client itself takes all of it in silence."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError


def differences(answer: BaseModel, where: str = "") -> list[str]:
    """Of an answer and all that is in it, with the path to each."""
    here = where or type(answer).__name__
    made = [f"{here}.{name} is not OpenAI's" for name in answer.model_extra or ()]
    for name, field in type(answer).model_fields.items():
        if field.is_required() and name not in answer.model_fields_set:
            made.append(f"{here}.{name} is missing")
    if not where:
        try:
            type(answer).model_validate_json(answer.model_dump_json(exclude_unset=True), strict=True)
        except ValidationError as error:
            made += [f"{here}.{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
    for name in answer.model_fields_set:
        made += _within(getattr(answer, name), f"{here}.{name}")
    return made


def _within(value: Any, where: str) -> list[str]:
    if isinstance(value, BaseModel):
        return differences(value, where)
    if isinstance(value, list):
        return [one for at, inner in enumerate(value) for one in _within(inner, f"{where}[{at}]")]
    return []
