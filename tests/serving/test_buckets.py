"""Runtimes by length: cut, assigned and dispatched as a brute force written from the definitions says."""

from __future__ import annotations

import random
from itertools import combinations, product

import pytest

from gnomon.errors import InputError
from gnomon.serving.buckets import assign, best_lengths, expected
from gnomon.serving.dispatch import Dispatcher, Policy, play
from gnomon.serving.requests import Load, Request, poisson


def seconds(tokens: int) -> float:
    return 1e-3 + 2e-4 * tokens + 3e-7 * tokens * tokens


def test_lengths_are_the_best_of_all_subsets() -> None:
    rng = random.Random(0)
    for _ in range(30):
        counts = {rng.randint(1, 90): rng.randint(1, 9) for _ in range(rng.randint(1, 8))}
        most, step = rng.randint(1, 4), rng.choice([1, 8])
        tops = sorted({-(-length // step) * step for length in counts})

        def cost(chosen: tuple[int, ...], counts: dict[int, int] = counts) -> float:
            return sum(n * seconds(min(top for top in chosen if top >= length)) for length, n in counts.items())

        every = [
            (*few, tops[-1])
            for size in range(min(most, len(tops)))
            for few in combinations(tops[:-1], size)
        ]  # fmt: skip
        found = best_lengths(counts, seconds, most, step)
        assert found[-1] == tops[-1] and len(found) <= most
        assert cost(found) == pytest.approx(min(map(cost, every)), rel=1e-12)


def test_assignments_are_the_best_of_all() -> None:
    rng = random.Random(1)
    for _ in range(60):
        levels, workers = rng.randint(1, 4), rng.randint(1, 7)
        times = sorted(rng.uniform(0.01, 1.0) for _ in range(levels))
        rates = [rng.choice([0.0, rng.uniform(0, 2 * workers / times[-1])]) for _ in range(levels)]
        every = [c for c in product(range(workers + 1), repeat=levels) if sum(c) == workers and c[-1]]
        best = min(expected(rates, times, one) for one in every)
        assert expected(rates, times, assign(rates, times, workers)) == best


def test_a_level_of_one_worker_waits_as_pollaczek_and_khinchine_say() -> None:
    rate, each = 0.6, 1.0  # M/D/1: busy / (2 (1 - busy)) services
    assert expected([rate], [each], [1]).waiting == pytest.approx(rate * (each + 0.6 / (2 * 0.4)))


def test_more_workers_or_less_load_are_never_worse() -> None:
    rng = random.Random(2)
    for _ in range(40):
        times = sorted(rng.uniform(0.01, 1.0) for _ in range(3))
        rates = [rng.uniform(0, 6) for _ in range(3)]
        few, many = (expected(rates, times, assign(rates, times, n)) for n in (2, 3))
        assert many <= few
        less = [rate * 0.9 for rate in rates]
        assert expected(less, times, assign(less, times, 2)) <= few


def load(count: int, rate: float, seed: int) -> Load:
    rng = random.Random(seed)
    made = poisson(1, 1, rate, count, seed=seed).requests
    return Load(requests=tuple(
        Request(arrival_s=one.arrival_s, input_len=rng.choice([10, 30, 60, 120, 500]), output_len=1) for one in made
    ))  # fmt: skip


POLICIES = (
    Policy(workers=2, longest=512),
    Policy(workers=2, longest=512, lengths=(512,)),
    Policy(workers=3, longest=512, lengths=(32, 128, 512), renews_s=0.5),
    Policy(workers=3, longest=512, lengths=(32, 128, 512), patience=0.0, renews_s=0.5),
    Policy(workers=2, longest=512, lengths=(32, 128, 512), every=True),
)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_every_text_fits_is_answered_once_and_workers_have_one_at_a_time(policy: Policy) -> None:
    for seed in range(4):
        asked = load(300, rate=12.0, seed=seed)
        played = play(asked, policy, seconds, known=bool(seed % 2))
        assert (played.tokens >= played.length).all() and (played.begun_s >= played.arrival_s).all()
        if not policy.lengths:
            assert (played.tokens == played.length).all()
        else:
            assert set(played.tokens.tolist()) <= set(policy.lengths)
        assert played.busy_s == pytest.approx(sum(map(seconds, played.tokens.tolist())))
        for worker in range(policy.workers):
            mine = played.worker == worker
            begun, end = sorted(played.begun_s[mine]), sorted(played.end_s[mine])
            assert all(a <= b + 1e-9 for a, b in zip(end, begun[1:], strict=False))


def test_one_server_of_one_length_is_lindleys_queue() -> None:
    asked = load(200, rate=9.0, seed=3)
    played, free = play(asked, Policy(workers=1, longest=512), seconds), 0.0
    for index, one in enumerate(asked.requests):
        free = max(free, one.arrival_s) + seconds(one.input_len)
        assert played.end_s[index] == pytest.approx(free)


def test_a_text_goes_to_a_longer_runtime_where_its_own_is_congested_and_never_to_a_shorter() -> None:
    machine = Dispatcher(
        Policy(workers=2, longest=512, lengths=(64, 512), patience=1.0),
        lambda tokens: tokens / 64,
        {60: 0.5, 500: 0.01},
    )
    assert machine.runtimes == (512, 64) or machine.runtimes == (64, 512)
    short = machine.runtimes.index(64)
    sent = [machine.arrive(text, 60, 0.0) for text in range(12)]
    assert [one.worker == short for one in sent[:2]] == [True, True]
    demoted = [one for one in sent if one.demoted]
    assert demoted and all(one.worker != short and one.tokens == 512 for one in demoted)
    assert machine.arrive(99, 100, 0.0).worker != short
    with pytest.raises(InputError, match="600 tokens, and the longest runtime 512"):
        machine.arrive(100, 600, 0.0)


def test_workers_are_dealt_out_anew_by_what_came() -> None:
    policy = Policy(workers=4, longest=512, lengths=(64, 512), renews_s=1.0)
    machine = Dispatcher(policy, seconds)
    assert machine.runtimes == (512,) * 4
    now = 0.0
    for text in range(400):
        now += 0.01
        sent = machine.arrive(text, 50, now)
        machine.finish(sent.worker, text, now + 0.001)
    assert machine.renewals >= 3 and machine.runtimes.count(64) >= 1 and machine.runtimes.count(512) >= 1


def test_a_lost_worker_has_nothing_and_the_longest_runtime_stays() -> None:
    machine = Dispatcher(Policy(workers=2, longest=512, lengths=(64, 512)), seconds, {50: 3.0, 500: 0.01})
    long = machine.runtimes.index(512)
    machine.arrive(1, 300, 0.0)
    assert machine.remove_worker(long) == [1]
    assert machine.runtimes[1 - long] == 512 and machine.arrive(1, 300, 0.0).worker == 1 - long
    machine.back(long)
    assert machine.remove_worker(1 - long) == [1]
    assert machine.remove_worker(long) == []
    with pytest.raises(InputError, match="no worker"):
        machine.arrive(2, 5, 0.0)


def test_what_cannot_be_is_said() -> None:
    for wrong, why in (
        ({"lengths": (64, 64)}, "rise"), ({"lengths": (64,)}, "add 512"), ({"workers": 0}, "serve nobody"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=why):
            Policy(**{"workers": 2, "longest": 512, **wrong})
    with pytest.raises(InputError, match="runtimes are cut"):
        best_lengths({}, seconds, 2)
