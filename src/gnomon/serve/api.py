"""OpenAI's API as values: bodies of requests to asks, tokens to answers.

`completion(body, …)` and `chat(body, …)` read a body strictly: a field that is not known or not supported is an error
that names it, so that nothing that somebody asked for is left out in silence. Fields of vLLM beside OpenAI's: top_k,
min_p, repetition_penalty, min_tokens, stop_token_ids, ignore_eos, include_stop_str_in_output, guided_regex,
prompt_logprobs. Nothing in a body is a path, a template or code. What vLLM documents beside these is refused by name.
Leaves out HTTP (`server`).
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gnomon.errors import InputError, nearest
from gnomon.serve.calls import ANY_TOOL, CLOSE_CALL, SEVERAL_TOOLS, Calls, calls_in, forced_by, schema_of, tools_of
from gnomon.serve.messages import Delta, Token
from gnomon.serve.sampling import Sampling, biases
from gnomon.serve.vocabulary import Vocabulary

Body = Mapping[str, Any]
MOST_ANSWERS, MOST_PROMPTS, MOST_STOPS, MOST_BANNED = 128, 256, 16, 256
STRUCTURES = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice")
"""Fields that say what an answer's text is."""
MOST_CHOICES = 1000
"""Texts that an answer may be one of: llguidance holds 2,000 beginnings apart, and takes minutes to find that out."""
STREAM_OPTIONS = frozenset("include_usage include_obfuscation continuous_usage_stats".split())
LONGEST_STOP = 256
"""Letters: each token's text is looked at for every beginning of a stop string."""
DEFAULT_COMPLETION = 16
"""Tokens of a completion whose body does not say, as OpenAI's."""

