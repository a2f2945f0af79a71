"""An engine in a process of its own: asks come in over a pipe, tokens and their text go out.

`main(connection, settings)` is that process. It reads what has come between two iterations, and waits where there is
nothing to do. What goes wrong with one request is told to who asked; what goes wrong with an iteration ends the
requests that were in it, and the engine goes on empty. Leaves out HTTP and which worker gets what (`router`).
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gnomon.errors import GnomonError
from gnomon.serve.choose import Chosen
from gnomon.serve.engine import Engine, Made
from gnomon.serve.grammar import Grammars
from gnomon.serve.load import open_model
from gnomon.serve.messages import Ask, Cancel, Failed, Ready, Stats, Stop, Token, Tokens, Told
from gnomon.serve.settings import Settings
from gnomon.serve.text import TextStream
from gnomon.serve.vocabulary import Vocabulary

TOLD_AFTER = 8
"""Iterations after which metrics are told again, where there is work."""


@dataclass(slots=True)
class Answer:
    """One that is being made."""

    ask: Ask
    index: int
    stream: TextStream
    tokens: list[Token] = field(default_factory=list)


class Worker:
    """An engine, and who asked for what."""

    def __init__(self, engine: Engine, words: Vocabulary, send: Callable[[Any], None]) -> None:
        self.engine, self.words, self.send = engine, words, send
        self.answers: dict[int, Answer] = {}
        self.keys: dict[int, list[int]] = {}
        """Number of an ask -> keys of its answers that go on."""
        self.grammars = Grammars(words.encoder, engine.model.vocab_size)
        self.steps = 0

    def take(self, message: Any) -> None:
        """A message of the front end."""
        if isinstance(message, Cancel):
            for key in self.keys.pop(message.number, []):
                self.engine.cancel(key)
                self.answers.pop(key, None)
            return
        try:
            self._add(message)
        except GnomonError as error:
            self.send(Failed(message.number, str(error), 400))

    def _add(self, ask: Ask) -> None:
        streams = [TextStream(self.words, ask.stops, keep_stop=ask.keep_stop) for _ in range(ask.count)]
        masks = [self.grammars.mask(ask.grammar) for _ in range(ask.count)] if ask.grammar else []
        watches = [_watching(stream, masks[at].push if masks else None) for at, stream in enumerate(streams)]
        keys = self.engine.add(
            ask.prompt, ask.sampling, count=ask.count, watch=watches, mask=[mask.allowed for mask in masks],
            adapter=ask.adapter,
        )  # fmt: skip
        self.keys[ask.number] = list(keys)
        for index, (key, stream) in enumerate(zip(keys, streams, strict=True)):
            self.answers[key] = Answer(ask, index, stream)

    def step(self) -> None:
        """An iteration, and what it made to who asked."""
        try:
            made = self.engine.step()
        except Exception as error:  # the requests of this iteration are lost, not the server
            self._lost(f"{type(error).__name__}: {error}")
            return
        told = [message for one in made if (message := self._told(one)) is not None]
        if told:
            self.send(Tokens(tuple(told)))
        self.steps += 1

    def stats(self) -> Stats:
        """For metrics."""
        engine, memory = self.engine, self.engine.memory
        pool = memory.pools[0]
        return Stats(
            running=engine.running,
            waiting=engine.waiting,
            kv_used=1 - pool.free / pool.total,
            preemptions=engine.preemptions,
            found_tokens=memory.found_tokens,
            asked_tokens=memory.asked_tokens,
            iterations=engine.iterations,
        )

    def _told(self, made: Made) -> Told | None:
        answer = self.answers[made.key]
        if made.chosen.token not in answer.ask.sampling.stop_ids:
            answer.tokens.append(_token(self.words, made.chosen))
        ends = made.reason is not None
        text = answer.stream.take(all=ends) if ends or answer.ask.streams else ""
        if not ends and not text:
            return None
        message = Told(answer.ask.number, answer.index, text, tuple(answer.tokens), made.reason)
        answer.tokens = []
        if ends:
            del self.answers[made.key]
            left = self.keys[answer.ask.number]
            left.remove(made.key)
            if not left:
                del self.keys[answer.ask.number]
        return message

    def _lost(self, why: str) -> None:
        for number, keys in self.keys.items():
            self.send(Failed(number, f"the engine could not go on with this request: {why}", 500))
            for key in keys:
                self.engine.cancel(key)
        self.keys.clear()
        self.answers.clear()


def _watching(stream: TextStream, push: Callable[[int], bool] | None) -> Callable[[int], bool]:
    """Text of a token, and the grammar's state after it."""

    def watch(token: int) -> bool:
        whole = push is not None and push(token)
        return stream.push(token) or whole

    return watch


def _token(words: Vocabulary, chosen: Chosen) -> Token:
    if chosen.logprob is None:
        return Token(chosen.token, "", None, ())
    top = tuple((words.decode([token]), value) for token, value in chosen.top)
    return Token(chosen.token, words.decode([chosen.token]), chosen.logprob, top)


def open_worker(settings: Settings, send: Callable[[Any], None]) -> Worker:
    """The engine that settings ask for."""
    folder = Path(settings.folder)
    engine = open_model(
        folder,
        settings.rules,
        dtype=settings.dtype,
        kv_bytes=settings.kv_bytes,
        weights=settings.weights,
        max_model_len=settings.max_model_len,
        adapters=settings.adapters,
    )
    return Worker(engine, Vocabulary.open(folder, settings.tokenizer), send)


def main(connection: Connection, settings: Settings) -> None:
    """Serves until the front end goes or says so."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front end says when to end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    settings.use_threads()
    try:
        worker = open_worker(settings, connection.send)
    except GnomonError as error:
        connection.send(Failed(-1, str(error), 500))
        return
    engine = worker.engine
    connection.send(Ready(max_model_len=min(engine.max_model_len, engine.scheduler.longest())))
    told = worker.stats()
    while True:
        try:
            worker.step()
            now = worker.stats()
            if now != told and (not engine.has_work or now.iterations - told.iterations >= TOLD_AFTER):
                connection.send(now)
                told = now
            waits = not engine.has_work
            while connection.poll(None if waits else 0):
                message = connection.recv()
                if isinstance(message, Stop):
                    return
                worker.take(message)
                waits = False  # what it changed is to be told, even where there is nothing to do
        except (EOFError, BrokenPipeError, ConnectionResetError):  # the front end is gone
            return
