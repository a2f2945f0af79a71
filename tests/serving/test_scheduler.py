"""The scheduler's rules on random requests: blocks are conserved, budgets kept, order kept, jumps change nothing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from gnomon.errors import CatalogueError, InputError
from gnomon.serving.scheduler import Batch, Scheduler
from gnomon.software.engine import Engine, engine, engines


def small(rng: random.Random, name: str) -> Engine:
    """An engine on record with limits that small cases run into."""
    return replace(
        engine(name),
        max_batched_tokens=rng.choice((8, 16, 64)),
        max_seqs=rng.choice((1, 3, 8)),
        block_tokens=rng.choice((1, 4, 16)),
    )


class Served:
    """Drives a scheduler as a server does, one iteration at a time, with a model of its own of blocks and lengths."""

    def __init__(self, rules: Engine, blocks: int, requests: list[tuple[int, int]], texts: list[int]) -> None:
        self.scheduler = Scheduler(rules, blocks)
        self.rules, self.blocks, self.texts = rules, blocks, texts
        self.asked = dict(enumerate(requests))
        self.made: dict[int, int] = dict.fromkeys(self.asked, 0)
        self.written: dict[int, int] = {}
        self.admitted: list[int] = []

    def check(self, batch: Batch) -> None:
        """What must hold of every batch."""
        rules, scheduler = self.rules, self.scheduler
        for key in batch.preempted:
            self.written.pop(key)
        decoding = set(self.made) & {k for k in scheduler.decode_order()}
        ended = {piece.key for piece in batch.pieces if piece.last}
        moved = decoding - ended if batch.decodes else set()
        assert batch.decodes == len(moved)
        assert batch.kv_tokens == sum(self.written[key] + 1 for key in moved)
        assert batch.sources == sum(self.texts[key] for key in moved)
        read = [piece.source for piece in batch.pieces if piece.source]
        assert read == [self.texts[p.key] for p in batch.pieces if p.key not in self.written and self.texts[p.key]]
        if len(read) > 1 and rules.chunked_prefill:
            assert batch.decodes + sum(read) <= rules.max_batched_tokens
        if rules.chunked_prefill and not any(self.texts):
            assert batch.decodes + batch.new_tokens <= rules.max_batched_tokens
        assert rules.mixed or not (batch.pieces and batch.decodes)
        for piece in batch.pieces:
            if piece.key not in self.written:
                self.admitted.append(piece.key)
            assert piece.new > 0 and piece.prefix == self.written.get(piece.key, 0)
            self.written[piece.key] = piece.prefix + piece.new
            self.made[piece.key] += piece.last
        for key in moved:
            self.written[key] += 1
            self.made[key] += 1
        assert scheduler.running == len(self.written) <= rules.max_seqs
        assert scheduler.free >= 0
        texts = {key: -(-self.texts[key] // rules.block_tokens) for key in self.written}
        held = {k: -(-written // rules.block_tokens) + texts[k] for k, written in self.written.items()}
        whole = {run.key: run.blocks for run in scheduler.filling}
        assert scheduler.used == sum((held | whole).values())


@pytest.mark.parametrize("name", engines())
@pytest.mark.parametrize("reads", [False, True])
def test_no_block_leaks_and_nobody_is_lost(name: str, reads: bool) -> None:
    """reads: whether an encoder reads a text for each, whose keys lie in blocks as long as it is admitted."""
    for seed in range(20 if reads else 40):
        rng = random.Random(seed)
        rules = small(rng, name)
        requests = [(rng.randint(1, 40), rng.randint(1, 30)) for _ in range(rng.randint(1, 12))]
        texts = [rng.randint(1, 50) if reads else 0 for _ in requests]
        blocks = -(-max(i + o for i, o in requests) // rules.block_tokens) + rng.randint(0, 6)
        blocks += max(-(-text // rules.block_tokens) for text in texts)
        if rules.watermark:
            blocks *= 2
        served, waiting, finished = Served(rules, blocks, requests, texts), list(range(len(requests))), []
        for _ in range(20_000):
            come = [waiting.pop(0) for _ in range(rng.randint(0, 2)) if waiting]
            arrivals = [(key, *requests[key], 0, texts[key]) for key in come]
            for key in finished:
                served.written.pop(key)
            batch = served.scheduler.step(arrivals, finished)
            served.check(batch)
            finished = [k for k in served.written if served.made[k] == requests[k][1]]
            if not waiting and not served.written and not served.scheduler.waiting:
                break
        assert served.made == {key: o for key, (_, o) in enumerate(requests)}
        for key in finished:
            served.written.pop(key)
        served.scheduler.step((), finished)
        assert served.scheduler.used == 0
        assert served.scheduler.kv == served.scheduler.asked == served.scheduler.promised == 0
        assert served.scheduler.sources == served.scheduler.source_blocks == 0
        first = list(dict.fromkeys(served.admitted))
        assert first == sorted(first), "admitted in the order in which they came"


def test_chunks_share_the_budget_with_decodes_by_hand() -> None:
    """Budget 8, two prompts of 10 and 3: 8 | 2 + 3, then both decode."""
    rules = replace(engine("vllm"), max_batched_tokens=8, block_tokens=4)
    scheduler = Scheduler(rules, 100)
    first = scheduler.step([(0, 10, 4, 0), (1, 3, 4, 0)], ())
    assert [(p.key, p.prefix, p.new, p.last) for p in first.pieces] == [(0, 0, 8, False)]
    second = scheduler.step((), ())
    assert [(p.key, p.prefix, p.new, p.last) for p in second.pieces] == [(0, 8, 2, True), (1, 0, 3, True)]
    assert second.decodes == 0
    third = scheduler.step((), ())
    assert (third.decodes, third.kv_tokens) == (2, 11 + 4)
    assert scheduler.used == 3 + 1


def test_the_last_admitted_is_preempted_and_comes_first_again() -> None:
    rules = replace(engine("vllm"), block_tokens=4, max_batched_tokens=64)
    scheduler = Scheduler(rules, 4)
    scheduler.step([(0, 7, 9, 0), (1, 7, 9, 0)], ())
    scheduler.step((), ())  # both write their eighth key
    batch = scheduler.step((), ())  # two blocks wanted, none free
    assert batch.preempted == [1] and batch.decodes == 1
    assert [run.key for run in scheduler.waiting] == [1]
    assert scheduler.waiting[0].prompt == 9 and scheduler.waiting[0].most == 7


def test_prefix_hits_are_not_computed_again() -> None:
    scheduler = Scheduler(engine("vllm"), 1000)
    [piece] = scheduler.step([(0, 100, 4, 64)], ()).pieces
    assert (piece.prefix, piece.new, piece.last) == (64, 36, True)


@pytest.mark.parametrize("name", engines())
def test_jumps_are_the_same_as_steps(name: str) -> None:
    for seed in range(30):
        rng = random.Random(1000 + seed)
        rules = small(rng, name)
        requests = [(i, rng.randint(1, 20), rng.randint(5, 60), 0) for i in range(rng.randint(1, 8))]
        blocks = -(-80 // rules.block_tokens) * 2 + rng.randint(0, 9)
        one, many = Scheduler(rules, blocks), Scheduler(rules, blocks)
        one.step(requests, ()), many.step(requests, ())
        for _ in range(60):
            most = min((run.most - 1 - (many.steps - run.began) for run in many.decoding.values()), default=0)
            if most <= 0:
                break
            jump = many.steady(most)
            if jump:
                many.advance(jump)
            else:
                many.step((), ())
            for _ in range(jump or 1):
                batch = one.step((), ())
                assert jump == 0 or not batch.pieces and not batch.preempted
            assert (one.free, one.kv, one.steps, one.phases) == (many.free, many.kv, many.steps, many.phases)


def test_a_request_that_can_never_fit_is_refused() -> None:
    with pytest.raises(InputError, match="at most 64 tokens"):
        Scheduler(engine("vllm"), 4).step([(0, 60, 6, 0)], ())


def test_an_unknown_engine_is_named() -> None:
    with pytest.raises(CatalogueError, match="vllm"):
        engine("vlm")
