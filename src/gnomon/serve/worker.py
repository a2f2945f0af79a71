"""An engine in a process of its own: asks come in over a pipe, tokens and their text go out.

`main(connection, settings)` is that process. It reads what has come between two iterations, and waits where there is
nothing to do. What goes wrong with one request is told to who asked; what goes wrong with an iteration ends the
requests that were in it, and the engine goes on empty. Grammars are made in a thread beside, since a large one takes
seconds that others must not wait. A replica of several stages has an engine for each batch that is
under way (a lane), and the process leads the others (`divided`). Leaves out HTTP and which worker gets what (`router`).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from gnomon.errors import GnomonError, InputError
from gnomon.late import load_late
from gnomon.plans.experts import routers
from gnomon.runtime.processes.local import end_with_starter
from gnomon.serve.choose import ChosenToken
from gnomon.serve.copies import PathRecorder
from gnomon.serve.engine import Engine, EngineToken
from gnomon.serve.grammar import Grammars, Mask
from gnomon.serve.load import open_model
from gnomon.serve.messages import Ask, Cancel, Delta, Failure, Ready, Seat, Stats, Stop, Token, Tokens
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
    mask: Mask | None = None
    """What its text is held to."""
    tokens: list[Token] = field(default_factory=list)
    prompt: tuple[Token, ...] = ()
    """The tokens of its prompt that are still to be told."""


class Worker:
    """An engine or several on one model, and who asked for what."""

    def __init__(self, lanes: Sequence[Engine], words: Vocabulary, send: Callable[[Any], None]) -> None:
        self.lanes, self.words, self.send = lanes, words, send
        self.answers: dict[tuple[int, int], Answer] = {}
        """(lane, key) -> what is being made."""
        self.keys: dict[int, tuple[int, list[int]]] = {}
        """Number of an ask -> its lane, and keys of its answers that go on."""
        self.grammars = Grammars(words.encoder, lanes[0].vocab_size)
        self.making: dict[int, Ask] = {}
        """Number -> an ask whose grammar is being made."""
        self.grammars_done, self._tell = Pipe(duplex=False)
        """Numbers of asks whose grammar is made, or cannot be, and why."""
        self._maker = ThreadPoolExecutor(1, "gnomon-grammars")
        self.steps = self.turn = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""
        return any(engine.has_work for engine in self.lanes)

    def take(self, message: Any) -> None:
        """A message of the front end."""
        if isinstance(message, Cancel):
            self.making.pop(message.number, None)
            lane, keys = self.keys.pop(message.number, (0, []))
            for key in keys:
                self.lanes[lane].cancel(key)
                self.answers.pop((lane, key), None)
            return
        if message.grammar and not self.grammars.has(message.grammar):
            # Kept here until the thread is done: a cancel takes it out, and `take_made` then finds nothing to begin.
            self.making[message.number] = message
            self._maker.submit(self._make, message.number)
            return
        self._take(message)

    def _make(self, number: int) -> None:
        """Makes, in a thread of its own, the grammar of an ask, unless nobody waits for it any more."""
        why, ask = "", self.making.get(number)
        if ask is not None:
            try:
                self.grammars.mask(ask.grammar)
            except GnomonError as error:
                why = str(error)
            except BaseException as error:  # llguidance panics as no Exception
                why = f"answers cannot be held to this grammar: {type(error).__name__}"
        self._tell.send((number, why))

    def take_made(self) -> None:
        """An ask whose grammar is made."""
        number, why = self.grammars_done.recv()
        ask = self.making.pop(number, None)
        if ask is not None and why:
            self.send(Failure(number, why, 400))
        elif ask is not None:
            self._take(ask)

    def _take(self, ask: Ask) -> None:
        try:
            self._add(ask)
        except GnomonError as error:
            self.send(Failure(ask.number, str(error), 400))
        except Exception as error:  # this ask is lost, not the server
            self.send(Failure(ask.number, f"the engine cannot take this request: {type(error).__name__}", 500))

    def _add(self, ask: Ask) -> None:
        streams = [
            TextStream(self.words, ask.stops, keep_stop=ask.keep_stop, specials=ask.specials) for _ in range(ask.count)
        ]
        masks = [self.grammars.mask(ask.grammar) for _ in range(ask.count)] if ask.grammar else []
        watches = [_watching(stream, masks[at].push if masks else None) for at, stream in enumerate(streams)]
        lane = min(range(len(self.lanes)), key=lambda at: self.lanes[at].running + self.lanes[at].waiting)
        keys = self.lanes[lane].add(
            ask.prompt, ask.sampling, first=ask.first, count=ask.count, watch=watches,
            mask=[mask.allowed for mask in masks], adapter=ask.adapter, salt=ask.salt,
        )  # fmt: skip
        self.keys[ask.number] = lane, list(keys)
        for index, (key, stream) in enumerate(zip(keys, streams, strict=True)):
            self.answers[lane, key] = Answer(ask, index, stream, masks[index] if masks else None)

    def step(self) -> None:
        """An iteration, and what it made to who asked. Of several lanes, the one whose turn it is: what it has begun
        ends, and its next begins."""
        # Lanes take turns strictly: ranks of later stages run batches in the order in which they were begun, and logits
        # come back in that order, whichever lane would have more to do.
        lane, engine = self.turn, self.lanes[self.turn]
        self.turn = (self.turn + 1) % len(self.lanes)
        try:
            if len(self.lanes) == 1:
                tokens = engine.step()
            else:
                tokens = engine.end() if engine.is_under_way else []
                engine.begin()
        except Exception as error:  # the requests of this iteration are lost, not the server
            if engine.model.ranks > 1:  # the other processes do not know of it, or are what is gone
                raise
            self._lost(f"{type(error).__name__}: {error}")
            return
        deltas = [message for one in tokens if (message := self._delta(lane, one)) is not None]
        if deltas:
            self.send(Tokens(tuple(deltas)))
        self.steps += 1

    def record(self) -> None:
        """What routers choose is kept from now on."""
        model = self._decoder()
        found = routers(model.graph)
        if not found:
            raise InputError("--record-experts records routers, and this model has none; leave it out")
        model.recorder = PathRecorder(model.graph.name, [one.layer for one in found], found[0].experts)

    def end(self, file: Path | None) -> None:
        """Nothing is asked any more. file: that what routers chose is written to."""
        if (copies := getattr(self._decoder(), "copies", None)) is not None:
            print(
                f"gnomon: {copies.fetched} copies of experts were fetched, each as long as {copies.costs.fetch:.0f} "
                f"rows take (reading an expert's weights: {copies.costs.touch:.0f}); layers waited "
                f"{copies.waited_s:.2f} s for them",
                file=sys.stderr,
                flush=True,
            )
        if file is not None and (recorder := self._decoder().recorder) is not None and recorder.tokens:
            load_late("gnomon.formats.expert_paths:save_paths")(recorder.record(), file)

    def _decoder(self) -> Any:
        """The decoder of this process."""
        model = self.lanes[0].model
        return model.stage.model if hasattr(model, "stage") else model

    def stats(self) -> Stats:
        """Counts what metrics show."""
        lanes = self.lanes
        pools = [engine.memory.pools[0] for engine in lanes]
        return Stats(
            running=sum(engine.running for engine in lanes),
            waiting=sum(engine.waiting for engine in lanes),
            kv_used=1 - sum(pool.free for pool in pools) / sum(pool.total for pool in pools),
            preemptions=sum(engine.preemptions for engine in lanes),
            found_tokens=sum(engine.memory.found_tokens for engine in lanes),
            asked_tokens=sum(engine.memory.asked_tokens for engine in lanes),
            iterations=sum(engine.iterations for engine in lanes),
        )

    def _delta(self, lane: int, token: EngineToken) -> Delta | None:
        """What is told of a token. Streams have each as it comes, those without a text of their own too (part of a
        letter, or of what may be a stop string; no tokenizer): when tokens come is what clients measure."""
        answer = self.answers.get((lane, token.key))
        if answer is None:  # another answer to its prompt failed in this iteration
            return None
        if answer.mask is not None and answer.mask.why:
            self._fail(answer.ask.number, f"the answer could not be held to its grammar: {answer.mask.why[:300]}", 400)
            return None
        if token.chosen.token not in answer.ask.sampling.stop_ids:
            answer.tokens.append(_token(self.words, token.chosen))
        if token.scores is not None:
            first = answer.ask.prompt[0]
            begin = Token(first, self.words.decode([first], specials=True), None, ())
            answer.prompt = (begin, *(_token(self.words, one) for one in token.scores))
        ends = token.reason is not None
        text = answer.stream.take(all=ends) if ends or answer.ask.streams else ""
        if not ends and not (answer.ask.streams and answer.tokens):
            return None
        message = Delta(answer.ask.number, answer.index, text, tuple(answer.tokens), token.reason, answer.prompt)
        answer.tokens, answer.prompt = [], ()
        if ends:
            del self.answers[lane, token.key]
            _, open_keys = self.keys[answer.ask.number]
            open_keys.remove(token.key)
            if not open_keys:  # a cancel that is on its way finds nothing, and frees nothing twice
                del self.keys[answer.ask.number]
        return message

    def _fail(self, number: int, why: str, status: int) -> None:
        """An ask that is not answered, with all its answers."""
        lane, keys = self.keys.pop(number)
        for key in keys:
            self.lanes[lane].cancel(key)
            self.answers.pop((lane, key), None)
        self.send(Failure(number, why, status))

    def _lost(self, why: str) -> None:
        for number in list(self.keys):
            self._fail(number, f"the engine could not go on with this request: {why}", 500)


def _watching(stream: TextStream, push: Callable[[int], bool] | None) -> Callable[[int], bool]:
    """Text of a token, and the grammar's state after it."""

    def watch(token: int) -> bool:
        # Both must see the token: `whole or stream.push(token)` would leave the last token out of the text where the
        # grammar ends.
        whole = push is not None and push(token)
        return stream.push(token) or whole

    return watch