LABELS = frozenset("user metadata safety_identifier prompt_cache_key store service_tier".split())
"""Fields that change nothing in an answer."""
USUAL: Mapping[str, object] = {
    "use_beam_search": False, "length_penalty": 1.0, "spaces_between_special_tokens": True, "priority": 0,
    "watermarking": False, "include_reasoning": True, "return_token_offsets": False, "modalities": ["text"],
    "continue_final_message": False, "functions": [], "bad_words": [], "return_mm_kwargs": True,
    "routed_experts_prompt_start": 0, "store": False,
}  # fmt: skip
"""Fields that clients write out though nothing is asked for: these values are taken, and no other."""
COMMON = frozenset(
    "model stream stream_options n max_tokens temperature top_p top_k min_p presence_penalty frequency_penalty "
    "repetition_penalty logit_bias allowed_token_ids bad_words seed stop stop_token_ids ignore_eos min_tokens "
    "include_stop_str_in_output skip_special_tokens add_special_tokens truncate_prompt_tokens truncation_side "
    "response_format structured_outputs guided_json guided_regex guided_choice logprobs cache_salt request_id "
    "return_token_ids return_tokens_as_token_ids prompt_logprobs".split()
)
COMPLETION = COMMON | LABELS | frozenset("prompt echo best_of suffix".split())
CHAT = COMMON | LABELS | frozenset(
    "messages max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls add_generation_prompt "
    "chat_template_kwargs documents reasoning_effort".split()
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """What a body of /v1/completions or /v1/chat/completions asks for."""

    model: str
    """One of the names that are served."""
    prompts: tuple[tuple[int, ...], ...]
    """Tokens of each prompt."""
    sampling: Sampling
    """How tokens are chosen."""
    logprobs: int
    """Likeliest tokens that are told beside each; -1: no log-probabilities are told."""
    count: int
    """Answers to each prompt."""
    best: int
    """Of these, that are told: those with the largest mean log-probability of a token."""
    streams: bool
    """Whether tokens are told as they come; otherwise at the end."""
    usage: bool
    """Whether a stream ends with the counts of tokens."""
    usage_each: bool
    """Whether each of its chunks has those of its own answer so far, too."""
    stops: tuple[str, ...]
    """Strings that end an answer."""
    keep_stop: bool
    """Whether the string that ended it is told."""
    specials: bool
    """Whether special tokens have text."""
    salt: str
    """Of those whose keys may be shared."""
    id: str
    """That the answer bears; empty for any."""
    tells_ids: bool
    """Whether ids of tokens are told beside text."""
    as_ids: bool
    """Whether log-probabilities name tokens by their ids."""
    grammar: str
    """What an answer's text must be; empty: anything."""
    echoes: tuple[str, ...]
    """Text that is told before each prompt's answers; () for none."""
    prompt_logprobs: int
    """Likeliest tokens that `prompt_logprobs` has of each token of a prompt; -1: the answer has no such field."""
    silent: bool
    """Whether only prompts are told: a token is computed after each, and left out."""
    chat: bool
    """Whether the answer is a chat's message; otherwise text alone."""
    calls: bool
    """Whether the answer may be calls of tools."""
    several: bool
    """Whether it may be more than one."""
    forced: str
    """Name of the tool that it is a call of; empty for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What a body is read against."""

    names: tuple[str, ...]
    """The model's, and its adapters'."""
    words: Vocabulary
    """Its tokenizer."""
    max_model_len: int
    """Tokens of prompt and answer, at most."""
    vocab_size: int
    """Of the model."""


def completion(body: object, served: ServedModel) -> CompletionRequest:
    """Reads a body of /v1/completions."""
    fields = fields_of(body, COMPLETION, served)
    if fields.get("suffix"):
        raise InputError("suffix is not supported: no model here fills in the middle", "$.suffix")
    echo = _flag(fields, "echo")
    most = _whole(fields, "max_tokens", DEFAULT_COMPLETION, 0 if echo else 1, served.max_model_len)
    silent, most = most == 0, max(1, most)
    prompts = tuple(_cut(fields, one, served.max_model_len - most) for one in _prompts(fields, served))
    count = _whole(fields, "n", 1, 1, MOST_ANSWERS)
    tried = _whole(fields, "best_of", count, count, MOST_ANSWERS)
    if tried > count and _flag(fields, "stream"):
        raise InputError("best_of is chosen when all answers are there: leave stream out, or best_of", "$.best_of")
    logprobs = _whole(fields, "logprobs", -1, 0, 20)
    echoes = tuple(served.words.decode(prompt) for prompt in prompts) if echo else ()
    if echoes and logprobs >= 0 and count > 1 and _flag(fields, "stream"):
        raise InputError(
            "a stream begins with a prompt's log-probabilities for one answer alone: set n to 1, or leave out stream, "
            "echo or logprobs",
            "$.echo",
        )
    own = _Own(
        prompts=prompts, most=most, logprobs=logprobs, tried=tried, echoes=echoes, chat=False, calls=False,
        several=True, forced="", schema="", silent=silent,
    )  # fmt: skip
    return _completion_of(fields, served, own)


def chat(body: object, served: ServedModel) -> CompletionRequest:
    """Reads a body of /v1/chat/completions."""
    fields = fields_of(body, CHAT, served)
    tools = tools_of(fields)
    choice = fields.get("tool_choice") or ("auto" if tools else "none")
    parallel = None if fields.get("parallel_tool_calls") is None else _flag(fields, "parallel_tool_calls")
    forced = forced_by(choice, tools, parallel)
    text = served.words.render(
        _messages(fields.get("messages")), tools if choice != "none" else (),
        opens=fields.get("add_generation_prompt") is None or _flag(fields, "add_generation_prompt"),
        variables=_variables(fields),
    )  # fmt: skip
    served.words.check(text, served.max_model_len)
    own_specials = _flag(fields, "add_special_tokens")
    prompt = served.words.prompt(text) if own_specials else served.words.conversation(text)
    prompt = list(_cut(fields, tuple(prompt), served.max_model_len - 1))
    if not prompt:
        raise InputError("the conversation has no token; say something", "$.messages")
    _check_ids(prompt, served, "$.messages")
    room = served.max_model_len - len(prompt)
    if room < 1:
        raise InputError(
            f"the conversation has {len(prompt)} tokens, and the model is served with at most "
            f"{served.max_model_len} of prompt and answer; shorten it",
            "$.messages",
        )
    name = "max_completion_tokens" if fields.get("max_completion_tokens") is not None else "max_tokens"
    most = _whole(fields, name, room, 1, served.max_model_len)
    if fields.get("max_tokens") not in (None, fields.get(name)):
        both = f"max_tokens {fields['max_tokens']} and max_completion_tokens {most}"
        raise InputError(f"{both} both say how long an answer may be; give the second alone", "$.max_tokens")
    logprobs = -1
    if _flag(fields, "logprobs"):
        logprobs = _whole(fields, "top_logprobs", 0, 0, 20)
    elif fields.get("top_logprobs") is not None:
        raise InputError("top_logprobs is told beside logprobs: set logprobs to true", "$.top_logprobs")
    schema = schema_of(tools, forced) if forced else ""
    own = _Own(
        prompts=(tuple(prompt),), most=most, logprobs=logprobs, tried=0, echoes=(), chat=True,
        calls=choice != "none" and bool(tools), several=parallel is not False,
        forced="" if forced in (ANY_TOOL, SEVERAL_TOOLS) else forced, schema=schema, silent=False,
    )  # fmt: skip
    return _completion_of(fields, served, own)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Own:
    """What completions and conversations say in ways of their own, as `CompletionRequest` has it."""

    prompts: tuple[tuple[int, ...], ...]
    most: int
    """Tokens of an answer."""
    logprobs: int
    """As `CompletionRequest` has it."""
    tried: int
    """Answers of which the best are told; 0: as many as are."""
    echoes: tuple[str, ...]
    chat: bool
    calls: bool
    several: bool
    forced: str
    schema: str
    """That a forced call's answer is of; empty for none."""
    silent: bool


def _completion_of(fields: Body, served: ServedModel, own: _Own) -> CompletionRequest:
    """Reads the fields that both kinds of body have. InputError for what cannot be."""
    grammar = own.schema or grammar_of(fields)
    stop = fields.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops) or len(stops) > MOST_STOPS:
        raise InputError(f"stop is a string, or a list of at most {MOST_STOPS} that are not empty", "$.stop")
    if (length := max(map(len, stops), default=0)) > LONGEST_STOP:
        raise InputError(f"a stop string has at most {LONGEST_STOP} letters, not {length}", "$.stop")
    ids = _tokens(fields, "stop_token_ids", served)
    allowed, banned = _tokens(fields, "allowed_token_ids", served), _banned(fields, served)
    if grammar and (allowed or banned):
        name = "allowed_token_ids" if allowed else "bad_words"
        raise InputError(f"{name} beside a grammar may leave no token that follows; give one of both", f"$.{name}")
    ends = () if _flag(fields, "ignore_eos") else (one for one in served.words.ends if one < served.vocab_size)
    bias = fields.get("logit_bias") or {}
    if not isinstance(bias, dict) or any(isinstance(v, bool) or not isinstance(v, int | float) for v in bias.values()):
        raise InputError("logit_bias is an object of numbers by token", "$.logit_bias")
    count = _whole(fields, "n", 1, 1, MOST_ANSWERS)
    longest = min(served.max_model_len - len(prompt) for prompt in own.prompts)
    if own.most > longest:
        raise InputError(
            f"a prompt of {served.max_model_len - longest} tokens with {own.most} of answer is more than the "
            f"{served.max_model_len} that the model is served with; shorten the prompt or lower max_tokens"
        )
    scored = _whole(fields, "prompt_logprobs", -1, 0, 20)
    if scored >= 0 and _flag(fields, "stream"):
        raise InputError("prompt_logprobs are told with a whole answer: leave out stream", "$.prompt_logprobs")
    sampling = Sampling(
        max_tokens=own.most,
        temperature=_number(fields, "temperature", 1.0),
        top_p=_number(fields, "top_p", 1.0),
        # As in vLLM, -1 and 0 both stand for all tokens.
        top_k=max(0, _whole(fields, "top_k", 0, -1, 1 << 31)),
        min_p=_number(fields, "min_p", 0.0),
        presence_penalty=_number(fields, "presence_penalty", 0.0),
        frequency_penalty=_number(fields, "frequency_penalty", 0.0),
        repetition_penalty=_number(fields, "repetition_penalty", 1.0),
        logit_bias=biases({str(k): _finite(v, "logit_bias") for k, v in bias.items()}, served.vocab_size),
        seed=None if fields.get("seed") is None else _whole(fields, "seed", 0, -(1 << 63), (1 << 63) - 1),
        allowed=tuple(dict.fromkeys(allowed)),
        banned=banned,
        # The best answers are those of the largest mean log-probability, so each token's own is computed though none is
        # told.
        logprobs=max(own.logprobs, 0) if own.tried > count else own.logprobs,
        # An echoed prompt has log-probabilities where its answer has them.
        prompt_logprobs=max(scored, own.logprobs if own.echoes else -1),
        stop_ids=frozenset((*ends, *ids)),
        min_tokens=_whole(fields, "min_tokens", 0, 0, own.most),
    )
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict) or options.keys() - STREAM_OPTIONS:
        raise InputError(
            "stream_options has include_usage and continuous_usage_stats and nothing else", "$.stream_options"
        )
    if _flag(options, "continuous_usage_stats") and not _flag(options, "include_usage"):
        raise InputError("continuous_usage_stats goes with include_usage: set both to true", "$.stream_options")
    if fields.get("stream_options") is not None and not fields.get("stream"):
        raise InputError("stream_options are of streams: set stream to true, or leave them out", "$.stream_options")
    return CompletionRequest(
        model=str(fields.get("model") or served.names[0]),
        prompts=own.prompts,
        sampling=sampling,
        logprobs=own.logprobs,
        count=max(own.tried, count),
        best=count,
        streams=_flag(fields, "stream"),
        usage=_flag(options, "include_usage"),
        usage_each=_flag(options, "continuous_usage_stats"),
        # of calls that may not be several the first ends the answer
        stops=(*stops, *(() if own.several or not own.calls else (CLOSE_CALL,))),
        keep_stop=_flag(fields, "include_stop_str_in_output"),
        specials=fields.get("skip_special_tokens") is not None and not _flag(fields, "skip_special_tokens"),
        salt=_text(fields, "cache_salt", 1024),
        id=_text(fields, "request_id", 128),
        tells_ids=_flag(fields, "return_token_ids"),
        as_ids=_flag(fields, "return_tokens_as_token_ids"),
        grammar=grammar,
        echoes=own.echoes,
        prompt_logprobs=scored,
        silent=own.silent,
        chat=own.chat,
        calls=own.calls,
        several=own.several,
        forced=own.forced,
    )


