"""Requests that a server should survive: `SHAPES`, each of which is wrong or dear in one way, and `all_of`, many drawn
by a seed: malformed, oversized, cut off, slow, unread, cancelled and good ones.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD: Mapping[str, Any] = {"prompt": "x", "max_tokens": 4}
SAID: Mapping[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def _schema(schema: object) -> dict[str, Any]:
    return {**GOOD, "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}


def _deep(levels: int) -> object:
    made: object = {"type": "object"}
    for _ in range(levels):
        made = {"type": "object", "properties": {"a": made}, "required": ["a"]}
    return made


def _object(properties: object) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def _tools(parameters: object) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return {**SAID, "tools": [tool], "tool_choice": "required"}


def _said(content: object, **more: object) -> dict[str, Any]:
    return {**SAID, "messages": [{"role": "user", "content": content, **more}]}


IMAGE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
CASES = {"allOf": [{"anyOf": [_object({f"p{i}_{j}": {"const": j}}) for j in range(8)]} for i in range(8)]}
PATTERNS = _object({f"p{i}": {"type": "string", "pattern": "(a|b)*c{1,30}"} for i in range(3000)})
LONG = {"type": "array", "minItems": 10**9, "items": {"type": "string", "minLength": 10**6}}
_CHATS: tuple[tuple[str, object, str], ...] = (
    ("a template in words", _said("{{ ''.__class__.__mro__ }}"), "200"),
    ("a loop of a template in words", _said("{% for i in range(10**9) %}x{% endfor %}"), "200"),
    ("a template of its own", {**SAID, "chat_template": "{{ 7 * 7 }}"}, "400"),
    ("fields that templates could read", _said("a", __class__={"a": [1]}), "200 400"),
    ("a role that is a template", _said("a", role="{{ x }}"), "400"),
    ("a file as an image", _said([IMAGE]), "400"),
    ("calls that are a number", {**SAID, "messages": [{"role": "assistant", "tool_calls": 5}]}, "400"),
    ("a tool without a schema", _tools(7), "400"),
    ("a tool of a strange type", _tools({"type": "strange"}), "400"),
    ("a tool of a pattern that is none", _tools(_object({"a": {"type": "string", "pattern": "("}})), "400"),
    ("a tool with a schema of nothing", _tools(_object({"a": {"enum": []}})), "400 200"),
    ("a tool whose bounds cross", _tools(_object({"a": {"type": "array", "minItems": 3, "maxItems": 1}})), "400 200"),
    ("a tool whose schema is elsewhere", _tools(_object({"a": {"$ref": "#/definitions/none"}})), "400"),
    ("a tool of a list", _tools([]), "400 200"),
    ("a tool without a name", {**SAID, "tools": [{"type": "function", "function": {"name": ""}}]}, "400"),
    ("a tool named by 1 MB", {**SAID, "tools": [{"type": "function", "function": {"name": "f" * 10**6}}]}, "400"),
    ("a tool named by a zero", {**SAID, "tools": [{"type": "function", "function": {"name": "a\0b"}}]}, "400"),
    ("two tools of one name", {**SAID, "tools": _tools({})["tools"] * 2, "tool_choice": "required"}, "400"),
    ("10,000 tools", {**SAID, "tools": _tools({})["tools"] * 10_000}, "400"),
    ("a choice of a tool that is not there", {**_tools({}), "tool_choice": {"type": "function"}}, "400"),
    ("a strict tool that is none", {**SAID, "tools": [{"type": "function", "function": 5}]}, "400"),
    (
        "a call whose arguments are no JSON",
        {
            **SAID,
            "messages": [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}],
                }
            ],
        },
        "400 200",
    ),
    ("10,000 messages", {**SAID, "messages": SAID["messages"] * 10_000}, "400"),
    ("half a letter in a name", b'{"messages": [{"role": "user", "content": "a", "name": "\\udfff"}]}', "400"),
    ("a whole pair", b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00"}], "max_tokens": 1}', "200"),
)
_COMPLETIONS: tuple[tuple[str, object, str], ...] = (
    ("a model that is a path", {**GOOD, "model": "../../etc/passwd"}, "404"),
    ("a model that is a list", {**GOOD, "model": ["a"]}, "404"),
    ("a schema 400 deep", _schema(_deep(400)), "400"),
    ("a schema of 10^15 letters", _schema(LONG), "200 400"),
    ("a schema that is itself", _schema({"$ref": "#"}), "400"),
    ("a schema in a file", _schema({"$ref": "file:///etc/passwd"}), "400"),
    ("a schema on the web", _schema({"$ref": "http://127.0.0.1:1/x"}), "400"),
    ("a schema of 8^8 cases", _schema(CASES), "400"),
    ("a schema of 3,000 patterns", _schema(PATTERNS), "400"),
    ("a regex that backtracks", {**GOOD, "guided_regex": "(a+)+$"}, "200"),
    ("a regex of 10^10 letters", {**GOOD, "guided_regex": "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"}, "200 400"),
    ("a regex of 2^40 states", {**GOOD, "max_tokens": 60, "guided_regex": "(.*a.{30}b)|(.*b.{40}c)"}, "200 400"),
    ("a regex of 2 MB", {**GOOD, "guided_regex": "a" * 2_000_000}, "400"),
    ("a regex 50,000 deep", {**GOOD, "guided_regex": "(" * 50_000 + "a" + ")" * 50_000}, "400"),
    ("a regex that nothing is of", {**GOOD, "guided_regex": "[^\\x00-\\U0010ffff]"}, "400"),
    ("10^9 answers", {**GOOD, "n": 10**9}, "400"),
    ("2,048 answers", {"prompt": ["x"] * 32, "n": 64, "max_tokens": 1}, "200"),
    ("a number of 400 digits", b'{"prompt": "x", "temperature": 1' + b"0" * 400 + b"}", "400"),
    ("a number of 5,000 digits", b'{"prompt": "x", "temperature": 1' + b"0" * 5000 + b"}", "400"),
    ("an infinite number", b'{"prompt": "x", "temperature": 1e999}', "400"),
    ("10^30 answers", {**GOOD, "n": 10**30}, "400"),
    ("answers that are no number", {**GOOD, "n": "4"}, "400"),
    ("one and a half answers", {**GOOD, "n": 1.5}, "400"),
    ("the best of fewer", {**GOOD, "n": 4, "best_of": 2}, "400"),
    ("256 prompts of 128 answers", {"prompt": ["x"] * 256, "n": 128, "max_tokens": 10**9}, "400"),
    ("no prompts", {**GOOD, "prompt": []}, "400"),
    ("prompts of two kinds", {**GOOD, "prompt": ["x", [5]]}, "200"),
    ("a token that is true", {**GOOD, "prompt": [True]}, "400"),
    ("a token of 10^30", {**GOOD, "prompt": [10**30]}, "400"),
    ("a bias of no token", {**GOOD, "logit_bias": {"99999": 1}}, "400"),
    ("a bias of a token below 0", {**GOOD, "logit_bias": {"-1": 1}}, "400"),
    ("a bias of a token in other digits", {**GOOD, "logit_bias": {"\uff15": 1}}, "400"),
    ("a bias of a token with a blank", {**GOOD, "logit_bias": {" 5": 1}}, "400"),
    ("a bias of a fraction", {**GOOD, "logit_bias": {"5.0": 1}}, "400"),
    ("a bias that is a list", {**GOOD, "logit_bias": [1]}, "400"),
    ("a bias that is true", {**GOOD, "logit_bias": {"5": True}}, "400"),
    ("a bias of 10^308", {**GOOD, "logit_bias": {"5": 1e308}}, "400"),
    ("biases that leave nothing", {**GOOD, "logit_bias": {str(at): -100 for at in range(259)}}, "200"),
    ("half a letter as a stop string", b'{"prompt": "x", "stop": "\\udc00"}', "400"),
    ("a schema in half a letter", b'{"prompt": "x", "guided_regex": "\\ud800"}', "400"),
    ("an empty body", b"", "400"),
    ("a body that is a list", [], "400"),
    ("a body that is null", None, "400"),
    ("a mark before the body", b'\xef\xbb\xbf{"prompt": "x", "max_tokens": 1}', "200 400"),
    ("a body in UTF-16", '{"prompt": "x", "max_tokens": 1}'.encode("utf-16"), "200 400"),
    ("a bias of a token of 5,000 digits", {**GOOD, "logit_bias": {"9" * 5000: 1}}, "400"),
    ("biases of all tokens", {**GOOD, "logit_bias": {str(at): 1 for at in range(250)}}, "200"),
    ("half a letter", b'{"prompt": "\\ud800"}', "400"),
    ("half a letter as a key", b'{"prompt": "x", "\\ud800": 1}', "400"),
    ("10,000 stop strings", {**GOOD, "stop": ["a"] * 10_000}, "400"),
    ("stop strings of 3 MB", {**GOOD, "stop": ["b" * 200_000] * 16}, "400"),
    ("a key twice", b'{"prompt": "x", "max_tokens": 4, "max_tokens": 1}', "400"),
    ("100,000 brackets", b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "400"),
    ("a prompt of 4 MB", {**GOOD, "prompt": "a" * 4_000_000}, "400"),
    ("a prompt of 10^6 tokens", {**GOOD, "prompt": [5] * 1_000_000}, "400"),
    ("a body of 5 MB", b" " * (5 << 20), "413"),
    ("zeros", {**GOOD, "prompt": "\x00" * 100}, "200"),
    ("no JSON", b"\xff\xfe", "400"),
)
_ELSEWHERE: tuple[tuple[str, str, object, str], ...] = (
    ("embeddings of a decoder", "/v1/embeddings", {"input": "x"}, "400"),
    ("embeddings of 10^6 tokens", "/v1/embeddings", {"input": [5] * 1_000_000}, "400"),
    ("embeddings of nothing", "/v1/embeddings", {}, "400"),
    ("classes of a decoder", "/classify", {"input": "x"}, "400"),
    ("a list of models that is asked for by POST", "/v1/models", {}, "405"),
    ("a path that is not there", "/v1/files", {"file": "/etc/passwd"}, "404"),
    ("a path with a zero", "/v1/completions%00", dict(GOOD), "404"),
    ("a path with a slash more", "//v1//completions", dict(GOOD), "404"),
)
SHAPES: tuple[tuple[str, str, object, str], ...] = (
    *((name, CHAT, body, wanted) for name, body, wanted in _CHATS),
    *((name, COMPLETIONS, body, wanted) for name, body, wanted in _COMPLETIONS),
    *_ELSEWHERE,
)
"""What it is, where it is sent, its body, and the statuses that may come back."""

CRLF = "\r\n"
POST, GET, HOST = "POST /v1/completions HTTP/1.1", "GET /v1/models HTTP/1.1", "Host: 127.0.0.1"
JSON, CHUNKED, CLOSE = "Content-Type: application/json", "Transfer-Encoding: chunked", "Connection: close"
_TEXT = ("Content-Type: text/plain", "Content-Length: 15", "", '{"prompt": "x"}')
_RAW: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("two lengths", (POST, HOST, "Content-Length: 2", "Content-Length: 30", "", "{}"), "400"),
    ("a length and chunks", (POST, HOST, JSON, "Content-Length: 4", CHUNKED, "", "0", "", GET, "", ""), "400"),
    ("a chunk of no length", (POST, HOST, JSON, CHUNKED, "", "zz", "{}", ""), "400 499"),
    ("a length below 0", (POST, HOST, "Content-Length: -5", "", "{}"), "400"),
    ("a folded header", (POST, HOST, CLOSE, "X: a", " b", "Content-Length: 2", "", "{}"), "400 415"),
    ("headers of 1 MB", (GET, HOST, "X: " + "a" * (1 << 20), "", ""), "400 431"),
    ("a strange host", (GET, "Host: evil.example", CLOSE, "", ""), "400"),
    ("no host", (GET, "", ""), "400"),
    ("a path above", ("GET /v1/models/../../../../etc/passwd HTTP/1.1", HOST, CLOSE, "", ""), "404"),
    ("another type", (POST, HOST, CLOSE, *_TEXT), "415"),
    ("no HTTP", ("\x16\x03\x01\x02", "", ""), "400"),
    ("HTTP/2 at once", ("PRI * HTTP/2.0", "", "SM", "", ""), "400 505"),
    (
        "chunks that are packed",
        (POST, HOST, JSON, CLOSE, "Transfer-Encoding: gzip, chunked", "", "0", "", ""),
        "400 501",
    ),
    ("chunks twice", (POST, HOST, JSON, CLOSE, CHUNKED, CHUNKED, "", "0", "", ""), "400 501"),
    ("a blank before the colon", (POST, HOST, JSON, CLOSE, "Transfer-Encoding : chunked", "", "0", "", ""), "400"),
    ("a chunk of 16^21 bytes", (POST, HOST, JSON, CLOSE, CHUNKED, "", "f" * 21, "{}", ""), "400 413"),
    ("a chunk of -1 bytes", (POST, HOST, JSON, CLOSE, CHUNKED, "", "-1", "{}", ""), "400 499"),
    ("a chunk of 0x2 bytes", (POST, HOST, JSON, CLOSE, CHUNKED, "", "0x2", "{}", "0", "", ""), "400 499"),
    ("a chunk longer than it says", (POST, HOST, JSON, CLOSE, CHUNKED, "", "2", "{}{}", "0", "", ""), "400 499"),
    (
        "a chunk that says 1 MB of itself",
        (POST, HOST, JSON, CLOSE, CHUNKED, "", "2;" + "a" * (1 << 20), "{}", ""),
        "400 499",
    ),
    ("a length of 10^30", (POST, HOST, JSON, CLOSE, "Content-Length: 1" + "0" * 30, "", "{}"), "400 413"),
    ("a length in other digits", (POST, HOST, JSON, CLOSE, "Content-Length: +2", "", "{}"), "400"),
    ("a zero in a header", (POST, HOST, JSON, CLOSE, "X: a\0b", "Content-Length: 2", "", "{}"), "400"),
    ("10,000 headers", (GET, HOST, CLOSE, *(f"X{at}: a" for at in range(10_000)), "", ""), "200 400 431"),
    ("a path of 1 MB", ("GET /v1/" + "a" * (1 << 20) + " HTTP/1.1", HOST, CLOSE, "", ""), "400 414 431"),
)
RAW: tuple[tuple[str, bytes, str], ...] = tuple(
    (name, CRLF.join(lines).encode(), wanted) for name, lines, wanted in _RAW
)
"""What it is, its bytes, and the statuses that may come back."""


_SMALL = '{"prompt": "x", "max_tokens": 1}'
_LEN = f"Content-Length: {len(_SMALL)}"
_INSIDE = CRLF.join((GET, HOST, "", ""))  # a request that stands in the body of another
_CHUNKS = tuple(part for letter in _SMALL for part in ("1", letter))
_SEVERAL: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    (
        "two requests at once",
        (POST, HOST, JSON, _LEN, "", _SMALL + POST, HOST, JSON, CLOSE, _LEN, "", _SMALL),
        ("200", "200"),
    ),
    ("100 requests at once", (*(GET, HOST, "") * 99, GET, HOST, CLOSE, "", ""), ("200",) * 100),
    (
        "one behind a wrong one",
        (POST, HOST, JSON, "Content-Length: 2", "", "{}" + GET, HOST, CLOSE, "", ""),
        ("400", "200"),
    ),
    (
        "one behind one of another type",
        (POST, HOST, _TEXT[1], "", _TEXT[-1] + GET, HOST, CLOSE, "", ""),
        ("415", "200"),
    ),
    (
        "one within the body of a lost path",
        ("POST /none HTTP/1.1", HOST, JSON, f"Content-Length: {len(_INSIDE)}", "", _INSIDE + GET, HOST, CLOSE, "", ""),
        ("404", "200"),
    ),
    (
        "one within the body of a strange host",
        (
            "POST /none HTTP/1.1",
            "Host: evil.example",
            JSON,
            f"Content-Length: {len(_INSIDE)}",
            "",
            _INSIDE + GET,
            HOST,
            CLOSE,
            "",
            "",
        ),
        ("400", "200"),
    ),
    ("chunks of a letter", (POST, HOST, JSON, CLOSE, CHUNKED, "", *_CHUNKS, "0", "", ""), ("200",)),
    (
        "chunks with more to say, and a trailer",
        (POST, HOST, JSON, CLOSE, CHUNKED, "", f"{len(_SMALL):x};a=b", _SMALL, "0", "X: y", "", ""),
        ("200",),
    ),
    ("one who waits for leave", (POST, HOST, JSON, CLOSE, "Expect: 100-continue", _LEN, "", _SMALL), ("200",)),
)
SEVERAL: tuple[tuple[str, bytes, tuple[str, ...]], ...] = tuple(
    (name, CRLF.join(lines).encode(), wanted) for name, lines, wanted in _SEVERAL
)
"""What it is, its bytes, which are several requests of one connection or one in pieces, and the statuses that come
back in this order: an answer more would be to a request that nobody sent."""


def statuses(answer: bytes) -> tuple[str, ...]:
    """Of all answers on a connection, in order, but for leave to go on."""
    found = re.findall(rb"HTTP/1\.1 (\d+) ", answer)
    return tuple(one.decode() for one in found if one != b"100")


def bytes_of(body: object) -> bytes:
    """Of a shape's body."""
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def head(path: str, length: int, key: str = "") -> bytes:
    """Of a request that ends its connection."""
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", "Content-Type: application/json"]
    lines += [f"Content-Length: {length}", *([f"Authorization: Bearer {key}"] if key else ()), "", ""]
    return CRLF.join(lines).encode()


