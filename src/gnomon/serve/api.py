"""OpenAI's API as values: bodies of requests to asks, tokens to answers.

`completion(body, …)` and `chat(body, …)` read a body strictly: a field that is not known or not supported is an error
that names it, so that nothing that somebody asked for is left out in silence. Fields of vLLM beside OpenAI's: top_k,
min_p, repetition_penalty, min_tokens, stop_token_ids, ignore_eos, include_stop_str_in_output, guided_regex. Nothing in
a body is a path, a template or code. Leaves out HTTP (`server`).
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gnomon.errors import InputError, nearest
from gnomon.serve.messages import Token, Told
from gnomon.serve.sampling import Sampling, biases
from gnomon.serve.vocabulary import Vocabulary

Body = Mapping[str, Any]
MOST_ANSWERS, MOST_PROMPTS, MOST_STOPS, MOST_TOOLS = 128, 256, 16, 128
LONGEST_STOP = 256
"""Letters: each token's text is looked at for every beginning of a stop string."""
DEFAULT_COMPLETION = 16
"""Tokens of a completion whose body does not say, as OpenAI's."""

LABELS = frozenset("user metadata safety_identifier prompt_cache_key store service_tier".split())
"""Fields that change nothing in an answer."""
COMMON = frozenset(
    "model stream stream_options n max_tokens temperature top_p top_k min_p presence_penalty frequency_penalty "
    "repetition_penalty logit_bias seed stop stop_token_ids ignore_eos min_tokens include_stop_str_in_output "
    "response_format guided_regex logprobs".split()
)
COMPLETION = COMMON | LABELS | frozenset("prompt echo best_of suffix".split())
CHAT = COMMON | LABELS | frozenset(
    "messages max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls".split()
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a body asks for."""

    model: str
    """One of the names that are served."""
    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling
    count: int
    """Answers to each prompt."""
    streams: bool
    usage: bool
    """Whether a stream ends with the counts of tokens."""
    stops: tuple[str, ...]
    keep_stop: bool
    grammar: str
    echoes: tuple[str, ...]
    """Text that is told before each prompt's answers; () for none."""
    chat: bool
    calls: bool
    """Whether the answer may be calls of tools."""
    forced: str
    """Name of the tool that it is a call of; empty for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a body is read against."""

    names: tuple[str, ...]
    """The model's, and its adapters'."""
    words: Vocabulary
    max_model_len: int
    vocab_size: int


def completion(body: object, served: Served) -> Wanted:
    """Of /v1/completions."""
    fields = fields_of(body, COMPLETION, served)
    if fields.get("suffix"):
        raise InputError("suffix is not supported: no model here fills in the middle", "$.suffix")
    prompts = _prompts(fields.get("prompt"), served)
    count = _whole(fields, "n", 1, 1, MOST_ANSWERS)
    if _whole(fields, "best_of", count, 1, MOST_ANSWERS) != count:
        raise InputError("best_of is not supported beside n: ask for n answers and choose", "$.best_of")
    logprobs = _whole(fields, "logprobs", -1, 0, 20)
    echoes = tuple(served.words.decode(prompt) for prompt in prompts) if _flag(fields, "echo") else ()
    if echoes and logprobs >= 0:
        raise InputError("echo with logprobs is not supported: log-probabilities are of the answer", "$.echo")
    most = _whole(fields, "max_tokens", DEFAULT_COMPLETION, 1, served.max_model_len)
    own = _Own(
        prompts=prompts, most=most, logprobs=logprobs, echoes=echoes, chat=False, calls=False, forced="", schema=""
    )
    return _wanted(fields, served, own)


def chat(body: object, served: Served) -> Wanted:
    """Of /v1/chat/completions."""
    fields = fields_of(body, CHAT, served)
    tools = _tools(fields)
    choice = fields.get("tool_choice") or ("auto" if tools else "none")
    forced = _forced(choice, tools)
    text = served.words.render(_messages(fields.get("messages")), tools if choice != "none" else ())
    served.words.check(text, served.max_model_len)
    prompt = served.words.conversation(text)
    if not prompt:
        raise InputError("the conversation has no token; say something", "$.messages")
    room = served.max_model_len - len(prompt)
    if room < 1:
        raise InputError(
            f"the conversation has {len(prompt)} tokens, and the model is served with at most "
            f"{served.max_model_len} of prompt and answer; shorten it",
            "$.messages",
        )
    name = "max_completion_tokens" if fields.get("max_completion_tokens") is not None else "max_tokens"
    most = _whole(fields, name, room, 1, served.max_model_len)
    logprobs = -1
    if _flag(fields, "logprobs"):
        logprobs = _whole(fields, "top_logprobs", 0, 0, 20)
    elif fields.get("top_logprobs") is not None:
        raise InputError("top_logprobs is told beside logprobs: set logprobs to true", "$.top_logprobs")
    schema = _call_schema(tools, forced) if forced else ""
    own = _Own(
        prompts=(tuple(prompt),), most=most, logprobs=logprobs, echoes=(), chat=True,
        calls=choice != "none" and bool(tools), forced="" if forced == ANY_TOOL else forced, schema=schema,
    )  # fmt: skip
    return _wanted(fields, served, own)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Own:
    """What completions and conversations say in ways of their own, as `Wanted` has it."""

    prompts: tuple[tuple[int, ...], ...]
    most: int
    """Tokens of an answer."""
    logprobs: int
    """As `Sampling` has it."""
    echoes: tuple[str, ...]
    chat: bool
    calls: bool
    forced: str
    schema: str
    """That a forced call's answer is of; empty for none."""


def _wanted(fields: Body, served: Served, own: _Own) -> Wanted:
    """Of the fields that both have. InputError for what cannot be."""
    stop = fields.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops) or len(stops) > MOST_STOPS:
        raise InputError(f"stop is a string, or a list of at most {MOST_STOPS} that are not empty", "$.stop")
    if (length := max(map(len, stops), default=0)) > LONGEST_STOP:
        raise InputError(f"a stop string has at most {LONGEST_STOP} letters, not {length}", "$.stop")
    ids = fields.get("stop_token_ids") or []
    if not isinstance(ids, list) or not all(_is_whole(one) and 0 <= one < served.vocab_size for one in ids):
        raise InputError(f"stop_token_ids is a list of tokens, 0 to {served.vocab_size - 1}", "$.stop_token_ids")
    ends = () if _flag(fields, "ignore_eos") else served.words.ends
    bias = fields.get("logit_bias") or {}
    if not isinstance(bias, dict) or any(isinstance(v, bool) or not isinstance(v, int | float) for v in bias.values()):
        raise InputError("logit_bias is an object of numbers by token", "$.logit_bias")
    longest = min(served.max_model_len - len(prompt) for prompt in own.prompts)
    if own.most > longest:
        raise InputError(
            f"a prompt of {served.max_model_len - longest} tokens with {own.most} of answer is more than the "
            f"{served.max_model_len} that the model is served with; shorten the prompt or lower max_tokens"
        )
    sampling = Sampling(
        max_tokens=own.most,
        temperature=_number(fields, "temperature", 1.0),
        top_p=_number(fields, "top_p", 1.0),
        top_k=max(0, _whole(fields, "top_k", 0, -1, 1 << 31)),
        min_p=_number(fields, "min_p", 0.0),
        presence_penalty=_number(fields, "presence_penalty", 0.0),
        frequency_penalty=_number(fields, "frequency_penalty", 0.0),
        repetition_penalty=_number(fields, "repetition_penalty", 1.0),
        logit_bias=biases({str(k): _finite(v, "logit_bias") for k, v in bias.items()}, served.vocab_size),
        seed=None if fields.get("seed") is None else _whole(fields, "seed", 0, -(1 << 63), (1 << 63) - 1),
        logprobs=own.logprobs,
        stop_ids=frozenset((*ends, *ids)),
        min_tokens=_whole(fields, "min_tokens", 0, 0, own.most),
    )
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise InputError("stream_options has include_usage and nothing else", "$.stream_options")
    if fields.get("stream_options") is not None and not fields.get("stream"):
        raise InputError("stream_options are of streams: set stream to true, or leave them out", "$.stream_options")
    return Wanted(
        model=str(fields.get("model") or served.names[0]),
        prompts=own.prompts,
        sampling=sampling,
        count=_whole(fields, "n", 1, 1, MOST_ANSWERS),
        streams=_flag(fields, "stream"),
        usage=_flag(options, "include_usage"),
        stops=tuple(stops),
        keep_stop=_flag(fields, "include_stop_str_in_output"),
        grammar=own.schema or _grammar(fields),
        echoes=own.echoes,
        chat=own.chat,
        calls=own.calls,
        forced=own.forced,
    )