def _token(words: Vocabulary, chosen: ChosenToken) -> Token:
    if chosen.logprob is None:
        return Token(chosen.token, "", None, ())
    top = tuple((token, words.decode([token], specials=True), value) for token, value in chosen.top)
    return Token(chosen.token, words.decode([chosen.token], specials=True), chosen.logprob, top, chosen.rank)


def open_worker(
    settings: Settings, send: Callable[[Any], None], seat: Seat | None = None, others: Sequence[Connection] = ()
) -> Worker:
    """The engine that settings ask for. seat, others: of a replica of several processes, this one's place and its pipes
    to the others."""
    folder = Path(settings.folder)
    if seat is None:
        lanes = [
            open_model(
                folder,
                settings.rules,
                dtype=settings.dtype,
                kv_bytes=settings.kv_bytes,
                weights=settings.weights,
                max_model_len=settings.max_model_len,
                adapters=settings.adapters,
                resident_bytes=settings.resident_bytes,
                head=settings.head,
            )
        ]
    else:
        model, longest = load_late("gnomon.serve.divided:lead")(settings, seat, others)
        lanes = [Engine(model, settings.rules, max_model_len=longest, lane=lane) for lane in range(model.sizes.lanes)]
    return Worker(lanes, Vocabulary.open(folder, settings.tokenizer), send)


