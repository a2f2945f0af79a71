"""The engine: requests come in, iterations run, tokens come out.

`Engine.add(prompt, sampling)` queues a request, `step()` runs one iteration, which the scheduler of room `serving`
decides, and returns the tokens that it made, `cancel(key)` ends a request wherever it is. One thread calls all three.
`begin()` and `end()` are the halves of a step, between which another engine's may run on the same model (a lane of a
pipeline).
Leaves out text (`text`), HTTP (`server`) and seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from gnomon.errors import InputError
from gnomon.serve.choose import ChosenToken, LogitsRow, choose, scores
from gnomon.serve.graph_head import GraphHead
from gnomon.serve.rows import Part, Turn
from gnomon.serve.sampling import Sampling
from gnomon.serve.sizes import Sizes
from gnomon.serving.kv_blocks import KvBlocks
from gnomon.serving.scheduler import Arrival, Batch, Scheduler
from gnomon.software.engine import Engine as Rules

Reason = Literal["stop", "length"]
"""Why an answer ended, in OpenAI's words."""
Watch = Callable[[int], bool]
"""Is told each token of an answer; whether the answer ends with it (a stop string)."""


@dataclass(slots=True, kw_only=True)
class AnswerRequest:
    """The request of one answer."""

    key: int
    """The engine's name for it."""
    prompt: Sequence[int]
    """Tokens of the prompt."""
    sampling: Sampling
    """How tokens are chosen."""
    row: LogitsRow
    watch: Watch | None
    adapter: int
    """Of the model's, -1 for none."""
    answer: list[int] = field(default_factory=list)
    """Tokens that were made so far."""
    reason: Reason | None = None
    """Why the answer has ended; None: it goes on."""
    cached: int = 0
    """Tokens of its prompt that needed no computing when it was last admitted."""
    preempted: int = 0
    """Times that it lost its blocks."""
    source: int = 0
    """Tokens that an encoder reads for it; 0: there is none."""
    scores: list[ChosenToken] | None = None
    """Log-probabilities of its prompt's tokens from the second on, as far as they are computed; None: nobody asked."""


@dataclass(frozen=True, slots=True)
class EngineToken:
    """A token of a request."""

    key: int
    """Whose it is."""
    chosen: ChosenToken
    """The token."""
    reason: Reason | None
    """Why the answer ends with it; None: it goes on. A token of `stop_ids` is no part of the answer."""
    scores: tuple[ChosenToken, ...] | None = None
    """With the first token of an answer, where they were asked for: log-probabilities of its prompt's tokens from the
    second on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """What an iteration did, for records that are replayed."""

    arrivals: tuple[Arrival, ...]
    """Those that came before it."""
    finished: tuple[int, ...]
    """Keys of those that ended before it."""
    cancelled: tuple[int, ...]
    """Keys of those that nobody waits for any more."""
    batch: Batch
    """What it computed."""


class Model(Protocol):
    """What computes (`decoder.Decoder`, or `divided.Leader` with other processes)."""

    sizes: Sizes

    @property
    def vocab_size(self) -> int: ...

    @property
    def ranks(self) -> int:
        """Processes that compute an iteration together."""

    def adapter(self, name: str) -> int: ...

    def blocks(self, *, prefix_cache: bool) -> KvBlocks: ...

    def start(self, turn: Turn) -> None:
        """Begins an iteration on the model."""

    def logits(self) -> Tensor:
        """(wanted, vocabulary) of the iteration that began first of those that are under way."""


def check_ids(prompt: Sequence[int], vocab_size: int) -> None:
    """InputError for a token that the model's table has no row of, whatever its tokenizer knows."""
    if bad := [token for token in (min(prompt), max(prompt)) if not 0 <= token < vocab_size]:
        raise InputError(f"the prompt has token {bad[0]}, and the model's tokens are 0 to {vocab_size - 1}")