def _body(rng: random.Random) -> bytes:
    """A good one, or one of nine ways to be wrong."""
    good = {"prompt": "x" * rng.randint(1, 60), "max_tokens": rng.randint(1, 24), "temperature": rng.choice((0, 1))}
    match rng.randrange(11):
        case 0 | 1 | 2:
            return json.dumps(good).encode()
        case 3:
            return json.dumps({**good, "stream": True}).encode()
        case 4:
            wrong = rng.choice((None, [], {}, -1, 1e99, 10**400, "x", True))
            return json.dumps({**good, rng.choice(list(good)): wrong}).encode()
        case 5:
            return json.dumps(
                {"messages": rng.choice(([], [1], [{"role": "user"}], [{"role": "x", "content": 3}]))}
            ).encode()
        case 6:
            return rng.randbytes(rng.randint(0, 200))
        case 7:
            return b"[" * rng.choice((10, 100_000))
        case 8:
            return json.dumps({**good, "stop": ["\u0000"] * rng.randint(0, 20), "n": rng.randint(-1, 4)}).encode()
        case 9:
            small = [shape for shape in SHAPES if len(bytes_of(shape[2])) < 1 << 16]
            return bytes_of(rng.choice(small)[2])
        case _:
            return json.dumps({**good, "prompt": [rng.randint(-5, 400) for _ in range(rng.randint(0, 300))]}).encode()


