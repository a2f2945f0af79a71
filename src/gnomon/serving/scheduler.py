"""What an engine decides: the batch of the next iteration, from its state, what came in and what has finished.

`Scheduler.step(arrivals, finished)` returns a `Batch`: pieces of prompts (first token, tokens) and how many requests
decode over how many KV tokens. Its rules are the fields of an `Engine`; no engine is named here. A decode-only batch
stays the same until somebody finishes or comes, or blocks run out: `steady()` says for how many iterations, `advance`
takes them at once. Blocks are counts, unless a `KvBlocks` says which one is whose (a request's share is
`Running.blocks`). Leaves out seconds (`iteration`), tokens, and priorities between requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gnomon.errors import InputError
from gnomon.serving.kv_blocks import KvBlocks
from gnomon.software.engine import Engine


class Arrival(NamedTuple):
    """A request that has come."""

    key: int
    """Its caller's name for it."""
    prompt: int
    """Tokens to compute before it decodes: of an encoder with a decoder those that an answer begins after."""
    most: int
    """Output tokens that it may ask for."""
    cached: int
    """Tokens at the beginning that need no computing."""
    source: int = 0
    """Tokens of a text that an encoder reads for it, whole; 0: there is no encoder."""


@dataclass(slots=True)
class Running:
    """A request as the scheduler sees it."""

    key: int
    """The name that its caller gives it."""
    prompt: int
    """Tokens to compute before it decodes: its prompt, and after a preemption also what it had answered."""
    most: int
    """Output tokens that it may still ask for."""
    cached: int
    """Tokens at the beginning that need no computing, at most prompt - 1."""
    num_computed: int = 0
    """Tokens computed, cached ones included."""
    source: int = 0
    """As in `Arrival`. Its keys and values are held from admission on, in blocks as large as the answer's."""
    blocks: int = 0
    """KV blocks that it holds."""
    order: int = 0
    """Place in the order of admission; the last is preempted first."""
    start: int = 0
    """Length minus decode steps of the scheduler when it began to decode: length now is `start + steps`."""
    began: int = 0
    """Decode steps of the scheduler when it began to decode."""


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """Tokens of one prompt that an iteration computes."""

    key: int
    """The request whose prompt it is."""
    prefix: int
    """Tokens before them, computed or cached."""
    new: int
    """Tokens that the iteration computes."""
    last: bool
    """Whether the prompt ends with them, so that the iteration makes the first token of the answer."""
    source: int = 0
    """Tokens that an encoder reads in it, before these; 0: none."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one iteration computes."""

    pieces: Sequence[PromptPiece]
    """Parts of prompts that it computes."""
    decodes: int
    """The number of requests that get one more token each."""
    kv_tokens: int
    """Keys that all of them attend to, the new ones included."""
    preempted: Sequence[int]
    """Requests that lost their blocks before it, and wait again."""
    sources: int = 0
    """Keys of the texts that an encoder read for those who decode, which they attend to beside their own."""

    @property
    def new_tokens(self) -> int:
        """Tokens of prompts in it."""
        return sum(piece.new for piece in self.pieces)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.pieces and not self.decodes


IDLE = Batch(pieces=(), decodes=0, kv_tokens=0, preempted=())
"""The batch with nothing to do until somebody comes."""


