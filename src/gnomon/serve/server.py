"""OpenAI's API over HTTP: `application(settings)` is a Starlette app, `serve(settings)` runs it until told to end.

A request that cannot be read is 400, one without the key 401, one too many 429 with Retry-After, a body that is too
long 413, one that is not said to be JSON 415. A client that goes away or stops reading holds up nobody: its answers are
cancelled, or wait for it apart; one that asks for many answers at once has as many under way as the workers run, and
others come in between. Nothing in a request is opened, imported or run. Leaves out what answers are (`api`) and who
makes them (`router`).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import signal
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import GnomonError, InputError
from gnomon.formats.huggingface.runnable import classifies
from gnomon.runtime.checkpoint.pretrained import CONFIG, model_of
from gnomon.serve import api
from gnomon.serve.checksums import check_sums
from gnomon.serve.classes import classified, pairs, scored, to_classify
from gnomon.serve.connections import most_connections, protocol
from gnomon.serve.embeddings import answer, texts
from gnomon.serve.encoder import EncoderKind
from gnomon.serve.load import is_seq2seq, look
from gnomon.serve.matrices import AS_STORED
from gnomon.serve.messages import Ask, Delta, Failure
from gnomon.serve.metrics import Metrics
from gnomon.serve.pool import LostText, Wants, WorkerPool
from gnomon.serve.router import Router
from gnomon.serve.settings import Settings
from gnomon.serve.vocabulary import Vocabulary
from gnomon.serving.encoders import reads_whole_texts

log = logging.getLogger("gnomon.serve")
LOOK_S = 0.5
"""Seconds after which it is looked whether the client of a list of texts is still there."""
BODY_S = 30.0
"""Seconds in which a body has come."""
INSTALL = "a server needs starlette, uvicorn and prometheus-client: pip install gnomon[serve]"
LOCAL = ("127.0.0.1", "localhost", "::1")


class RefusedRequest(Exception):
    """A request that is not answered, and how HTTP says so."""

    def __init__(self, status: int, why: str, kind: str = "invalid_request_error", **headers: str) -> None:
        super().__init__(why)
        self.status, self.why, self.kind, self.headers = status, why, kind, headers


class Server:
    """What the handlers share."""

    def __init__(self, settings: Settings, encoder: EncoderKind | None = None) -> None:
        """Takes the encoder that answers, in place of a decoder's workers."""
        self.settings, self.encoder = settings, encoder
        self.pool = None if encoder is None else WorkerPool(settings, encoder.max_len)
        self.embedding = 0
        """Texts that wait for an encoder or are in it."""
        self.num_held = 0
        """Prompts that are asked for and not yet given to a worker."""
        self.words = Vocabulary.open(Path(settings.folder), settings.tokenizer)
        self.words.whole = is_seq2seq(Path(settings.folder))
        self.router = Router(settings)
        self.metrics = Metrics(self.router, settings.name)

    def served(self) -> api.ServedModel:
        """What bodies are read against."""
        size = self.router.vocab_size if self.encoder is None else self.encoder.vocab_size
        return api.ServedModel(
            names=self.settings.names, words=self.words, max_model_len=self.max_model_len, vocab_size=size
        )

    @property
    def max_model_len(self) -> int:
        """Tokens of a request."""
        return self.router.max_model_len if self.encoder is None else self.encoder.max_len

    def check_wants(self, wants: Wants) -> EncoderKind:
        """Returns the encoder. Refused where the model does something else."""
        name, kind = self.settings.name, self.encoder
        if kind is None:
            produces = "embeddings are" if wants == "vector" else "classes are"
            raise RefusedRequest(400, f"{name} writes words, and {produces} made by encoders (BERT's family)")
        if bool(kind.labels) != (wants == "classes"):
            other = "a classifier; ask /classify" if kind.labels else "no classifier; ask /v1/embeddings"
            raise RefusedRequest(400, f"{name} is {other}")
        return kind

    async def compute(
        self,
        ids: Sequence[Sequence[int]],
        types: Sequence[Sequence[int]] | None,
        wants: Wants,
        gone: Callable[[], Awaitable[bool]],
    ) -> list[NDArray[np.float32]]:
        """Of each text, as many at a time as there are workers, so that a long list lets others in between. Refused
        where too many wait. gone: whether nobody waits any more."""
        pool, count = self.pool, len(ids)
        assert pool is not None
        # Where nobody else waits a list is taken however long it is: a longer one than may wait would never be.
        if self.embedding and self.embedding + count > self.settings.max_waiting:
            self.metrics.refused.inc()
            raise RefusedRequest(
                429,
                f"{self.embedding} texts wait already, and at most {self.settings.max_waiting} may; ask again later",
                "rate_limit_error",
                **{"Retry-After": str(1 + self.embedding // 32)},
            )
        self.embedding += count
        own = asyncio.Semaphore(self.settings.workers)

        async def one(at: int) -> NDArray[np.float32]:
            async with own:
                return await pool.compute(ids[at], None if types is None else types[at], wants)

        answering = asyncio.gather(*(one(at) for at in range(count)))
        try:
            while not (await asyncio.wait([answering], timeout=LOOK_S))[0]:
                if await gone():
                    raise RefusedRequest(499, "the client is gone")
            return list(answering.result())
        except LostText as lost:
            raise RefusedRequest(lost.status, str(lost), "server_error", **{"Retry-After": "2"}) from None
        finally:
            answering.cancel()
            self.embedding -= count

    def check_key(self, header: str) -> None:
        """Refused without the key, where there is one."""
        key = self.settings.api_key
        # Takes as long wherever the two differ, so that time does not tell how much of a guess is right.
        if key and not hmac.compare_digest(header.encode(), f"Bearer {key}".encode()):
            raise RefusedRequest(
                401, "this server asks for its API key, as Authorization: Bearer KEY", "authentication_error"
            )

    async def body(self, request: Any) -> object:
        """JSON of a request. Refused for what is too long, too slow or none."""
        most, headers = self.settings.max_body_bytes, request.headers
        if "content-length" in headers and "transfer-encoding" in headers:
            # what stands between client and server may read it by the one where this server reads it by the other
            raise RefusedRequest(
                400, "a request says how long it is by Content-Length or by Transfer-Encoding, not by both"
            )
        if (coded := headers.get("content-encoding", "identity").strip().lower()) != "identity":
            raise RefusedRequest(415, f"bodies are read as they come, not as {coded[:80]}; leave Content-Encoding out")
        if (kind := headers.get("content-type", "").partition(";")[0].strip().lower()) != "application/json":
            # a page in a browser may send other types to other sites unasked
            raise RefusedRequest(415, f"the body's Content-Type is application/json, not {kind[:80] or 'left out'}")
        parts, length = [], 0
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    length += len(part)
                    if length > most:
                        raise RefusedRequest(413, f"the body is longer than the {most} bytes that this server takes")
                    parts.append(part)
        except TimeoutError:
            raise RefusedRequest(408, f"the body did not come within {BODY_S:g} s") from None
        try:
            value = json.loads(b"".join(parts), parse_constant=_no_number, object_pairs_hook=_each_once)
            json.dumps(value, ensure_ascii=False).encode()  # half a letter, as JSON can write one, is no text
        except UnicodeEncodeError as error:
            raise RefusedRequest(400, "the body has half of a surrogate pair, which is no text") from error
        except (ValueError, RecursionError) as error:
            raise RefusedRequest(400, f"the body is no JSON: {str(error)[:200]}") from error
        return value

    def ask(self, request: api.CompletionRequest) -> AnswerStream:
        """Hands what is wanted to workers. Refused where too many wait, or none serves."""
        router = self.router
        waiting = router.waiting + self.num_held
        if not router.is_ready:
            raise RefusedRequest(503, "no worker serves now; ask again", "server_error", **{"Retry-After": "2"})
        if waiting + len(request.prompts) > self.settings.max_waiting:
            self.metrics.refused.inc()
            raise RefusedRequest(
                429,
                f"{waiting} requests wait already, and at most {self.settings.max_waiting} may; ask again later",
                "rate_limit_error",
                **{"Retry-After": str(1 + waiting // 32)},
            )
        return AnswerStream(self, request)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _each_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:80]!r} stands in it twice")
    return body


class AnswerStream:
    """The answers of one request, as they come. At most as many of them are under way as all workers run at a time."""

    def __init__(self, server: Server, request: api.CompletionRequest) -> None:
        self.server, self.request = server, request
        self.answers = api.Answers(request, server.words)
        total, settings = len(request.prompts) * request.count, server.settings
        self.room = settings.rules.max_seqs * settings.workers * settings.ways.pp
        """Answers that may still be begun."""
        # Answers to a prompt go to a worker together, so that the prompt is computed once, as many as run there at a
        # time.
        step = min(request.count, settings.rules.max_seqs)
        self.unbegun = deque(
            (number, first, min(step, request.count - first))
            for number in range(len(request.prompts))
            for first in range(0, request.count, step)
        )
        """(prompt, first of its answers, answers) of what no worker has yet."""
        server.num_held += len(request.prompts)
        self.heard: asyncio.Queue[tuple[int, Delta] | Failure] = asyncio.Queue()
        self.numbers: list[int] = []
        self.times = [server.metrics.request(len(request.prompts[at // request.count])) for at in range(total)]
        self._submit()

    def _submit(self) -> None:
        """Sends texts to workers, as much as may be under way."""
        # In order, though a later part might fit where this one does not: `num_held` counts a prompt until its first
        # part is given away, and what waits longest is what clients see as their first token.
        while self.unbegun and self.unbegun[0][2] <= self.room:
            number, first, count = self.unbegun.popleft()
            self.server.num_held -= first == 0
            self._submit_one(number, first, count)

    def _submit_one(self, number: int, first: int, count: int) -> None:
        request, prompt = self.request, self.request.prompts[number]
        self.room -= count
        adapter = "" if request.model == self.server.settings.name else request.model

        def make(own: int) -> Ask:
            return Ask(
                number=own, prompt=prompt, sampling=request.sampling, first=first, count=count, streams=request.streams,
                stops=request.stops, keep_stop=request.keep_stop, specials=request.specials, adapter=adapter,
                salt=request.salt, grammar=request.grammar,
            )  # fmt: skip

        def hear(message: Delta | Failure) -> None:
            if isinstance(message, Failure):
                self.heard.put_nowait(message)
                return
            at = number * request.count + first + message.index
            self.times[at].add_tokens(len(message.tokens), message.reason)
            self.heard.put_nowait((at, message))
            # On the loop's thread, as `cancel` is: no answer is begun after its request is given up.
            if message.reason is not None:
                self.room += 1
                self._submit()

        ask = self.server.router.submit(make, hear)
        if ask is None:
            self.heard.put_nowait(Failure(-1, "no worker serves now; ask again", 503))
            return
        self.numbers.append(ask)

    def cancel(self) -> None:
        """Nobody waits any more."""
        self.server.num_held -= sum(first == 0 for _, first, _ in self.unbegun)
        self.unbegun.clear()
        for number in self.numbers:
            self.server.router.cancel(number)

    async def next(self) -> tuple[int, Delta]:
        """What is told next. Refused for an ask that failed."""
        message = await self.heard.get()
        if isinstance(message, Failure):
            kind = "server_error" if message.status >= 500 else "invalid_request_error"
            again = {"Retry-After": "2"} if message.status == 503 else {}
            raise RefusedRequest(message.status, message.why, kind, **again)
        return message

    async def whole(self) -> dict[str, Any]:
        """All answers."""
        while not self.answers.is_done:
            self.answers.add(*await self.next())
        return self.answers.whole()

    async def stream(self) -> AsyncIterator[str]:
        """Server-sent events."""
        try:
            while not self.answers.is_done:
                at, delta = await self.next()
                for chunk in self.answers.chunks(at, delta):
                    yield _event(chunk)
            if self.request.usage:
                yield _event(self.answers.last_chunk())
            yield "data: [DONE]\n\n"
        except RefusedRequest as refused:
            yield _event(_error(refused))
        finally:  # the end, a failure, or a client that is gone: the generator is closed with its response
            self.cancel()


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
"""OpenAI's words for a status, which clients look for; others have none."""


def _error(refused: RefusedRequest, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    code = code or CODES.get(refused.status)
    return {"error": {"message": refused.why, "type": refused.kind, "param": param, "code": code}}


def _param(error: GnomonError) -> str | None:
    """The field of a body that an error is about."""
    where = getattr(error, "path", None) or ""
    return where.removeprefix("$.") or None if where.startswith("$.") else None


def application(settings: Settings, encoder: EncoderKind | None = None) -> Any:
    """Makes the app. encoder: what answers, in place of a decoder's workers. InputError where packages or the tokenizer
    are not there."""
    try:
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.requests import ClientDisconnect
        from starlette.responses import JSONResponse, Response, StreamingResponse
        from starlette.routing import Route
    except ImportError as error:
        raise InputError(INSTALL) from error
    try:
        server = Server(settings, encoder)
    except ImportError as error:
        raise InputError(INSTALL) from error

    class Stream(StreamingResponse):
        """Whose answers are cancelled with it: of a client that is gone before it begins, nobody asks for the rest."""

        def __init__(self, stream: AnswerStream) -> None:
            super().__init__(stream.stream(), media_type="text/event-stream")
            self.stream = stream

        async def __call__(self, *args: Any) -> None:
            try:
                await super().__call__(*args)
            finally:
                self.stream.cancel()

    def guarded(handler: Callable[[Any], Any]) -> Callable[[Any], Any]:
        async def run(request: Any) -> Any:
            try:
                server.check_key(request.headers.get("authorization", ""))
                return await handler(request)
            except RefusedRequest as refused:
                return JSONResponse(_error(refused), refused.status, refused.headers)
            except api.ModelError as error:
                return JSONResponse(_error(RefusedRequest(404, str(error)), "model", "model_not_found"), 404)
            except GnomonError as error:
                return JSONResponse(_error(RefusedRequest(400, str(error)), _param(error)), 400)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:
                log.exception("a request failed by a mistake of this server")
                why = f"a mistake of this server: {type(error).__name__}"
                return JSONResponse(_error(RefusedRequest(500, why, "server_error")), 500)

        return run

    def answering(read: Callable[[object, api.ServedModel], api.CompletionRequest]) -> Callable[[Any], Any]:
        async def run(request: Any) -> Any:
            if encoder is not None:
                asked_at = "/classify" if encoder.labels else "/v1/embeddings"
                raise RefusedRequest(400, f"{settings.name} is an encoder, which writes no words; ask {asked_at}")
            body = await server.body(request)
            # In a thread: splitting a long text into tokens takes a while, and other connections go on meanwhile.
            completion = await asyncio.to_thread(read, body, server.served())
            stream = server.ask(completion)
            if completion.streams:
                return Stream(stream)
            return await _unless_gone(request, stream, JSONResponse, Response)

        return guarded(run)

    async def embeddings(request: Any) -> Any:
        body = await server.body(request)
        server.check_wants("vector")
        stream = await asyncio.to_thread(texts, body, server.served())
        return JSONResponse(answer(stream, await server.compute(stream.ids, None, "vector", request.is_disconnected)))

    async def classify(request: Any) -> Any:
        body = await server.body(request)
        kind = server.check_wants("classes")
        stream = await asyncio.to_thread(to_classify, body, server.served())
        vectors = await server.compute(stream.ids, None, "classes", request.is_disconnected)
        return JSONResponse(classified(stream, vectors, kind.labels))

    async def score(request: Any) -> Any:
        body = await server.body(request)
        kind = server.check_wants("classes")
        if len(kind.labels) != 1:
            raise RefusedRequest(
                400, f"{settings.name} has {len(kind.labels)} classes, and scores are of one; ask /classify"
            )
        stream = await asyncio.to_thread(pairs, body, server.served())
        vectors = await server.compute(stream.ids, stream.types, "classes", request.is_disconnected)
        return JSONResponse(scored(stream, vectors))

    async def unknown(request: Any, error: Any) -> Any:
        there = ", ".join(
            dict.fromkeys(f"{' '.join(sorted((route.methods or set()) - {'HEAD'}))} {route.path}" for route in routes)
        )
        why = f"there is no {request.method} {request.url.path[:200]} here; this server has {there}"
        return JSONResponse(_error(RefusedRequest(error.status_code, why)), error.status_code, error.headers)

    def card(name: str) -> dict[str, Any]:
        own = {"id": name, "object": "model", "created": 0, "owned_by": "gnomon", "max_model_len": server.max_model_len}
        return own if name == settings.name else {**own, "parent": settings.name}

    async def models(request: Any) -> Any:
        return JSONResponse({"object": "list", "data": [card(name) for name in settings.names]})

    async def model(request: Any) -> Any:
        if request.path_params["name"] not in settings.names:
            raise api.ModelError(f"there is no such model; this server has {', '.join(map(repr, settings.names))}")
        return JSONResponse(card(request.path_params["name"]))

    async def health(request: Any) -> Any:
        return Response(status_code=200)

    async def ready(request: Any) -> Any:
        answering = server.router if server.pool is None else server.pool
        return Response(status_code=200 if answering.is_ready else 503)

    async def metrics(request: Any) -> Any:
        return Response(server.metrics.text(), media_type=server.metrics.content_type)

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        answering = server.router if server.pool is None else server.pool
        await answering.start()
        length, where = server.max_model_len, getattr(app.state, "address", settings.host)
        print(f"gnomon: serving {settings.name} on {where} ({length} tokens a request)", file=sys.stderr, flush=True)
        try:
            yield
        finally:
            await answering.stop()

    routes = [
        Route("/v1/completions", answering(api.completion), methods=["POST"]),
        Route("/v1/chat/completions", answering(api.chat), methods=["POST"]),
        Route("/v1/embeddings", guarded(embeddings), methods=["POST"]),
        Route("/classify", guarded(classify), methods=["POST"]),
        Route("/score", guarded(score), methods=["POST"]),
        Route("/v1/score", guarded(score), methods=["POST"]),
        Route("/v1/models", guarded(models)),
        # A path, since names of models have slashes.
        Route("/v1/models/{name:path}", guarded(model)),
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", metrics),
    ]
    # a page in a browser could otherwise ask a server of this machine by a name that leads to it
    hosts = [*LOCAL, "[::1]"] if settings.host in LOCAL else ["*"]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
        exception_handlers={404: unknown, 405: unknown},
    )
    app.state.server = server
    return app


async def _unless_gone(request: Any, stream: AnswerStream, answer_of: Any, empty: Any) -> Any:
    """The whole answer, cancelled where the client goes away before it is made."""
    answering = asyncio.ensure_future(stream.whole())

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watching = asyncio.ensure_future(gone())
    try:
        await asyncio.wait((answering, watching), return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return answer_of(answering.result())
        return empty(status_code=499)
    finally:
        watching.cancel()
        answering.cancel()
        stream.cancel()


def _looked(settings: Settings) -> EncoderKind | None:
    """The encoder that a folder is of; of a decoder, whose workers read it, only whether it can be served."""
    folder = Path(settings.folder)
    for path in (folder, *(path for _, path in settings.adapters)):
        if path.is_dir() and (checked := check_sums(path)):
            print(f"gnomon: {checked} files of {path} are what their sums say", file=sys.stderr, flush=True)
    if _is_classifier(folder) or reads_whole_texts(model_of(folder).graph):
        if settings.adapters or settings.weights != AS_STORED or settings.ways.ranks > 1:
            raise InputError(
                "an encoder is served as its folder has it, whole in each process; leave --lora, --weights and "
                "parallel sizes out"
            )
        kind = EncoderKind.of(folder, settings.max_model_len)
        if settings.buckets and settings.buckets[-1] != kind.max_len:
            raise InputError(
                f"--pad-to ends at {settings.buckets[-1]}, and a text may have {kind.max_len} tokens: end it there, "
                f"or give --max-model-len {settings.buckets[-1]}"
            )
        return kind
    if is_seq2seq(folder):
        if settings.ways.ranks > 1:
            raise InputError("an encoder with a decoder is served whole in each process; leave parallel sizes out")
        model_of(folder)
        return None
    if settings.buckets:
        raise InputError("--pad-to are lengths that texts of encoders are padded to, and this model writes words")
    look(
        folder,
        settings.rules,
        dtype=settings.dtype,
        kv_bytes=settings.kv_bytes,
        weights=settings.weights,
        max_model_len=settings.max_model_len,
        ways=settings.ways,
    )
    return None


def _is_classifier(folder: Path) -> bool:
    config = (folder if folder.is_dir() else folder.parent) / CONFIG
    return config.is_file() and classifies(config.read_text(encoding="utf-8"))


def serve(settings: Settings) -> int:
    """Runs until SIGTERM or SIGINT; requests that run then have `drain_s` to end."""
    app = application(settings, _looked(settings))
    import uvicorn

    try:
        listening = socket.create_server(
            (settings.host, settings.port), family=socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        )
    except OSError as error:
        raise InputError(f"cannot serve on {settings.host}:{settings.port}: {error.strerror}") from error
    where = f"[{settings.host}]" if ":" in settings.host else settings.host
    app.state.address = f"http://{where}:{listening.getsockname()[1]}"
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        http=protocol(most_connections()),
        timeout_graceful_shutdown=max(1, int(settings.drain_s)),
        timeout_keep_alive=30,
        h11_max_incomplete_event_size=64 << 10,
    )
    server = uvicorn.Server(config)

    def ended(*_: object) -> None:
        """uvicorn raises a signal again once it has ended as it was told; to have ended so is no failure."""
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, ended)
    with listening:
        server.run(sockets=[listening])
    return 0 if server.started else 2