class Engine:
    """A model that answers."""

    def __init__(self, model: Model, rules: Rules, *, max_model_len: int, lane: int = 0) -> None:
        """Takes the rules (the record of the engine, as predictions have it), max_model_len (tokens of prompt and
        answer) and the lane whose blocks it has, of those that the model is made for."""
        self.model, self.rules, self.max_model_len, self.lane = model, rules, max_model_len, lane
        self.memory: KvBlocks = model.blocks(prefix_cache=rules.prefix_cache)
        self.scheduler = Scheduler(rules, model.sizes.blocks, self.memory)
        self.requests: dict[int, AnswerRequest] = {}
        self.record: list[Iteration] | None = None
        """Where iterations are written to, if they are."""
        self.iterations = self.preemptions = 0
        self._next = 0
        self._arrivals: list[AnswerRequest] = []
        self._finished: list[int] = []
        self._cancelled: list[int] = []
        self._after: dict[int, list[AnswerRequest]] = {}
        """Request -> others with its prompt, which come when that is computed."""
        self._parts_begun: list[Part] = []
        self.head: GraphHead | None = None
        """What makes logits of what the model gives; None: the model itself."""

    @property
    def vocab_size(self) -> int:
        """Tokens that logits are about."""
        return self.model.vocab_size if self.head is None else self.head.vocab_size

    @property
    def waiting(self) -> int:
        """Requests that have no blocks."""
        return len(self._arrivals) + len(self.scheduler.waiting) + sum(map(len, self._after.values()))

    @property
    def running(self) -> int:
        """Requests that have blocks."""
        return self.scheduler.running - len(self._finished)

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""
        return bool(
            self.is_under_way or self._arrivals or self._finished or self.scheduler.running or self.scheduler.waiting
        )

    @property
    def is_under_way(self) -> bool:
        """Whether an iteration has begun and not ended."""
        return bool(self._parts_begun)

    def check(self, tokens: int, sampling: Sampling) -> None:
        """InputError for a request that can never be answered."""
        if tokens < 1:
            raise InputError("a prompt has at least one token")
        most = min(self.max_model_len, self.scheduler.longest())
        if tokens + sampling.max_tokens > most:
            raise InputError(
                f"the request asks for {tokens} + {sampling.max_tokens} tokens (prompt and max_tokens), and the model "
                f"is served with at most {most}; shorten the prompt or lower max_tokens"
            )

    def add(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        first: int = 0,
        count: int = 1,
        watch: Sequence[Watch] = (),
        mask: Sequence[Callable[[], Tensor | None]] = (),
        adapter: str = "",
        source: int = 0,
        salt: str = "",
    ) -> list[int]:
        """Keys of `count` answers to a prompt, which is computed once where pages can be shared. first: of all answers
        to it, the number of the first of these. watch, mask: of each answer, as `AnswerRequest` and `LogitsRow` say.
        adapter: by its name; keys of one are no other's. source: tokens that an encoder reads for each. salt: keys of
        one are no other's either. Number 0 has the prompt's log-probabilities, where they are asked for."""
        which = self.model.adapter(adapter)
        self.check(len(prompt), sampling)
        check_ids(prompt, self.vocab_size)
        prompt = tuple(prompt)
        keys: list[int] = []
        for index in range(count):
            answer: list[int] = []
            row = LogitsRow.of(sampling, prompt, answer, first + index)
            row.mask = mask[index] if mask else None
            request = AnswerRequest(
                key=self._next, prompt=prompt, sampling=sampling, row=row, answer=answer,
                watch=watch[index] if watch else None, adapter=which, source=source,
            )  # fmt: skip
            # Pages are shared by what was computed from: the same tokens under another adapter have other keys and
            # values. The zero byte keeps a name and a salt apart, whatever they consist of.
            whose = f"{adapter}\0{salt}".encode()
            if sampling.prompt_logprobs >= 0 and first + index == 0:
                request.scores = []
                whose += f"\0{self._next}".encode()  # a beginning that is found has no logits: it finds its own alone
            self._next += 1
            self.requests[request.key] = request
            parent = keys[0] if keys and self.memory.prefix_cache else None
            self.memory.add(request.key, prompt, salt=whose, fork_of=parent, source=source)
            if parent is None:
                self._arrivals.append(request)
            else:  # it finds the prompt's blocks only once they are written: it comes when its parent has a token
                self._after.setdefault(parent, []).append(request)
            keys.append(request.key)
        return keys

    def cancel(self, key: int) -> None:
        """Nobody waits for it any more. One that has ended is left alone."""
        request = self.requests.pop(key, None)
        if request is None:
            return
        # Between `begin` and `end` as well: its blocks go back while the iteration still writes to them. Nobody reads
        # them before it has ended, since blocks are handed out in `begin` alone, and `end` marks as written (for others
        # to find) only what sequences that are still there have.
        self._arrivals += self._after.pop(key, [])
        self._after = {parent: [r for r in rest if r.key != key] for parent, rest in self._after.items()}
        if request in self._arrivals:
            self._arrivals.remove(request)
        elif self.scheduler.cancel(key):
            self._cancelled.append(key)
        self.memory.remove(key)

    def step(self) -> list[EngineToken]:
        """Runs an iteration; nothing where there is nothing to do."""
        return self.end() if self.begin() else []

    def begin(self) -> bool:
        """Begins an iteration; False where there is nothing to compute."""
        arrivals, finished, cancelled = self._arrivals, self._finished, self._cancelled
        self._arrivals, self._finished, self._cancelled = [], [], []
        came = [Arrival(r.key, len(r.prompt), r.sampling.max_tokens, 0, r.source) for r in arrivals]
        batch = self.scheduler.step(came, finished)
        # Their blocks are free already: the scheduler has let them go before it admitted others, as it does for the
        # simulator, which has nothing else to forget.
        for key in finished:
            self.memory.remove(key)
        if self.record is not None:
            self.record.append(
                Iteration(arrivals=tuple(came), finished=tuple(finished), cancelled=tuple(cancelled), batch=batch)
            )
        for key in batch.preempted:
            self.requests[key].preempted += 1
            self.preemptions += 1
            self.forget_blocks(key)
        if not batch.pieces and not batch.decodes:
            return False
        self.iterations += 1
        parts = self._parts(batch)
        self.model.start(self._turn(parts))
        self._parts_begun = parts
        return True

    def forget_blocks(self, key: int) -> None:
        """A request has lost its blocks: of what lies in them nothing is left."""

    def end(self) -> list[EngineToken]:
        """What the iteration made that `begin` began."""
        parts, self._parts_begun = self._parts_begun, []
        logits = self.model.logits()
        if self.head is not None:
            whose = [self.requests.get(part.key) for part in parts for _ in part.logit_places]
            logits = self.head.logits(logits, [one.row if one is not None else None for one in whose])
        for part in parts:
            if part.key in self.memory.sequences:
                self.memory.mark_written(part.key, part.start + len(part.tokens))
        if any(part.scored for part in parts):
            logits = self._scored(parts, logits)
        return self._chosen([part.key for part in parts if part.samples], logits)

    def _scored(self, parts: Sequence[Part], logits: Tensor) -> Tensor:
        """Notes log-probabilities of prompts' tokens; returns the logits of the rows that a token is chosen from.
        logits: (wanted, vocabulary)."""
        at, chosen = 0, []
        for part in parts:
            count, request = len(part.scored), self.requests.get(part.key)
            if count and request is not None and request.scores is not None:
                first = part.start + part.scored.start + 1
                targets = request.prompt[first : first + count]
                request.scores += scores(logits[at : at + count], targets, request.sampling.prompt_logprobs)
            chosen += [at + count] * part.samples
            at += count + part.samples
        return logits[chosen]

    def _parts(self, batch: Batch) -> list[Part]:
        parts, sequences = [], self.memory.sequences
        for piece in batch.pieces:
            request, stop = self.requests[piece.key], piece.prefix + piece.new
            request.cached = sequences[piece.key].num_cached
            tokens = sequences[piece.key].tokens[piece.prefix : stop]
            scored = range(0)
            if request.scores is not None:
                # after a preemption only what was not scored before; the prompt's last token says nothing of it
                begin = max(0, len(request.scores) - piece.prefix)
                scored = range(begin, max(begin, min(stop, len(request.prompt) - 1) - piece.prefix))
            parts.append(
                Part(piece.key, piece.prefix, tokens, piece.last, len(request.prompt), request.adapter, scored)
            )
        if batch.decodes:
            # A prompt whose last piece is in this batch has its first token from that piece, and is no decode yet.
            ended = {piece.key for piece in batch.pieces if piece.last}
            for key in self.scheduler.decode_order():
                if key not in ended:
                    tokens = sequences[key].tokens
                    request = self.requests[key]
                    prompt, adapter = len(request.prompt), request.adapter
                    parts.append(Part(key, len(tokens) - 1, tokens[-1:], True, prompt, adapter))
        return parts

    def _turn(self, parts: Sequence[Part]) -> Turn:
        memory = self.memory
        # Blocks that several share are copied before one of them is written to (copy-on-write). `extend` notes which;
        # they go with this iteration, whose ranks copy first and write then.
        for part in parts:
            memory.extend(part.key, part.start, part.start + len(part.tokens))
        first = [self.lane * pool.total for pool in memory.pools]
        copies = [(source + first[0], target + first[0]) for source, target in memory.copies]
        memory.copies.clear()
        sequences = [memory.sequences[part.key] for part in parts]
        tables = [[sequence.tables[group] for sequence in sequences] for group in range(len(memory.pools))]
        if self.lane:
            tables = [
                [[at if at < 0 else at + begin for at in table] for table in group]
                for begin, group in zip(first, tables, strict=True)
            ]
        slot = self.lane * self.model.sizes.slots
        states = [(source + slot, target + slot) for source, target in memory.states]
        memory.states.clear()
        marks: list[list[tuple[int, int]]] = []
        if any(sequence.taking for sequence in sequences):
            marks = [[(tokens, target + slot) for tokens, target in sequence.taking] for sequence in sequences]
        return Turn(parts, tables, [slot + sequence.slot for sequence in sequences], copies, states, marks)

    def _chosen(self, keys: Sequence[int], logits: Tensor) -> list[EngineToken]:
        here = [at for at, key in enumerate(keys) if key in self.requests]  # others were cancelled meanwhile
        if len(here) < len(keys):
            logits = logits[here]
        requests = [self.requests[keys[at]] for at in here]
        out: list[EngineToken] = []
        if not requests:
            return out
        for request, chosen in zip(requests, choose(logits, [request.row for request in requests]), strict=True):
            token, sampling = chosen.token, request.sampling
            of_prompt = tuple(request.scores) if request.scores is not None and not request.answer else None
            stops = token in sampling.stop_ids
            if not stops:
                request.answer.append(token)
            self.memory.sequences[request.key].tokens.append(token)
            if stops or (request.watch is not None and request.watch(token)):
                request.reason = "stop"
            elif len(request.answer) >= sampling.max_tokens:
                request.reason = "length"
            out.append(EngineToken(request.key, chosen, request.reason, of_prompt))
            # its prompt is written by now: other answers to it find it
            self._arrivals += self._after.pop(request.key, [])
            if request.reason is not None:
                # its blocks go back when the next iteration begins, and the scheduler is told: not before it knows
                self._finished.append(request.key)
                del self.requests[request.key]
        return out