def fields_of(body: object, known: frozenset[str], served: Served) -> Body:
    """An object of known fields, for a model that is served. InputError for another."""
    if not isinstance(body, dict):
        raise InputError("the body is a JSON object")
    for name, value in body.items():
        if name not in known and value is not None:
            raise InputError(f"{name[:80]} is not supported{nearest(name[:80], known)}", f"$.{name[:80]}")
    model = body.get("model")
    if model is not None and model not in served.names:
        there = ", ".join(map(repr, served.names))
        raise ModelError(f"there is no model {str(model)[:200]!r}; this server has {there}", "$.model")
    return body


class ModelError(InputError):
    """A model that is not served."""


def _prompts(given: object, served: Served) -> tuple[tuple[int, ...], ...]:
    """A text, tokens, or a list of either."""
    words = served.words
    if isinstance(given, str) or (isinstance(given, list) and given and all(_is_whole(one) for one in given)):
        given = [given]
    if not isinstance(given, list) or not 1 <= len(given) <= MOST_PROMPTS:
        raise InputError(f"prompt is a text, a list of tokens, or a list of 1 to {MOST_PROMPTS} of them", "$.prompt")
    made = []
    for number, one in enumerate(given):
        if isinstance(one, str):
            words.check(one, served.max_model_len)
            ids = words.prompt(one)
        elif isinstance(one, list) and all(_is_whole(token) for token in one):
            ids = one
            if bad := [token for token in ids if not 0 <= token < words.vocab_size]:
                raise InputError(f"token {bad[0]} is not one of 0 to {words.vocab_size - 1}", f"$.prompt[{number}]")
        else:
            raise InputError("a prompt is a text or a list of tokens", f"$.prompt[{number}]")
        if not ids:
            raise InputError("a prompt has at least one token", f"$.prompt[{number}]")
        made.append(tuple(ids))
    return tuple(made)


