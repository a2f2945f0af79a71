"""Calls of tools in answers, however their text comes in pieces."""

from __future__ import annotations

import json
import random

import pytest

pytest.importorskip("torch", reason="torch is not installed: the room of the engine needs it")

from gnomon.errors import InputError  # noqa: E402
from gnomon.serve.calls import Calls, calls_in, tools_of  # noqa: E402

A, B = '{"name": "f", "arguments": {"x": 1}}', '{"name": "g", "parameters": {"y": "<tool_call>"}}'
TAGGED = "<tool_call>\n{}\n</tool_call>"
TEXTS = {
    "plain": (" It is 7 <b>, and {no} call.\n", " It is 7 <b>, and {no} call.\n", ""),
    "one": (A, "", "f"),
    "a list": (f"[{A}, {B}]", "", "f g"),
    "JSON that is none": ('{"answer": 7}', '{"answer": 7}', ""),
    "text before two": (f"Let me look.\n{TAGGED.format(A)}\n{TAGGED.format(B)}", "Let me look.", "f g"),
    "one that does not end": (f"<tool_call>{A}", "", "f"),
    "one that is none between": (
        f"{TAGGED.format(A)}{TAGGED.format('x')}{TAGGED.format(A)}", TAGGED.format("x"), "f f",
    ),
    "the beginning of a tag": ("so a <tool_cal", "so a <tool_cal", ""),
    "spaces": ("  \n", "  \n", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_a_stream_of_calls_says_what_the_whole_answer_says(name: str) -> None:
    text, content, names = TEXTS[name]
    said, calls = calls_in(text)
    assert (said, " ".join(call["function"]["name"] for call in calls)) == (content, names)
    assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls)
    for seed in range(20):
        rng, one, events, at = random.Random(seed), Calls(), [], 0
        while at < len(text):
            step = rng.randint(1, 9)
            events += one.push(text[at : at + step])
            at += step
        events += one.push("", last=True)
        assert "".join(event for event in events if isinstance(event, str)) == content
        assert [e["function"] for e in events if isinstance(e, dict)] == [call["function"] for call in calls]
        assert one.count == len(calls)


def test_text_is_told_before_the_answer_ends() -> None:
    one = Calls()
    assert one.push("Let me look. ") == ["Let me look."]
    assert one.push("<tool") == [] and one.push("box> it is") == [" <toolbox> it is"]


def test_of_a_list_that_may_not_be_one_the_first_is_told() -> None:
    assert len(calls_in(f"[{A}, {B}]", several=False)[1]) == 1


@pytest.mark.parametrize(
    ("names", "why"),
    [(["f", "f"], "two tools are named 'f'"), ([""], "1 to 128 letters, not 0"), (["f" * 129], "not 129"),
     (["a\nb"], "cannot be printed")],
)  # fmt: skip
def test_tools_that_a_call_could_not_name_are_refused(names: list[str], why: str) -> None:
    with pytest.raises(InputError, match=why):
        tools_of({"tools": [{"type": "function", "function": {"name": name}} for name in names]})
