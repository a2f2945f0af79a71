"""Requests to a server of OpenAI's API at the times of a load, and when each was answered: `drive(url, load, …)`.

Any server will do; answers are streamed, and lengths are the trace's (`ignore_eos` where the server knows it). Prompts
are tokens where it takes them. A request is one connection of its own. Leaves out what the numbers mean (`report`).
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from gnomon.errors import InputError, RunError
from gnomon.serving.requests import Load, Request

TOKENS = (5, 200)
"""Ids of made-up prompts, which every vocabulary has."""
METRICS_S = 5.0
"""Seconds in which a server says its metrics, or goes without."""
ANSWER_S = 3600.0
"""Seconds in which a request is answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrivenRequest:
    """One request, in seconds from the first arrival."""

    arrival_s: float
    """When it was sent."""
    first_s: float
    """Its first token."""
    end_s: float
    """Its last."""
    input_len: int
    output_len: int
    """Tokens that came."""
    error: str
    """What the server said in place of an answer; empty where it answered."""

    @property
    def ttft_s(self) -> float:
        """Seconds from arrival to the first token."""
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds of a further token; None for an answer of one."""
        return (self.end_s - self.first_s) / (self.output_len - 1) if self.output_len > 1 else None


@dataclass(frozen=True, slots=True)
class _Server:
    host: str
    port: int
    path: str
    key: str

    def head(self, method: str, path: str, length: int) -> bytes:
        lines = [f"{method} {self.path}{path} HTTP/1.1", f"Host: {self.host}:{self.port}", "Connection: close"]
        lines += ["Content-Type: application/json", f"Content-Length: {length}"]
        lines += [f"Authorization: Bearer {self.key}"] if self.key else []
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def _asked(server: _Server, method: str, path: str, body: bytes = b"") -> tuple[int, Any, asyncio.StreamWriter]:
    """(status, lines of the body as they come, what to close)."""
    reader, writer = await asyncio.open_connection(server.host, server.port, limit=1 << 24)
    writer.write(server.head(method, path, len(body)) + body)
    await writer.drain()
    status = int((await reader.readline()).split()[1])
    chunked = False
    while (line := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        chunked = chunked or (name.lower() == "transfer-encoding" and "chunked" in value.lower())

    async def lines() -> Any:
        if not chunked:
            while line := await reader.readline():
                yield line
            return
        event_body = b""
        while (size := int((await reader.readline()).strip() or b"0", 16)) > 0:
            event_body += await reader.readexactly(size)
            await reader.readline()
            # A chunk may end within a line: what is behind the last line break waits for the next chunk.
            *whole, event_body = event_body.split(b"\n")
            for line in whole:
                yield line
        if event_body:
            yield event_body

    return status, lines(), writer


async def _whole(server: _Server, method: str, path: str, body: bytes = b"") -> tuple[int, str]:
    status, lines, writer = await _asked(server, method, path, body)
    try:
        return status, b"\n".join([line async for line in lines]).decode("utf-8", "replace")
    finally:
        writer.close()


def drive(url: str, load: Load, *, model: str | None, key: str, seed: int, embeds: bool = False) -> list[DrivenRequest]:
    """Drives a server with a load and returns its requests, in the order of the load. InputError for a server that is
    not there. model: None for the first that it has. embeds: prompts are asked for their vectors, an answer of one
    token each."""
    try:
        return asyncio.run(_drive(_server_at(url, key), load, model, seed, embeds))
    except OSError as error:
        raise InputError(f"no server answers at {url}: {error}") from error


def cache_hits(url: str, key: str) -> int | None:
    """Prompt tokens that the server has found in its prefix cache since it started, by vLLM's name of the metric; None
    where it does not say."""
    try:
        status, text = asyncio.run(asyncio.wait_for(_whole(_server_at(url, key), "GET", "/metrics"), METRICS_S))
    except (OSError, ValueError, IndexError):  # TimeoutError is an OSError; the others: no answer of HTTP
        return None
    hits = re.findall(r"^vllm:prefix_cache_hits(?:_total)?(?:\{.*\})? ([\d.e+]+)$", text, re.MULTILINE)
    return int(sum(map(float, hits))) if status == 200 and hits else None


def _server_at(url: str, key: str) -> _Server:
    """InputError for what is no address of a server."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise InputError(f"{url!r} is no address of a server here; write http://HOST:PORT")
    return _Server(parts.hostname, parts.port or 80, parts.path.removesuffix("/").removesuffix("/v1"), key)


async def _drive(server: _Server, load: Load, model: str | None, seed: int, embeds: bool) -> list[DrivenRequest]:
    if model is None:
        status, text = await _whole(server, "GET", "/v1/models")
        if status != 200:
            raise RunError(f"the server does not say which models it has ({status}): {text[:200]}")
        model = json.loads(text)["data"][0]["id"]
    rng = random.Random(seed)
    # One beginning for all: each request takes as much of it as the trace says, so that servers find it in their
    # caches.
    shared = [rng.randint(*TOKENS) for _ in range(max((r.prefix_len for r in load.requests), default=0))]
    prompts = [
        [*shared[: one.prefix_len], *(rng.randint(*TOKENS) for _ in range(one.input_len - one.prefix_len))]
        for one in load.requests
    ]
    bodies = [
        json.dumps(
            {"model": model, "input": prompt}
            if embeds
            else {
                "model": model,
                "prompt": prompt,
                "max_tokens": one.output_len,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        for prompt, one in zip(prompts, load.requests, strict=True)
    ]
    begin = time.perf_counter()
    places = asyncio.Semaphore(load.concurrency or len(bodies))

    async def one(request: Request, body: bytes) -> DrivenRequest:
        if load.concurrency is None:
            await asyncio.sleep(max(0.0, request.arrival_s - (time.perf_counter() - begin)))
        async with places:
            async with asyncio.timeout(ANSWER_S):
                return await (_embedded if embeds else _one)(server, request, body, begin)

    return list(await asyncio.gather(*(one(r, body) for r, body in zip(load.requests, bodies, strict=True))))


async def _embedded(server: _Server, request: Request, body: bytes, begin: float) -> DrivenRequest:
    """A text's vector, whose first token and last it is."""
    sent = time.perf_counter() - begin
    status, text = await _whole(server, "POST", "/v1/embeddings", body)
    end = time.perf_counter() - begin
    return DrivenRequest(
        arrival_s=sent, first_s=end, end_s=end, input_len=request.input_len, output_len=1,
        error="" if status == 200 else text,
    )  # fmt: skip


async def _one(server: _Server, request: Request, body: bytes, begin: float) -> DrivenRequest:
    sent = time.perf_counter() - begin
    status, lines, writer = await _asked(server, "POST", "/v1/completions", body)
    first = end = 0.0
    count, error = 0, ""
    try:
        async for line in lines:
            now = time.perf_counter() - begin
            if status != 200:
                error += line.decode("utf-8", "replace").strip()
                continue
            text = line.strip().removeprefix(b"data: ")
            if not line.startswith(b"data:") or text == b"[DONE]":
                continue
            event = json.loads(text)
            if "error" in event:
                error = str(event["error"].get("message", event["error"]))
                break
            # The server's own count: an event may bring several tokens, or none.
            if usage := event.get("usage"):
                count = usage["completion_tokens"]
            if event.get("choices"):
                first, end = first or now, now
    finally:
        writer.close()
    return DrivenRequest(
        arrival_s=sent,
        first_s=first,
        end_s=end,
        input_len=request.input_len,
        output_len=count,
        error=(error or "no token came") if error or not count else "",
    )