ROLES = ("system", "developer", "user", "assistant", "tool")


def _messages(given: object) -> list[Body]:
    """With texts in place of lists of their parts."""
    if not isinstance(given, list) or not given:
        raise InputError("messages is a list of at least one message", "$.messages")
    made: list[Body] = []
    for number, one in enumerate(given):
        where = f"$.messages[{number}]"
        if not isinstance(one, dict) or one.get("role") not in ROLES:
            raise InputError(f"a message is an object with a role ({', '.join(ROLES)}) and content", where)
        message = {key: value for key, value in one.items() if value is not None}
        content = message.get("content", "")
        if isinstance(content, list):
            if not all(
                isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content
            ):
                raise InputError("content has parts of type text only: no model here reads images or sound", where)
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str):
            raise InputError("content is a text, or a list of parts of type text", where)
        message["content"] = content
        if "tool_calls" in message:
            calls = message["tool_calls"]
            if not isinstance(calls, list):
                raise InputError("tool_calls is a list", where)
            message["tool_calls"] = [_call_given(call, where) for call in calls]
        made.append(message)
    return made


def _call_given(call: object, where: str) -> Body:
    """A call of an earlier answer, whose arguments templates want as an object."""
    try:
        function = call["function"]  # type: ignore[index]
        arguments = function["arguments"]
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not (isinstance(parsed, dict) and isinstance(function["name"], str)):
            raise ValueError
        return {**call, "function": {**function, "arguments": parsed}}  # type: ignore[dict-item]
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise InputError("tool_calls have a function with a name and arguments, an object in JSON", where) from error


ANY_TOOL = "\0any"


def _tools(fields: Body) -> Sequence[Body]:
    tools = fields.get("tools") or []
    if not isinstance(tools, list) or len(tools) > MOST_TOOLS:
        raise InputError(f"tools is a list of at most {MOST_TOOLS}", "$.tools")
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InputError("a tool is {type: function, function: {name, parameters}}", f"$.tools[{number}]")
    return tools


