"""Block tables after any history: no block is lost, none has two contents, and what is read is what was written.

A made engine writes into every place of a block which tokens led there; before each iteration every running request's
tables must lead to its own; a scan's state is the tokens that it has seen. So a prefix that is found wrongly, a copy
that is missing, a window that lets go too early and a snapshot of another beginning all show.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.serving.kv_blocks import KvBlocks
from gnomon.serving.scheduler import Batch, Scheduler
from gnomon.software.engine import engine


class Made:
    """An engine without a model: what is written is the tokens up to there."""

    def __init__(self, memory: KvBlocks, blocks: int, *, budget: int, seqs: int) -> None:
        rules = replace(engine("gnomon"), block_tokens=memory.size, max_batched_tokens=budget, max_seqs=seqs)
        self.memory, self.scheduler = memory, Scheduler(rules, blocks, memory)
        self.places: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self.states: dict[int, tuple[int, ...]] = {}
        self.left: dict[int, int] = {}
        self.arrivals: list[tuple[int, ...]] = []
        self.finished: list[int] = []

    def add(self, key: int, prompt: list[int], most: int, fork_of: int | None = None, source: int = 0) -> None:
        self.memory.add(key, prompt, fork_of=fork_of, source=source)
        self.left[key] = most
        self.arrivals.append((key, len(prompt), most, 0, source))

    def cancel(self, key: int) -> None:
        if key in self.finished or key not in self.left:
            return
        del self.left[key]
        if any(one[0] == key for one in self.arrivals):
            self.arrivals = [one for one in self.arrivals if one[0] != key]
        else:
            assert self.scheduler.cancel(key)
        self.memory.remove(key)

    def step(self) -> Batch:
        arrivals, finished = self.arrivals, self.finished
        self.arrivals, self.finished = [], []
        batch = self.scheduler.step(arrivals, finished)
        for key in finished:
            self.memory.remove(key)
        held, ended = self.memory.sequences, {piece.key for piece in batch.pieces if piece.last}
        parts = [(piece.key, piece.prefix, piece.prefix + piece.new, piece.last) for piece in batch.pieces]
        if batch.decodes:
            rows = [key for key in self.scheduler.decode_order() if key not in ended]
            assert len(rows) == batch.decodes
            parts += [(key, len(held[key].tokens) - 1, len(held[key].tokens), True) for key in rows]
        for key, start, stop, _ in parts:
            self.memory.extend(key, start, stop)
        for source, target in self.memory.copies:
            for place in range(self.memory.size):
                if (0, source, place) in self.places:
                    self.places[0, target, place] = self.places[0, source, place]
        self.memory.copies.clear()
        for source, target in self.memory.states:
            self.states[target] = self.states[source]
        self.memory.states.clear()
        if self.memory.has_slots:
            for key, start, stop, _ in parts:
                self._scan(key, start, stop)
        for key, start, stop, _ in parts:  # all write before any reads, as within an iteration of layers
            self._write(key, start, stop)
        for key, start, stop, _ in parts:
            self._read(key, start, stop)
        for key, _, stop, samples in parts:
            self.memory.mark_written(key, stop)
            if samples:
                held[key].tokens.append(hash((key, stop)) % 3)
                self.left[key] -= 1
                if not self.left[key]:
                    self.finished.append(key)
                    del self.left[key]
        assert self.memory.problems() == []
        assert self.scheduler.free == self.memory.free
        return batch

    def _scan(self, key: int, start: int, stop: int) -> None:
        sequence = self.memory.sequences[key]
        before = self.states[sequence.slot] if start else ()
        assert before == tuple(sequence.tokens[:start])
        for at, slot in sequence.taking:
            assert start < at <= stop and at % self.memory.size == 0 and slot != sequence.slot
            self.states[slot] = tuple(sequence.tokens[:at])
        self.states[sequence.slot] = tuple(sequence.tokens[:stop])

    def _write(self, key: int, start: int, stop: int) -> None:
        tokens, size = self.memory.sequences[key].tokens, self.memory.size
        for group, table in enumerate(self.memory.sequences[key].tables):
            for at in range(start, stop):
                block = table[at // size]
                assert self.memory.pools[group].owners[block] == 1, "a block that others have is written to"
                self.places[group, block, at % size] = tuple(tokens[: at + 1])

    def _read(self, key: int, start: int, stop: int) -> None:
        tokens, size = self.memory.sequences[key].tokens, self.memory.size
        for group, table in enumerate(self.memory.sequences[key].tables):
            window = self.memory.windows[group - 1] if group else stop
            for at in range(max(0, start - window + 1), stop):
                assert self.places[group, table[at // size], at % size] == tuple(tokens[: at + 1])


PROMPT = st.lists(st.integers(0, 1), min_size=1, max_size=14)
EVENT = st.one_of(
    st.tuples(st.just("add"), PROMPT, st.integers(1, 8)),
    st.tuples(st.just("fork"), st.integers(0, 20), st.integers(1, 8)),
    st.tuples(st.just("cancel"), st.integers(0, 20), st.just(0)),
    st.tuples(st.just("step"), st.just(0), st.just(0)),
)


@pytest.mark.parametrize(("windows", "snapshots"), [((), -1), ((3,), -1), ((5, 9), -1), ((), 2), ((), 9), ((6,), 3)])
@settings(max_examples=30, deadline=None)
@given(
    st.lists(EVENT, max_size=40), st.integers(6, 14), st.sampled_from((1, 4)), st.sampled_from((3, 16)),
    st.sampled_from((1, 3, 6)), st.sampled_from((0, 0, 7)),
)  # fmt: skip
def test_no_history_loses_a_block(
    windows: tuple[int, ...],
    snapshots: int,
    events: list[tuple[str, object, int]],
    blocks: int,
    size: int,
    budget: int,
    seqs: int,
    source: int,
) -> None:
    """snapshots: of scans' states; -1: there are no scans. source: tokens that an encoder reads for each request."""
    source = 0 if windows or snapshots >= 0 else source
    blocks = max(blocks, -(-22 // size) - (-source // size))
    enough = [seqs * (-(-window // size) + 1) + -(-budget // size) + seqs for window in windows]
    slots = seqs if snapshots >= 0 else 0
    memory = KvBlocks(
        blocks, size, windows=windows, window_blocks=enough, slots=slots, snapshots=max(0, snapshots),
        prefix_cache=not source,
    )  # fmt: skip
    made, prompts = Made(memory, blocks, budget=budget, seqs=seqs), list[list[int]]()
    for what, value, most in events:
        if what == "add" and isinstance(value, list):
            made.add(len(prompts), value, most, source=source)
            prompts.append(value)
        elif what == "fork" and isinstance(value, int) and value < len(prompts):
            made.add(len(prompts), prompts[value], most, fork_of=None if source else value, source=source)
            prompts.append(prompts[value])
        elif what == "cancel" and isinstance(value, int):
            made.cancel(value)
        elif what == "step":
            made.step()
    for _ in range(2000):
        if not made.left and not made.finished:
            break
        made.step()
    assert not made.left, "somebody is never answered"
    assert memory.free == blocks and not memory.sequences
    assert all(pool.free == pool.total for pool in memory.pools)
    assert len(memory.slots) == slots


def test_a_beginning_is_found_and_what_is_computed_is_the_rest() -> None:
    memory = KvBlocks(8, 4)
    made = Made(memory, 8, budget=64, seqs=4)
    prompt = list(range(10))
    made.add(0, prompt, 1)
    assert [(p.prefix, p.new) for p in made.step().pieces] == [(0, 10)]
    made.step()
    made.add(1, [*prompt[:9], 77], 1)
    assert [(p.prefix, p.new) for p in made.step().pieces] == [(8, 2)]
    assert memory.found_tokens == 8


def test_several_answers_share_their_prompt_and_copy_what_they_write_to() -> None:
    memory = KvBlocks(16, 4)
    made = Made(memory, 16, budget=64, seqs=4)
    made.add(0, list(range(10)), 4)
    made.step()
    for key in (1, 2, 3):
        made.add(key, list(range(10)), 4, fork_of=0)
    batch = made.step()
    assert [(p.prefix, p.new) for p in batch.pieces] == [(9, 1)] * 3
    # two whole blocks of the prompt once, and one of each answer's own
    assert memory.pools[0].total - memory.free == 2 + 4


def test_a_window_lets_go_of_old_blocks() -> None:
    memory = KvBlocks(64, 4, windows=(8,), window_blocks=(8,))
    made = Made(memory, 64, budget=8, seqs=1)
    made.add(0, [1] * 50, 100)
    most = 0
    while made.left:
        made.step()
        most = max(most, memory.pools[1].total - memory.pools[1].free)
    assert most <= 8 // 4 + 1 + 8 // 4


def test_a_beginning_is_found_as_far_as_its_window_is_there() -> None:
    memory = KvBlocks(64, 4, windows=(8,), window_blocks=(9,))
    made = Made(memory, 64, budget=64, seqs=1)
    prompt = list(range(22))
    made.add(0, prompt, 1)
    made.step()
    made.step()
    made.add(1, [*prompt[:20], 77, 78], 1)
    assert [(p.prefix, p.new) for p in made.step().pieces] == [(20, 2)]  # the window's blocks are there, and no others
    assert memory.sequences[1].tables[1][:3] == [-1, -1, -1]
    made.step()
    made.add(2, [*prompt[:12], 77], 1)  # what a token at 12 sees of its window is there, as its blocks are kept
    assert [(p.prefix, p.new) for p in made.step().pieces] == [(12, 1)]
    made.step()
    made.add(3, [99] * 30, 1)  # takes all blocks of the window
    made.step()
    made.step()
    made.add(4, [*prompt[:20], 77, 78], 1)
    assert [(p.prefix, p.new) for p in made.step().pieces] == [(0, 22)]


def test_a_beginning_of_a_scan_is_found_where_its_state_was_kept() -> None:
    """After its own prompt; then where the third prompt left the first two."""
    memory = KvBlocks(64, 4, slots=2, snapshots=8)
    made = Made(memory, 64, budget=64, seqs=2)
    shared = list(range(9))
    computed = []
    for key, rest in enumerate(([50, 51], [60, 61, 62, 63, 64], [70, 71], [50, 51])):
        made.add(key, [*shared, *rest], 6)
        computed.append([(p.prefix, p.new) for p in made.step().pieces])
        while made.left or made.finished:
            made.step()
    # its last whole block ends at 8, which is where the second goes on; the fourth has the first's answer before it
    assert computed == [[(0, 11)], [(8, 6)], [(8, 3)], [(8, 3)]]
    long = list(range(30, 70))
    for key, rest in ((4, [1] * 6), (5, [2] * 6), (6, [3] * 6)):
        made.add(key, [*long[:24], *rest], 1)
        computed.append([(p.prefix, p.new) for p in made.step().pieces])
        made.step()
    assert computed[4:] == [[(0, 30)], [(0, 30)], [(24, 6)]]  # the second took a snapshot where it branched off


def test_the_next_turn_of_a_conversation_goes_on_from_its_answer() -> None:
    memory = KvBlocks(64, 4, windows=(6,), window_blocks=(40,), slots=1, snapshots=4)
    made = Made(memory, 64, budget=64, seqs=1)
    made.add(0, list(range(7)), 20)
    while made.left:
        made.step()
    said = list(memory.sequences[0].tokens)
    made.step()
    made.add(1, [*said, 5, 6], 1)
    [piece] = made.step().pieces
    assert piece.prefix == (len(said) - 1) // 4 * 4 == 24
    assert len(memory.snapshots.slots) <= 3  # of an answer the last alone