def fields_of(body: object, known: frozenset[str], served: ServedModel) -> Body:
    """An object of known fields, for a model that is served. InputError for another."""
    if not isinstance(body, dict):
        raise InputError("the body is a JSON object")
    for name, value in body.items():
        # The types are compared too: in Python False equals 0, and True equals 1.0.
        if name in USUAL and value == USUAL[name] and type(value) is type(USUAL[name]):
            continue
        if name not in known and value is not None:
            raise InputError(f"{name[:80]} is not supported{nearest(name[:80], known)}", f"$.{name[:80]}")
    model = body.get("model")
    if model is not None and model not in served.names:
        there = ", ".join(map(repr, served.names))
        raise ModelError(f"there is no model {str(model)[:200]!r}; this server has {there}", "$.model")
    return body


class ModelError(InputError):
    """A model that is not served."""


def _prompts(fields: Body, served: ServedModel) -> tuple[tuple[int, ...], ...]:
    """A text, tokens, or a list of either."""
    words, prompt = served.words, fields.get("prompt")
    specials = fields.get("add_special_tokens") is None or _flag(fields, "add_special_tokens")
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(_is_whole(one) for one in prompt)):
        prompt = [prompt]
    if not isinstance(prompt, list) or not 1 <= len(prompt) <= MOST_PROMPTS:
        raise InputError(f"prompt is a text, a list of tokens, or a list of 1 to {MOST_PROMPTS} of them", "$.prompt")
    prompts = []
    for number, one in enumerate(prompt):
        if isinstance(one, str):
            words.check(one, served.max_model_len)
            ids = words.prompt(one) if specials else words.conversation(one)
        elif isinstance(one, list) and all(_is_whole(token) for token in one):
            ids = one
        else:
            raise InputError("a prompt is a text or a list of tokens", f"$.prompt[{number}]")
        if not ids:
            raise InputError("a prompt has at least one token", f"$.prompt[{number}]")
        _check_ids(ids, served, f"$.prompt[{number}]")
        prompts.append(tuple(ids))
    return tuple(prompts)