def _forced(choice: object, tools: Sequence[Body]) -> str:
    if choice in ("auto", "none"):
        return ""
    if choice == "required" and tools:
        return ANY_TOOL
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if isinstance(name, str) and any(tool["function"]["name"] == name for tool in tools):
        return name
    raise InputError("tool_choice is none, auto, required, or {type: function, function: {name}} of a tool that is "
                     "given", "$.tool_choice")  # fmt: skip


def _call_schema(tools: Sequence[Body], forced: str) -> str:
    """JSON of a call: of one tool, or of any."""
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
        if forced in (ANY_TOOL, tool["function"]["name"])
    ]
    return "schema:" + json.dumps(options[0] if len(options) == 1 else {"anyOf": options})


def _grammar(fields: Body) -> str:
    form, regex = fields.get("response_format"), fields.get("guided_regex")
    if regex is not None:
        if not isinstance(regex, str) or form:
            raise InputError("guided_regex is a text, without response_format beside it", "$.guided_regex")
        return f"regex:{regex}"
    if form is None:
        return ""
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return ""
    if kind == "json_object":
        return "json"
    if kind == "json_schema" and isinstance(form.get("json_schema"), dict):
        schema = form["json_schema"].get("schema")
        if isinstance(schema, dict):
            return "schema:" + json.dumps(schema)
    raise InputError("response_format is {type: text}, {type: json_object} or {type: json_schema, json_schema: "
                     "{schema}}", "$.response_format")  # fmt: skip


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(fields: Body, name: str, default: int, low: int, high: int) -> int:
    value = fields.get(name)
    if value is None:
        return default
    if not _is_whole(value) or not low <= value <= high:
        raise InputError(f"{name} is a whole number from {low} to {high}, not {str(value)[:40]}", f"$.{name}")
    return int(value)


def _number(fields: Body, name: str, default: float) -> float:
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{name} is a number, not {str(value)[:40]!r}", f"$.{name}")
    return _finite(value, name)


def _finite(value: float, name: str) -> float:
    """JSON's whole numbers may be longer than a float holds."""
    try:
        return float(value)
    except OverflowError:
        raise InputError(f"{name} has a number of {len(str(value))} digits", f"$.{name}") from None


def _flag(fields: Body, name: str) -> bool:
    value = fields.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise InputError(f"{name} is true or false, not {str(value)[:40]!r}", f"$.{name}")
    return value


# --- answers


def new_id(chat: bool) -> str:
    """Of an answer."""
    return ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex


@dataclass(slots=True)
class Counted:
    """Tokens of a body's prompts and answers."""

    prompt: int
    answer: int = 0

    def usage(self) -> dict[str, int]:
        """In OpenAI's words."""
        both = self.prompt + self.answer
        return {"prompt_tokens": self.prompt, "completion_tokens": self.answer, "total_tokens": both}


