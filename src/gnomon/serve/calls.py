"""Calls of tools: what a body says of them, and where an answer has them: `Calls.push(text)` as it comes.

An answer is text, or calls, or both. A call is an object with a name and arguments, alone, in a list, or within
`<tool_call>` as Qwen's and Hermes' templates have it; Llama 3 says parameters. Text is told as soon as no call can
begin in it, a call when it is whole; what looks like one and is none is text. Leaves out who is called.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gnomon.errors import InputError

Body = Mapping[str, Any]
MOST_TOOLS, LONGEST_NAME = 128, 128
ANY_TOOL, SEVERAL_TOOLS = "\0any", "\0several"
OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"


def tools_of(fields: Body) -> Sequence[Body]:
    """The tools that a body gives. InputError for what is none."""
    tools = fields.get("tools") or []
    if not isinstance(tools, list) or len(tools) > MOST_TOOLS:
        raise InputError(f"tools is a list of at most {MOST_TOOLS}", "$.tools")
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InputError("a tool is {type: function, function: {name, parameters}}", f"$.tools[{number}]")
        if (why := _not_a_name(function["name"])) is not None:
            raise InputError(f"the name of a tool {why}", f"$.tools[{number}].function.name")
    names = [tool["function"]["name"] for tool in tools]
    # a call says which it means by its name alone
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"two tools are named {twice[0]!r}; give each a name of its own", "$.tools")
    return tools


def _not_a_name(name: str) -> str | None:
    """What is wrong with it; None: nothing is."""
    if not 0 < len(name) <= LONGEST_NAME:
        return f"has 1 to {LONGEST_NAME} letters, not {len(name)}"
    return None if name.isprintable() else f"has letters that cannot be printed: {name[:40]!r}"


def forced_by(choice: object, tools: Sequence[Body], parallel: bool | None) -> str:
    """Name of the tool that an answer must call, ANY_TOOL for one of them, SEVERAL_TOOLS for some, empty for none.
    parallel: `parallel_tool_calls`, None where it is not said."""
    if choice in ("auto", "none"):
        return ""
    if choice == "required" and tools:
        return SEVERAL_TOOLS if parallel else ANY_TOOL
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if isinstance(name, str) and any(tool["function"]["name"] == name for tool in tools):
        return name
    raise InputError("tool_choice is none, auto, required, or {type: function, function: {name}} of a tool that is "
                     "given", "$.tool_choice")  # fmt: skip


def schema_of(tools: Sequence[Body], forced: str) -> str:
    """JSON of a call, of one tool or of any, or of a list of calls, as a grammar is written."""
    options = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": tool["function"].get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
        if forced in (ANY_TOOL, SEVERAL_TOOLS, tool["function"]["name"])
    ]
    one: object = options[0] if len(options) == 1 else {"anyOf": options}
    return "schema:" + json.dumps({"type": "array", "minItems": 1, "items": one} if forced == SEVERAL_TOOLS else one)


Event = str | dict[str, Any]
"""Text, or a call in OpenAI's words."""


class Calls:
    """Finds the function calls in one answer as it comes."""

    def __init__(self, *, several: bool = True) -> None:
        """several: whether a list may have more than one; otherwise the first is told."""
        self.several = several
        self.pending = ""
        """What is not told yet."""
        self.mode = "begins"
        """Whether it `begins`, is `json`, `text`, or within a `call`."""
        self.count = 0
        """Calls so far."""

    def push(self, text: str, *, last: bool = False) -> list[Event]:
        """What may be told by now. last: nothing follows."""
        self.pending += text
        return [event for event in self._events(last) if event]

    def _events(self, last: bool) -> Iterator[Event]:
        if self.mode == "begins":
            first = self.pending.lstrip()[:1]
            if not first and not last:
                return
            self.mode = "json" if first and first in "{[" else "text"
        if self.mode == "json":
            if last:
                yield from self._listed()
            return
        while True:
            if self.mode == "text":
                at = self.pending.find(OPEN_CALL)
                if at < 0:
                    yield self._plain(last)
                    return
                yield self.pending[:at].rstrip()
                self.pending, self.mode = self.pending[at:], "call"
            at = self.pending.find(CLOSE_CALL)
            if at < 0 and not last:
                return
            body = self.pending[len(OPEN_CALL) : at if at >= 0 else None]
            end = at + len(CLOSE_CALL) if at >= 0 else len(self.pending)
            call = _call(_parsed(body))
            self.count += call is not None
            yield call or self.pending[:end]
            self.pending, self.mode = self.pending[end:], "text"

    def _plain(self, last: bool) -> str:
        """Text that cannot be the beginning of a call, without the space that may stand before one."""
        text = self.pending
        if last:
            self.pending = ""
            return "" if self.count and not text.strip() else text
        # The longest end of the text with which OPEN_CALL may begin is held back, and the space before it, which is
        # left out where a call follows.
        keep = next((n for n in range(min(len(OPEN_CALL) - 1, len(text)), 0, -1) if OPEN_CALL.startswith(text[-n:])), 0)
        plain = text[: len(text) - keep].rstrip()
        self.pending = text[len(plain) :]
        return plain

    def _listed(self) -> Iterator[Event]:
        """Yields the calls of an answer that is JSON."""
        value = _parsed(self.pending)
        calls = [_call(one) for one in (value if isinstance(value, list) else [value])]
        if calls and all(calls):
            accepted = [call for call in calls if call is not None][: None if self.several else 1]
            self.count += len(accepted)
            yield from accepted
        else:
            yield self.pending
        self.pending = ""


def calls_in(text: str, *, several: bool = True) -> tuple[str, list[dict[str, Any]]]:
    """(text beside them, calls) of a whole answer."""
    pieces = Calls(several=several).push(text, last=True)
    return "".join(one for one in pieces if isinstance(one, str)), [one for one in pieces if isinstance(one, dict)]


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call(value: object) -> dict[str, Any] | None:
    if not isinstance(value, dict):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(value.get("name"), str) or not isinstance(arguments, dict):
        return None
    function = {"name": value["name"], "arguments": json.dumps(arguments)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