class Scheduler:
    """The state of an engine and its rules. `blocks`: KV blocks that the device has. `memory`: says which block is
    whose, where they are real; then how much of a prompt needs no computing is what it finds as it is admitted, and
    blocks that several requests share count once."""

    def __init__(self, engine: Engine, blocks: int, memory: KvBlocks | None = None) -> None:
        if blocks < 1:
            raise InputError(f"an engine with {blocks} KV blocks can serve nothing")
        self.engine, self.memory = engine, memory
        self.total = self.free = blocks
        self.size = engine.block_tokens
        # Blocks that admission leaves free, so that running requests can grow for a while.
        self.low = int(engine.watermark * blocks)
        self.waiting: deque[Running] = deque()
        self.filling: deque[Running] = deque()
        """Requests that are admitted and whose prompts are not whole yet."""
        self.decoding: dict[int, Running] = {}
        """Requests that decode, in order of the end of their prompts."""
        self.steps = 0
        """Decode steps so far."""
        self.kv = 0
        """Keys that the decoding requests attend to in the next step."""
        self.sources = self.source_blocks = 0
        """Keys of what an encoder read for them, and the blocks that these lie in."""
        self.phases = [0] * self.size
        """Counts of decoding requests by (start mod block size): how soon they need their next block."""
        self.admitted = 0
        self.promised = 0
        """Blocks that running requests may still take, where each is promised all it may ask for."""
        self.growing = 0
        """Blocks of this step's decodes, which a `memory` gives out when the batch is run."""
        self.asked = 0
        """Output tokens that running requests may still ask for."""

    @property
    def running(self) -> int:
        """Requests that have been admitted and have not finished."""
        return len(self.decoding) + len(self.filling)

    @property
    def used(self) -> int:
        """KV blocks that running requests hold."""
        return self.total - self.free

    def longest(self) -> int:
        """Tokens of the longest request that its memory holds."""
        return (self.total - self.low) * self.size

    def length(self, key: int) -> int:
        """Keys that a decoding request attends to in the next step."""
        return self.decoding[key].start + self.steps

    def decode_order(self) -> Iterable[int]:
        """Requests that decode, in the order of a batch's rows."""
        return self.decoding

    def step(self, arrivals: Iterable[tuple[int, ...]], finished: Iterable[int]) -> Batch:
        """The next iteration, whose results the caller takes for granted: tokens in it count as computed after.

        arrivals: `Arrival`s, or tuples of their fields, of those that came since the last step.
        finished: keys of decoding requests that have all their tokens. InputError for a request that can never fit.
        """
        self.growing = 0
        for key in finished:
            self._release(key)
        for key, prompt, most, cached, source in (Arrival(*one) for one in arrivals):
            new = prompt - min(cached, prompt - 1)
            if not self.engine.chunked_prefill and new > self.engine.max_batched_tokens:
                raise InputError(
                    f"a prompt of {new} tokens is more than max_batched_tokens {self.engine.max_batched_tokens}, and "
                    f"without chunked prefill it would wait for ever; cut prompts in chunks or raise the budget"
                )
            # Without the last output token, whose key nobody reads.
            needs = -(-(prompt + most - 1) // self.size) - (-source // self.size)
            if needs > self.total - self.low:
                raise InputError(
                    f"a request of {source or prompt} input and {most} output tokens needs {needs} KV blocks of "
                    f"{self.size}, and there are {self.total - self.low}: at most {self.longest()} tokens"
                )
            self.waiting.append(
                Running(key=key, prompt=prompt, most=most, cached=min(cached, prompt - 1), source=source)
            )
        engine = self.engine
        # Without mixed batches prompts go first and alone; decodes wait.
        if not engine.mixed:
            pieces = self._pieces(engine.max_batched_tokens)
            if pieces:
                return Batch(pieces, 0, 0, ())
            preempted = self._grow()
            if not self.decoding:
                # All decodes were preempted: their blocks are free now, and the first of them begins again at once.
                pieces = self._pieces(engine.max_batched_tokens) if preempted else []
                return Batch(pieces, 0, 0, preempted) if pieces else IDLE
            return self._decode((), preempted)
        # Mixed: decodes first (each takes one token of the budget), then pieces of prompts with what is left.
        preempted = self._grow()
        # After a preemption nobody is admitted in the same iteration: blocks are short, and who has just lost its own
        # would take them again.
        waits = self.filling or self.waiting
        pieces = self._pieces(engine.max_batched_tokens - len(self.decoding), new=not preempted) if waits else []
        return self._decode(pieces, preempted)

    def _decode(self, pieces: Sequence[PromptPiece], preempted: Sequence[int]) -> Batch:
        """The batch with all decodes in it; those whose prompts end in it decode from the next step on."""
        # A prompt that ends in this iteration makes its first token now and decodes from the next one on.
        count = len(self.decoding) - sum(piece.last for piece in pieces)
        if not count:
            return Batch(pieces, 0, 0, preempted) if pieces or preempted else IDLE
        # `_fill` has already counted these among the decodes, so their keys are taken off for this one iteration.
        begun = sum(self.decoding[piece.key].start + self.steps for piece in pieces if piece.last)
        read = sum(self.decoding[piece.key].source for piece in pieces if piece.last) if self.sources else 0
        batch = Batch(pieces, count, self.kv - begun, preempted, self.sources - read)
        self.steps += 1
        for piece in pieces:  # they have not moved: their length is as before the step
            if piece.last:
                self._shift(self.decoding[piece.key])
        self.kv += count
        self.asked -= count
        return batch

    def _shift(self, run: Running) -> None:
        # A request one step younger: its phase moves by one, its length stays as it was.
        self.phases[run.start % self.size] -= 1
        run.start -= 1
        run.began += 1
        self.phases[run.start % self.size] += 1

    def _blocks_after(self, steps: int) -> int:
        """Blocks that the decoding requests need beside those they hold, for their next `steps` decodes."""
        size, now = self.size, self.steps
        # Every `size` decodes a request fills one block, so whole rounds cost one block each.
        rounds, rest = divmod(steps, size)
        need = rounds * len(self.decoding)
        # the j-th decode of a request has start + now + j keys; it begins a block where that is 1 mod size
        for j in range(rest):
            need += self.phases[(1 - now - j) % size]
        return need

    def _grow(self) -> list[int]:
        """Blocks for the next decode of everybody, by preempting the last admitted where there are too few."""
        preempted: list[int] = []
        need = self._need_now()
        while need > self.free:
            # The last admitted loses its blocks first: the oldest are the nearest to their ends.
            run = max(self.decoding.values(), key=lambda r: r.order)
            if self.filling and self.filling[-1].order > run.order:
                run = self.filling.pop()
                self._give_back(run.key, run.blocks)
                self.asked -= run.most
                self._again(run, run.prompt, run.most)
            else:
                # What it had answered is computed again as part of its prompt (recomputation, not swapping).
                length, num_generated = self.length(run.key), self.steps - run.began
                self._release(run.key)
                self._again(run, length, run.most - 1 - num_generated)
            preempted.append(run.key)
            need = self._need_now()
        if need:
            self._take(need)
        return preempted

    def _need_now(self) -> int:
        """Blocks for the next decode: of those whose new key begins a block."""
        return self.phases[(1 - self.steps) % self.size] if self.decoding else 0

    def _take(self, blocks: int) -> None:
        self.free -= blocks
        self.growing = blocks
        self.promised -= blocks if self.engine.preemption == "none" else 0

    def _again(self, run: Running, prompt: int, most: int) -> None:
        """A preempted request, first in the queue; what it had answered is part of its prompt now."""
        self.waiting.appendleft(Running(key=run.key, prompt=prompt, most=most, cached=0, source=run.source))

    def _read(self, run: Running) -> int:
        """Blocks of what an encoder reads for a request."""
        return -(-run.source // self.size)

    def _written_blocks(self, run: Running) -> int:
        """Blocks of a decoding request: those of the keys that are written."""
        # start + steps is the length; the newest token's key is written in the step that computes it.
        return -(-(self.steps + run.start - 1) // self.size) + self._read(run)

    def _release(self, key: int) -> None:
        run = self.decoding.pop(key)
        blocks = self._written_blocks(run)
        self._give_back(key, blocks)
        self.asked -= run.most - (self.steps - run.began)
        self.kv -= run.start + self.steps
        self.sources -= run.source
        self.source_blocks -= self._read(run)
        self.phases[run.start % self.size] -= 1
        if self.engine.preemption == "none":
            self.promised -= self._whole(run) - blocks

    def _give_back(self, key: int, blocks: int) -> None:
        if self.memory is None:
            self.free += blocks
        else:
            self.memory.release(key)
            self.free = self.memory.free

    def cancel(self, key: int) -> bool:
        """A request that nobody waits for any more leaves, wherever it is, with its blocks. Whether it was here."""
        if key in self.decoding:
            self._release(key)
            return True
        for queue in (self.filling, self.waiting):
            run = next((run for run in queue if run.key == key), None)
            if run is None:
                continue
            queue.remove(run)
            if queue is self.filling:
                self._give_back(key, run.blocks)
                self.asked -= run.most
                if self.engine.preemption == "none":
                    self.promised -= self._whole(run) - run.blocks
            return True
        return False

    def _whole(self, run: Running) -> int:
        """Blocks of all its tokens but the last, which nobody reads."""
        return -(-(run.prompt + run.most - 1) // self.size) + self._read(run)

    def _pieces(self, budget: int, *, new: bool = True) -> list[PromptPiece]:
        """Parts of prompts for so many tokens: those begun go on, then who waits is admitted, in order."""
        pieces: list[PromptPiece] = []
        engine = self.engine
        # A prompt stays in `filling` only if it used up the budget, so there is one at most.
        while self.filling and budget > 0:
            budget -= self._fill(self.filling.popleft(), budget, pieces)
        while new and self.waiting and budget > 0 and self.running < engine.max_seqs:
            run = self.waiting[0]
            reserve = self._admission(run, budget, bool(pieces))
            # Admission is in order of arrival: if the first does not fit, nobody behind it is looked at.
            if reserve is None:
                break
            self.waiting.popleft()
            if self.memory is not None:
                run.cached = self.memory.admit(run.key)
            run.blocks, run.num_computed, run.order = (
                -(-run.prompt // self.size) + self._read(run),
                run.cached,
                self.admitted,
            )
            self.admitted += 1
            self.free = self.free - run.blocks if self.memory is None else self.memory.free - self.growing
            self.promised += reserve
            self.asked += run.most
            whole = run.prompt - run.cached
            budget -= run.source  # an encoder's text is not cut: what it leaves is its decoder's, a token at least
            budget -= self._fill(run, max(budget, 1) if engine.chunked_prefill else max(budget, whole), pieces)
        return pieces

    def _fill(self, run: Running, budget: int, pieces: list[PromptPiece]) -> int:
        tokens = min(run.prompt - run.num_computed, budget)
        last = run.num_computed + tokens == run.prompt
        # The encoder reads the text with the first piece only.
        pieces.append(
            PromptPiece(run.key, run.num_computed, tokens, last, 0 if run.num_computed > run.cached else run.source)
        )
        run.num_computed += tokens
        if last:
            # start + steps is the length at any time: storing start makes growing all decodes one addition.
            run.start, run.began = run.prompt + 1 - self.steps, self.steps
            self.decoding[run.key] = run
            self.kv += run.prompt + 1
            self.sources += run.source
            self.source_blocks += self._read(run)
            self.phases[run.start % self.size] += 1
        else:
            self.filling.append(run)
        return tokens

    def may_admit(self) -> bool:
        """Whether a request that came now would not wait only behind others: the queue is empty and a place is free."""
        return not self.waiting and self.running < self.engine.max_seqs

    def steady(self, num_steps: int) -> int:
        """Decode-only iterations, at most `num_steps`, that follow alike if nobody comes or finishes; 0 if the next one
        is not one of them: somebody's prompt is to be computed or blocks are short."""
        if self.filling or not self.decoding or num_steps <= 0 or (self.waiting and self._admissible()):
            return 0
        if self._blocks_after(num_steps) <= self.free:
            return num_steps
        # Bisection: needed blocks only grow with steps.
        low, high = 0, num_steps
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._blocks_after(middle) <= self.free else (low, middle)
        return low

    def _admission(self, run: Running, budget: int, begun: bool) -> int | None:
        """Blocks promised beside those of its prompt, if the request may be admitted now; else None.

        begun: whether other prompts are in the batch already. Where prompts are not cut, one that grew longer than a
        whole budget, preempted with what it had answered, goes alone.
        """
        engine, shared = self.engine, 0
        if self.memory is not None:
            run.cached, shared = self.memory.find(run.key)
        missing = run.prompt - run.cached
        if not engine.chunked_prefill and missing > budget and (begun or missing <= engine.max_batched_tokens):
            return None
        if begun and run.source and run.source + 1 > budget:
            return None  # texts are read whole: one that is longer than what is left goes beside decodes alone
        blocks = -(-run.prompt // self.size) + self._read(run)
        if engine.preemption == "none":
            # Without preemption a request is admitted only if everything it may ever take is free.
            promise = self._whole(run) - blocks
            return promise if blocks - shared + promise + self.low <= self.free - self.promised else None
        # `step` refused what can never fit, so an empty engine has room for any request.
        if not self.running:
            return 0
        if self.memory is not None:
            # Otherwise a share of the outputs to come is kept free (`reserved_output`).
            reserved = -(-int((self.asked + run.most) * engine.reserved_output) // self.size)
            return 0 if blocks - shared + reserved + self.low <= self.free else None
        # in tokens, not blocks: a decode takes more of them than of what it may still ask for, so that who is not
        # admitted now is not admitted later in a run of decodes either
        room = (self.total - self.low - self.source_blocks - sum(run.blocks for run in self.filling)) * self.size
        written = self.kv - len(self.decoding)
        expected = (self.asked + run.most) * engine.reserved_output
        fits = blocks + self.low <= self.free and blocks * self.size + expected <= room - written
        return 0 if fits else None

    def _admissible(self) -> bool:
        """Whether the first that waits would be admitted now."""
        engine = self.engine
        budget = engine.max_batched_tokens - (len(self.decoding) if engine.mixed else 0)
        if self.running >= engine.max_seqs or budget <= 0:
            return False
        return self._admission(self.waiting[0], budget, begun=False) is not None

    def advance(self, steps: int) -> tuple[int, int]:
        """(decodes, KV tokens of the first) of `steps` decode-only iterations, at most `steady()`, taken at once."""
        batch = len(self.decoding), self.kv
        self._take(self._blocks_after(steps))
        self.steps += steps
        self.kv += steps * batch[0]
        self.asked -= steps * batch[0]
        return batch