def _check_ids(ids: Sequence[int], served: ServedModel, where: str) -> None:
    """InputError for a token that the model has not, though its tokenizer may."""
    # The smallest and the largest say it for all of them.
    if bad := [token for token in (min(ids), max(ids)) if not 0 <= token < served.vocab_size]:
        raise InputError(f"token {bad[0]} is not one of the model's, 0 to {served.vocab_size - 1}", where)


ROLES = ("system", "developer", "user", "assistant", "tool")


def _messages(items: object) -> list[Body]:
    """Reads messages, with texts in place of lists of their parts."""
    if not isinstance(items, list) or not items:
        raise InputError("messages is a list of at least one message", "$.messages")
    messages: list[Body] = []
    for number, one in enumerate(items):
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
        messages.append(message)
    return messages


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


def _cut(fields: Body, prompt: tuple[int, ...], most: int) -> tuple[int, ...]:
    """What `truncate_prompt_tokens` leaves of a prompt: its end, or its beginning. most: what -1 means."""
    count = _whole(fields, "truncate_prompt_tokens", 0, -1, 1 << 31)
    side = fields.get("truncation_side")
    if side not in (None, "left", "right") or (side and not count):
        raise InputError("truncation_side is left or right, beside truncate_prompt_tokens", "$.truncation_side")
    count = max(1, most) if count == -1 else count
    if not count:
        return prompt
    return prompt[:count] if side == "right" else prompt[-count:]