async def exchanged(host: str, port: int, sent: bytes, wait_s: float = 300.0) -> bytes:
    """What comes back until the connection ends; nothing where it was cut."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(sent)
        await writer.drain()
        return await asyncio.wait_for(reader.read(), wait_s)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def _one(host: str, port: int, rng: random.Random, key: str) -> str:
    """What came back."""
    how = rng.choice(("whole",) * 6 + ("cut", "gone", "slow", "long", "unread"))
    sent, path = _body(rng), rng.choice((COMPLETIONS, CHAT))
    try:
        if how == "whole":
            return _status(await exchanged(host, port, head(path, len(sent), key) + sent))
        reader, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        return type(error).__name__
    try:
        if how == "unread":
            sent = json.dumps({"prompt": "x", "max_tokens": 100, "stream": True}).encode()
        writer.write(head(path, len(sent) + (1 << 30) * (how == "long"), key))
        writer.write(sent[: len(sent) // 2] if how in ("cut", "long") else sent)
        await writer.drain()
        if how in ("cut", "gone"):
            await asyncio.sleep(rng.random() * 0.05)
            return how
        if how in ("long", "unread"):
            await asyncio.sleep(0.2)
            return how
        await asyncio.sleep(rng.random())
        return _status(await asyncio.wait_for(reader.read(), 300))
    except (OSError, TimeoutError) as error:
        return type(error).__name__
    finally:
        writer.close()


def _status(answer: bytes) -> str:
    found = re.match(rb"HTTP/1.1 (\d+)", answer)
    if found is None:
        return "no answer"
    if found[1] in (b"429", b"503") and b"\r\nretry-after: " not in answer.lower():
        return f"status {found[1].decode()} without Retry-After"
    return f"status {found[1].decode()}"


async def all_of(url: str, count: int, seed: int, *, at_once: int = 64, key: str = "") -> Counter[str]:
    """What came back of so many."""
    where, places, rng = urlsplit(url), asyncio.Semaphore(at_once), random.Random(seed)
    assert where.hostname and where.port

    async def placed(own: random.Random) -> str:
        async with places:
            return await _one(str(where.hostname), int(where.port or 0), own, key)

    return Counter(await asyncio.gather(*(placed(random.Random(rng.random())) for _ in range(count))))