class Answers:
    """A body's answers as they come: `add` and `whole`, or `chunks` of a stream."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted, self.model, self.id = wanted, wanted.model, new_id(wanted.chat)
        self.created = int(time.time())
        total = wanted.count * len(wanted.prompts)
        self.texts, self.reasons = [""] * total, [None] * total
        self.tokens: list[list[Token]] = [[] for _ in range(total)]
        self.letters = [0] * total
        self.begun = [False] * total
        self.counted = Counted(sum(map(len, wanted.prompts)))

    @property
    def is_done(self) -> bool:
        """Whether all have ended."""
        return all(reason is not None for reason in self.reasons)

    def add(self, at: int, told: Told) -> None:
        """What a worker told of answer `at`."""
        self.texts[at] += told.text
        self.tokens[at] += told.tokens
        self.counted.answer += len(told.tokens)
        if told.reason is not None:
            self.reasons[at] = told.reason  # type: ignore[call-overload]

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = []
        for at, text in enumerate(self.texts):
            if not self.wanted.chat:
                echo = self._echo(at)
                choices.append({
                    "index": at, "text": echo + text, "finish_reason": self.reasons[at],
                    "logprobs": self._logprobs(at, self.tokens[at], len(echo)),
                })  # fmt: skip
                continue
            message, reason = self._message(text), self.reasons[at]
            choices.append({
                "index": at, "message": message, "logprobs": self._chat_logprobs(self.tokens[at]),
                "finish_reason": "tool_calls" if message.get("tool_calls") and reason == "stop" else reason,
            })  # fmt: skip
        return {**self._head(stream=False), "choices": choices, "usage": self.counted.usage()}

    def chunks(self, at: int, told: Told) -> list[dict[str, Any]]:
        """What a stream says of it. Answers that may be calls are told at their end."""
        wanted, made = self.wanted, []
        self.add(at, told)
        if not wanted.chat:
            text = (self._echo(at) if not self.begun[at] else "") + told.text
            begun = self.letters[at]
            self.letters[at] += len(text)
            choice: dict[str, Any] = {"index": at, "text": text, "finish_reason": told.reason}
            choice["logprobs"] = self._logprobs(at, told.tokens, begun)
            self.begun[at] = True
            return [self._chunk(choice)]
        if not self.begun[at]:
            self.begun[at] = True
            made.append(
                self._chunk({"index": at, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})
            )
        if wanted.calls:
            if told.reason is not None:
                message, reason = self._message(self.texts[at]), told.reason
                delta = {key: value for key, value in message.items() if key != "role" and value is not None}
                if calls := delta.get("tool_calls"):
                    delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
                    reason = "tool_calls" if reason == "stop" else reason
                made.append(self._chunk({"index": at, "delta": delta, "finish_reason": None}))
                made.append(self._chunk({"index": at, "delta": {}, "finish_reason": reason}))
            return made
        if told.text or told.tokens:
            choice = {"index": at, "delta": {"content": told.text}, "finish_reason": None}
            choice["logprobs"] = self._chat_logprobs(told.tokens)
            made.append(self._chunk(choice))
        if told.reason is not None:
            made.append(self._chunk({"index": at, "delta": {}, "finish_reason": told.reason}))
        return made

    def last_chunk(self) -> dict[str, Any]:
        """With the counts of tokens."""
        return {**self._head(stream=True), "choices": [], "usage": self.counted.usage()}

    def _head(self, *, stream: bool) -> dict[str, Any]:
        kind = ("chat.completion" + ".chunk" * stream) if self.wanted.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(stream=True), "choices": [choice]}

    def _echo(self, at: int) -> str:
        return self.wanted.echoes[at // self.wanted.count] if self.wanted.echoes else ""

    def _message(self, text: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self.wanted.calls:
            content, calls = calls_in(text)
            if calls:
                message["content"] = content or None
                message["tool_calls"] = calls
        return message

    def _logprobs(self, at: int, tokens: Sequence[Token], begin: int) -> dict[str, Any] | None:
        if self.wanted.sampling.logprobs < 0:
            return None
        offsets = []
        for token in tokens:
            offsets.append(begin)
            begin += len(token.text)
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [dict(token.top) for token in tokens] if self.wanted.sampling.logprobs else None,
            "text_offset": offsets,
        }

    def _chat_logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self.wanted.sampling.logprobs < 0:
            return None
        return {"content": [{**_told(t.text, t.logprob), "top_logprobs": [_told(*p) for p in t.top]} for t in tokens]}


def _told(text: str, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"


def calls_in(text: str) -> tuple[str, list[dict[str, Any]]]:
    """(text beside them, calls of tools in an answer): objects with a name and arguments, alone or each within
    `<tool_call>` as Qwen's and Hermes' templates have it; Llama 3 says parameters."""
    whole = _call(text)
    if whole is not None:
        return "", [whole]
    before, *parts = text.split(OPEN_CALL)
    calls = []
    for part in parts:
        call = _call(part.partition(CLOSE_CALL)[0])
        if call is None:
            return text, []
        calls.append(call)
    return (before.strip(), calls) if calls else (text, [])


def _call(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
        arguments = value.get("arguments", value.get("parameters"))
        if isinstance(value.get("name"), str) and isinstance(arguments, dict):
            function = {"name": value["name"], "arguments": json.dumps(arguments)}
            return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
    except (ValueError, AttributeError):
        pass
    return None