def _variables(fields: Body) -> dict[str, Any]:
    """Variables of the chat template that a body sets."""
    template_options = fields.get("chat_template_kwargs") or {}
    if not isinstance(template_options, dict):
        raise InputError("chat_template_kwargs is an object", "$.chat_template_kwargs")
    variables = dict(template_options)
    for name in ("documents", "reasoning_effort"):
        if fields.get(name) is not None:
            variables[name] = fields[name]
    return variables


def _tokens(fields: Body, name: str, served: ServedModel) -> list[int]:
    ids = fields.get(name) or []
    if not isinstance(ids, list) or not all(_is_whole(one) and 0 <= one < served.vocab_size for one in ids):
        raise InputError(f"{name} is a list of tokens, 0 to {served.vocab_size - 1}", f"$.{name}")
    return ids


def _banned(fields: Body, served: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Tokens of `bad_words`, at the beginning of a text and after a space. A word with a token that the model has not
    is in no answer."""
    bad_words = fields.get("bad_words") or []
    fits = isinstance(bad_words, list) and len(bad_words) <= MOST_BANNED
    if not fits or not all(isinstance(one, str) and one.strip() and len(one) <= LONGEST_STOP for one in bad_words):
        raise InputError(
            f"bad_words is a list of at most {MOST_BANNED} words of at most {LONGEST_STOP} letters", "$.bad_words"
        )
    conversation = served.words.conversation
    rows = (tuple(conversation(before + one.lstrip())) for one in bad_words for before in ("", " "))
    return tuple(dict.fromkeys(row for row in rows if row and max(row) < served.vocab_size))


def _text(fields: Body, name: str, most: int) -> str:
    value = fields.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or not 0 < len(value) <= most:
        raise InputError(f"{name} is a text of 1 to {most} letters", f"$.{name}")
    return value


def grammar_of(fields: Body) -> str:
    """What an answer's text is held to, as `grammar` reads it; empty for nothing. InputError for two of them."""
    chosen_structures = [name for name in STRUCTURES if fields.get(name)]
    if len(chosen_structures) > 1:
        raise InputError(
            f"{chosen_structures[1]} and {chosen_structures[0]} both say what an answer is; give one of them",
            f"$.{chosen_structures[1]}",
        )
    if not chosen_structures:
        return ""
    [name] = chosen_structures
    value = fields[name]
    if name == "response_format":
        return _response_format(value)
    if name != "structured_outputs":
        return _structure(name.removeprefix("guided_"), value, name)
    known = {"json", "regex", "choice", "json_object"}
    entries = {key: one for key, one in value.items() if one not in (None, False)} if isinstance(value, dict) else {}
    if len(entries) != 1 or entries.keys() - known:
        raise InputError(f"structured_outputs has one of {', '.join(sorted(known))}, and nothing else", f"$.{name}")
    [(kind, one)] = entries.items()
    return _structure(kind, one, f"structured_outputs.{kind}")


def _structure(kind: str, value: object, name: str) -> str:
    if kind == "json_object" and value is True:
        return "json"
    if kind == "regex" and isinstance(value, str):
        return f"regex:{value}"
    if kind == "json" and isinstance(value, dict | str):
        return "schema:" + (value if isinstance(value, str) else json.dumps(value))
    if kind == "choice" and isinstance(value, list) and len(value) > MOST_CHOICES:
        raise InputError(f"{name} has {len(value)} texts, and at most {MOST_CHOICES} are held apart", f"$.{name}")
    if kind == "choice" and isinstance(value, list) and all(isinstance(one, str) and one for one in value):
        return "choice:" + json.dumps(value)
    expected = {"json_object": "true", "regex": "a text", "json": "a JSON schema", "choice": "a list of texts"}[kind]
    raise InputError(f"{name} is {expected}", f"$.{name}")


def _response_format(form: object) -> str:
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return ""
    if kind == "json_object":
        return "json"
    if kind == "json_schema" and isinstance(form, dict) and isinstance(form.get("json_schema"), dict):
        schema = form["json_schema"].get("schema")
        if isinstance(schema, dict):
            return "schema:" + json.dumps(schema)
    raise InputError("response_format is {type: text}, {type: json_object} or {type: json_schema, json_schema: "
                     "{schema}}", "$.response_format")  # fmt: skip


def _is_whole(value: object) -> bool:
    # bool is a subclass of int: `"n": true` must not be read as 1.
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


def new_id(asked_completion: CompletionRequest) -> str:
    """Makes the id of an answer."""
    return ("chatcmpl-" if asked_completion.chat else "cmpl-") + (asked_completion.id or uuid.uuid4().hex)


@dataclass(slots=True)
class TokenCounts:
    """Tokens of a body's prompts and answers."""

    prompt: int
    """Tokens of the prompts."""
    answer: int = 0
    """Tokens of the answers."""

    def usage(self) -> dict[str, int]:
        """Counts tokens in OpenAI's words."""
        both = self.prompt + self.answer
        return {"prompt_tokens": self.prompt, "completion_tokens": self.answer, "total_tokens": both}


class Answers:
    """A body's answers as they come: `add` and `whole`, or `chunks` of a stream."""

    def __init__(self, request: CompletionRequest, words: Vocabulary) -> None:
        self.words = words
        self.request, self.model, self.id = request, request.model, new_id(request)
        self.created = int(time.time())
        total = request.count * len(request.prompts)
        self.texts, self.reasons = [""] * total, [None] * total
        self.tokens: list[list[Token]] = [[] for _ in range(total)]
        self.letters = [0] * total
        self.begun = [False] * total
        self.calls = [Calls(several=request.several) for _ in range(total)]
        self.unsaid: list[list[Token]] = [[] for _ in range(total)]
        """Tokens of a stream whose text is held back, as a call may begin in it."""
        self.prompts: list[Sequence[Token]] = [() for _ in request.prompts]
        """Tokens of each prompt with their log-probabilities, where these were asked for and are there."""
        self.counted = TokenCounts(sum(map(len, request.prompts)))

    @property
    def is_done(self) -> bool:
        """Whether all have ended."""
        return all(reason is not None for reason in self.reasons)

    def add(self, at: int, delta: Delta) -> None:
        """What a worker told of answer `at`."""
        if delta.prompt:
            self.prompts[at // self.request.count] = delta.prompt
        if self.request.silent:
            if delta.reason is not None:
                self.reasons[at] = "length"  # type: ignore[call-overload]
            return
        self.texts[at] += delta.text
        self.tokens[at] += delta.tokens
        self.counted.answer += len(delta.tokens)
        # Last: `is_done` is what ends a stream, and text and tokens of this message are to be told with it.
        if delta.reason is not None:
            self.reasons[at] = delta.reason  # type: ignore[call-overload]

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices: list[dict[str, Any]] = []
        for index, at in enumerate(self._best()):
            text, ids = self.texts[at], self._ids(at, self.tokens[at], begins=True)
            if not self.request.chat:
                echo = self._echo(at)
                choices.append({
                    **ids, "index": index, "text": echo + text, "finish_reason": self.reasons[at],
                    "logprobs": self._logprobs(at, self.tokens[at], len(echo), begins=True),
                    **self._prompt_logprobs(at),
                })  # fmt: skip
                continue
            message, reason = self._message(text), self.reasons[at]
            choices.append({
                **ids, "index": index, "message": message, "logprobs": self._chat_logprobs(self.tokens[at]),
                "finish_reason": "tool_calls" if message.get("tool_calls") and reason == "stop" else reason,
            })  # fmt: skip
        of_prompt = self._prompt_logprobs(0) if self.request.chat else {}
        return {**self._head(stream=False), "choices": choices, "usage": self.counted.usage(), **of_prompt}

    def chunks(self, at: int, delta: Delta) -> list[dict[str, Any]]:
        """What a stream says of it."""
        request, chunks_ = self.request, []
        self.add(at, delta)
        if not request.chat:
            first, tokens, text = not self.begun[at], delta.tokens, delta.text
            if request.silent:
                tokens, text = (), ""
            if first:
                text = self._echo(at) + text
                self.letters[at] = len(self._echo(at))
            choice: dict[str, Any] = {"index": at, "text": text, "finish_reason": self.reasons[at]}
            choice["logprobs"] = self._logprobs(at, tokens, self.letters[at], begins=first)
            # by tokens, not by text, which may come later than they: as in an answer that is told whole
            self.letters[at] += sum(len(token.text) for token in tokens)
            choice |= self._ids(at, tokens, begins=first)
            self.begun[at] = True
            return [self._chunk(choice)]
        if first := not self.begun[at]:
            self.begun[at] = True
            chunks_.append(
                self._chunk({"index": at, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})
            )
        if request.calls:
            return chunks_ + self._calls_chunks(at, delta, first=first)
        if delta.text or delta.tokens:
            choice = {"index": at, "delta": {"content": delta.text}, "finish_reason": None}
            choice["logprobs"] = self._chat_logprobs(delta.tokens)
            choice |= self._ids(at, delta.tokens, begins=first)
            chunks_.append(self._chunk(choice))
        if delta.reason is not None:
            chunks_.append(self._chunk({"index": at, "delta": {}, "finish_reason": delta.reason}))
        return chunks_

    def _calls_chunks(self, at: int, delta_of_call: Delta, *, first: bool) -> list[dict[str, Any]]:
        """Makes chunks of an answer that may be calls: text where no call begins, calls when they are whole."""
        calls, ends = self.calls[at], delta_of_call.reason is not None
        deltas: list[dict[str, Any]] = []
        self.unsaid[at] += delta_of_call.tokens
        number = calls.count
        for event in calls.push(delta_of_call.text, last=ends):
            delta: dict[str, Any] = {"content": event}
            if isinstance(event, dict):
                delta = {"tool_calls": [{"index": number, **event}]}
                number += 1
            choice = {"index": at, "delta": delta, "finish_reason": None}
            choice["logprobs"] = self._chat_logprobs(self.unsaid[at])
            choice |= self._ids(at, self.unsaid[at], begins=first and not deltas)
            self.unsaid[at] = []
            deltas.append(self._chunk(choice))
        if ends:
            reason = "tool_calls" if calls.count and delta_of_call.reason == "stop" else delta_of_call.reason
            choice = {"index": at, "delta": {}, "finish_reason": reason}
            if self.unsaid[at]:
                choice["logprobs"] = self._chat_logprobs(self.unsaid[at])
                choice |= self._ids(at, self.unsaid[at], begins=False)
            deltas.append(self._chunk(choice))
        return deltas

    def last_chunk(self) -> dict[str, Any]:
        """Makes the last chunk, with the counts of tokens."""
        return {**self._head(stream=True), "choices": [], "usage": self.counted.usage()}

    def _best(self) -> Sequence[int]:
        """The answers that are told, by prompt, of each the best first."""
        request = self.request
        if request.best == request.count:
            return range(len(self.texts))
        ranked: list[int] = []
        for first in range(0, len(self.texts), request.count):
            mine = range(first, first + request.count)
            ranked += sorted(mine, key=lambda at: -_mean(self.tokens[at]))[: request.best]
        return ranked

    def _ids(self, at: int, tokens: Sequence[Token], *, begins: bool) -> dict[str, Any]:
        """Ids beside text, where they are asked for."""
        if not self.request.tells_ids:
            return {}
        ids: dict[str, Any] = {"token_ids": [token.id for token in tokens]}
        return {**ids, "prompt_token_ids": list(self.request.prompts[at // self.request.count])} if begins else ids

    def _name(self, token: int, text: str) -> str:
        """Names a token as log-probabilities do."""
        return f"token_id:{token}" if self.request.as_ids else text

    def _head(self, *, stream: bool) -> dict[str, Any]:
        kind = ("chat.completion" + ".chunk" * stream) if self.request.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        body = {**self._head(stream=True), "choices": [choice]}
        if self.request.usage:
            body["usage"] = None  # the last chunk has it, and clients look for the field in all
        if self.request.usage_each:
            at = choice["index"]
            own = len(self.request.prompts[at // self.request.count])
            body["usage"] = TokenCounts(own, len(self.tokens[at])).usage()
        return body

    def _echo(self, at: int) -> str:
        return self.request.echoes[at // self.request.count] if self.request.echoes else ""

    def _message(self, text: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self.request.calls:
            content, calls = calls_in(text, several=self.request.several)
            if calls:
                message["content"] = content or None
                message["tool_calls"] = calls
        return message

    def _logprobs(self, at: int, tokens: Sequence[Token], begin: int, *, begins: bool) -> dict[str, Any] | None:
        """Log-probabilities of a completion's tokens. begin: letters before them. begins: whether echoed tokens of the
        prompt come first."""
        if self.request.logprobs < 0:
            return None
        if begins and self.request.echoes:
            tokens, begin = [*self.prompts[at // self.request.count], *tokens], 0
        offsets = []
        for token in tokens:
            offsets.append(begin)
            begin += len(token.text)
        return {
            "tokens": [self._name(token.id, token.text) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens] if self.request.logprobs else None,
            "text_offset": offsets,
        }

    def _top(self, token: Token) -> dict[str, float] | None:
        """Log-probabilities of the likeliest tokens and of the one that is there; None for the first of a prompt."""
        if token.logprob is None:
            return None
        # Tokens that are parts of letters may have the same text: of these the likeliest stands.
        likeliest = {self._name(i, text): value for i, text, value in reversed(token.top)}
        likeliest = dict(reversed(likeliest.items()))
        return likeliest | {self._name(token.id, token.text): token.logprob}

    def _prompt_logprobs(self, at: int) -> dict[str, Any]:
        """vLLM's field of that name: by id the token of the prompt and those that were likeliest in its place."""
        if self.request.prompt_logprobs < 0:
            return {}
        entries: list[dict[str, Any] | None] = []
        for token in self.prompts[at // self.request.count]:
            if token.logprob is None:
                entries.append(None)
                continue
            here = [(token.id, token.text, token.logprob, token.rank)]
            here += [(*one, rank) for rank, one in enumerate(token.top[: self.request.prompt_logprobs], 1)]
            entries.append({
                str(i): {"logprob": value, "rank": rank, "decoded_token": text} for i, text, value, rank in here
            })  # fmt: skip
        return {"prompt_logprobs": entries}

    def _chat_logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self.request.logprobs < 0:
            return None
        return {
            "content": [
                {
                    **self._token_entry(t.id, t.text, t.logprob),
                    "top_logprobs": [self._token_entry(*one) for one in t.top],
                }
                for t in tokens
            ],
            "refusal": None,
        }

    def _token_entry(self, token: int, text: str, logprob: float | None) -> dict[str, Any]:
        return {"token": self._name(token, text), "logprob": logprob, "bytes": list(self.words.raw(token, text))}


def _mean(tokens: Sequence[Token]) -> float:
    """Log-probability of a token."""
    return sum(token.logprob or 0.0 for token in tokens) / max(1, len(tokens))
