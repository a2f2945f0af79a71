"""Block tables after any history: no block is lost, none has two contents, and what is read is what was written.

A made engine writes into every place of a block which tokens led there; before each iteration every running request's
tables must lead to its own. So a prefix that is found wrongly, a copy that is missing and a window that lets go too
early all show.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.errors import InputError
from gnomon.serving.kv_blocks import KvBlocks
from gnomon.serving.scheduler import Batch, Scheduler
from gnomon.software.engine import engine


class Made:
    """An engine without a model: what is written is the tokens up to there."""

    def __init__(self, memory: KvBlocks, blocks: int, *, budget: int, seqs: int) -> None:
        rules = replace(engine("gnomon"), block_tokens=memory.size, max_batched_tokens=budget, max_seqs=seqs)
        self.memory, self.scheduler = memory, Scheduler(rules, blocks, memory)
        self.places: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self.left: dict[int, int] = {}
        self.arrivals: list[tuple[int, int, int, int]] = []
        self.finished: list[int] = []

    def add(self, key: int, prompt: list[int], most: int, fork_of: int | None = None) -> None:
        self.memory.add(key, prompt, fork_of=fork_of)
        self.left[key] = most
        self.arrivals.append((key, len(prompt), most, 0))

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
        for key, start, stop, _ in parts:  # all write before any reads, as within an iteration of layers
            self._write(key, start, stop)
        for key, start, stop, _ in parts:
            self._read(key, start, stop)
        for key, _, stop, samples in parts:
            self.memory.written(key, stop)
            if samples:
                held[key].tokens.append(hash((key, stop)) % 3)
                self.left[key] -= 1
                if not self.left[key]:
                    self.finished.append(key)
                    del self.left[key]
        assert self.memory.problems() == []
        assert self.scheduler.free == self.memory.free
        return batch

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


@pytest.mark.parametrize("windows", [(), (3,), (5, 9)])
@settings(max_examples=40, deadline=None)
@given(
    st.lists(EVENT, max_size=40), st.integers(6, 14), st.sampled_from((1, 4)), st.sampled_from((3, 16)),
    st.sampled_from((1, 3, 6)),
)  # fmt: skip
def test_no_history_loses_a_block(
    windows: tuple[int, ...], events: list[tuple[str, object, int]], blocks: int, size: int, budget: int, seqs: int
) -> None:
    blocks = max(blocks, -(-22 // size))
    enough = [seqs * (-(-window // size) + 1) + -(-budget // size) + seqs for window in windows]
    memory = KvBlocks(blocks, size, windows=windows, window_blocks=enough, prefix_cache=not windows)
    made, prompts = Made(memory, blocks, budget=budget, seqs=seqs), list[list[int]]()
    for what, value, most in events:
        if what == "add" and isinstance(value, list):
            made.add(len(prompts), value, most)
            prompts.append(value)
        elif what == "fork" and isinstance(value, int) and value < len(prompts):
            made.add(len(prompts), prompts[value], most, fork_of=value)
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
    memory = KvBlocks(64, 4, windows=(8,), window_blocks=(8,), prefix_cache=False)
    made = Made(memory, 64, budget=8, seqs=1)
    made.add(0, [1] * 50, 100)
    most = 0
    while made.left:
        made.step()
        most = max(most, memory.pools[1].total - memory.pools[1].free)
    assert most <= 8 // 4 + 1 + 8 // 4


def test_beginnings_are_not_found_where_layers_differ() -> None:
    with pytest.raises(InputError, match="prefix_cache"):
        KvBlocks(8, 4, windows=(4,), window_blocks=(4,))