def _heard(connection: Connection, worker: Worker, *, waits: bool) -> list[Any]:
    """Waits for which of both has something to say. waits: until one has."""
    if waits or worker.making:
        return wait([connection, worker.grammars_done], None if waits else 0)
    return [connection] if connection.poll(0) else []  # a tenth of the time of the other


def main(
    environment: Mapping[str, str],
    connection: Connection,
    settings: Settings,
    seat: Seat | None,
    others: Sequence[Connection],
) -> None:
    """Serves until the front end goes or says so. environment: the front end's, which a fork server has not. seat,
    others: as `open_worker` has them; a rank that is not the first follows the one at the other end of `connection`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front end says when to end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_starter()
    os.environ.clear()
    os.environ.update(environment)
    settings.use_threads()
    if seat is not None and seat.rank:
        load_late("gnomon.serve.divided:follow")(connection, settings, seat)
        return
    try:
        worker = open_worker(settings, connection.send, seat, others)
        if settings.record_experts is not None:
            worker.record()
    except GnomonError as error:
        connection.send(Failure(-1, str(error), 500))
        return
    most = min(min(engine.max_model_len, engine.scheduler.longest()) for engine in worker.lanes)
    connection.send(Ready(max_model_len=most, vocab_size=worker.lanes[0].vocab_size))
    last_stats = worker.stats()
    while True:
        try:
            worker.step()
            now = worker.stats()
            if now != last_stats and (not worker.has_work or now.iterations - last_stats.iterations >= TOLD_AFTER):
                connection.send(now)
                last_stats = now
            waits = not worker.has_work
            # Messages are taken between two iterations, all that are there: an ask, or a cancel of a stream that is
            # dropped, never meets a batch half-way, and many that come at once are in the next batch together.
            while ready := _heard(connection, worker, waits=waits):
                if worker.grammars_done in ready:
                    worker.take_made()
                if connection in ready:
                    message = connection.recv()
                    if isinstance(message, Stop):
                        worker.end(settings.record_experts)
                        return
                    worker.take(message)
                waits = False  # what it changed is to be told, even where there is nothing to do
        except (EOFError, BrokenPipeError, ConnectionResetError):  # the front end is gone
            return
