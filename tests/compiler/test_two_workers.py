"""Steps of a graph by two workers: schedules that hold whatever the workers' speeds, results that are the same bits."""

from __future__ import annotations

import math
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from gnomon.compiler import backend  # noqa: E402
from gnomon.compiler.build import CPP, has_compiler  # noqa: E402
from gnomon.compiler.tasks import schedule, steps  # noqa: E402
from gnomon.compiler.tasks.schedule import StepCost, StepSchedule  # noqa: E402
from gnomon.compiler.tune import gate  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not has_compiler() or steps._library() is None, reason="needs a C++ compiler and this PyTorch"),
]


# ---- schedules
def played(made: StepSchedule, seconds: list[float]) -> list[tuple[float, float]]:
    """When each step begins and ends, with workers that take so long: a brute force of two lists and two counters."""
    out: dict[int, tuple[float, float]] = {}
    places, free = [0, 0], [0.0, 0.0]
    while any(places[w] < len(made.lists[w]) for w in (0, 1)):
        moved = False
        for w in (0, 1):
            if places[w] == len(made.lists[w]):
                continue
            task = made.lists[w][places[w]]
            if places[1 - w] < task.others:
                continue
            others = [out[one.step][1] for one in made.lists[1 - w][: task.others]]
            begin = max([free[w], *others])
            free[w] = begin + seconds[task.step]
            out[task.step] = (begin, free[w])
            places[w] += 1
            moved = True
        assert moved, "two workers wait for each other"
    return [out[n] for n in range(len(seconds))]


def test_a_step_begins_after_what_it_needs_whatever_the_speeds() -> None:
    chance = random.Random(0)
    wide = 0
    for _ in range(150):
        count = chance.randint(1, 25)
        needs = [{chance.randrange(n) for _ in range(chance.randint(0, 2))} if n else set() for n in range(count)]
        costs = [
            StepCost(half_s=(s := chance.uniform(1e-6, 2e-3)), whole_s=s * chance.uniform(0.4, 1.2)) for _ in needs
        ]
        first = {n for n in range(count) if chance.random() < 0.1}
        made = schedule._lists(costs, needs, first)
        wide += len(made.wide)
        assert sorted(task.step for each in made.lists for task in each) == list(range(count))
        assert {task.step for task in made.lists[1]}.isdisjoint(first | made.wide)
        ways = [[1.0] * count, *([chance.choice((0.01, 1.0, 50.0)) for _ in needs] for _ in range(4))]
        for seconds in ways:
            when = played(made, seconds)
            for n in range(count):
                assert all(when[one][1] <= when[n][0] for one in needs[n])
                assert all(when[one][1] <= when[n][0] for one in range(count) if made.ordered(one, n))
                if n in made.wide:  # no other step beside it
                    assert all(end <= when[n][0] or when[n][1] <= begin for begin, end in when[:n] + when[n + 1 :])
    assert wide > 10


def test_two_chains_are_done_beside_each_other_and_one_chain_by_one() -> None:
    costs = [StepCost(half_s=1e-3, whole_s=0.9e-3)] * 8
    made = schedule.scheduled(costs, [{n - 2} if n > 1 else set() for n in range(8)])
    assert made is not None and [len(each) for each in made.lists] == [4, 4]
    assert made.predicted_s == pytest.approx(4e-3, rel=0.01)
    assert schedule.scheduled(costs, [{n - 1} if n else set() for n in range(8)]) is None
    assert (
        schedule.scheduled([StepCost(half_s=1e-3, whole_s=0.5e-3)] * 8, [set()] * 8) is None
    )  # all threads are as good


# ---- the real path
class Branches(nn.Module):
    """Separable convolutions, means, products and lookups that do not wait for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, groups=8) for _ in range(3))
        self.points = nn.ModuleList(nn.Conv2d(8, 8, 1, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.table, self.out = nn.Embedding(9, 8), nn.Linear(8, 8)

    def forward(self, x: Any, rows: Any) -> Any:
        every = []
        for deep, points, norm in zip(self.deep, self.points, self.norms, strict=True):
            every.append(norm(points(deep(x.relu()))).relu())
        every.append(nn.functional.avg_pool2d(x, 3, 1, 1) + every[0])
        looked = self.out(torch.softmax(self.table(rows), -1)).cumsum(0)
        return torch.cat(every, 1), looked.tanh()


@pytest.fixture(scope="module")
def two(kernels: Path) -> Iterator[tuple[nn.Module, Any, steps.Run, Any]]:
    """(model, compiled, its run by two workers, inputs)."""
    torch._dynamo.reset()
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as monkeypatch, torch.no_grad():
        monkeypatch.setenv("GNOMON_CACHE", str(kernels))
        yield by_two(monkeypatch)
        torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def by_two(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, Any, steps.Run, Any]:
    monkeypatch.setattr(gate, "SLOWER", math.inf)
    monkeypatch.setattr(gate, "REPEATS", 1)
    monkeypatch.setattr(schedule, "WORTH", 1e9)
    monkeypatch.setattr(schedule, "WIDE_S", 1e9)
    monkeypatch.setattr(steps, "SHARE", 1e9)
    monkeypatch.setattr(gate, "_verdicts", {})
    torch.set_num_threads(2)
    model = Branches().eval()
    for norm in model.norms:
        norm.running_mean.normal_()
    given = torch.randn(2, 8, 9, 10), torch.arange(5)
    backend.reports.clear()
    fast = torch.compile(model, backend="gnomon")
    with torch.no_grad():
        for _ in range(3):
            fast(*given)
    [run] = [run for report in backend.reports for run in report.runs]
    assert run.two_kept and run.two_workers is not None and all(run.two_workers.schedule.lists)
    return model, fast, run, given


def test_two_workers_give_the_bits_of_one_and_eagers_numbers(two: Any) -> None:
    model, fast, run, given = two
    both = run.two_workers
    assert both is not None
    with torch.no_grad():
        wanted = model(*given)
        args = [value for value in captured(run, fast, given)]
        one_by_one = run.walked(args, steps.HALVED)
        for _ in range(50):
            assert all(torch.equal(a, b) for a, b in zip(both.call(args), one_by_one, strict=True))
        torch.testing.assert_close(fast(*given), wanted, rtol=2e-4, atol=1e-5)

        wrong: list[int] = []

        def many() -> None:  # one of them has the second worker at a time
            with torch.no_grad():
                for _ in range(40):
                    made = both.call(args)
                    wrong.extend(not torch.equal(a, b) for a, b in zip(made, one_by_one, strict=True))

        threads = [threading.Thread(target=many) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not any(wrong)

        torch.set_num_threads(1)  # by the caller alone
        assert all(torch.equal(a, b) for a, b in zip(both.call(args), one_by_one, strict=True))
        torch.set_num_threads(2)


def captured(run: steps.Run, fast: Any, given: Any) -> Any:
    """The tensors that a run is given."""
    found: list[Any] = []
    called = steps.Run.call
    try:
        steps.Run.call = lambda self, args: found.append(list(args)) or called(self, args)  # type: ignore[method-assign]
        fast(*given)
    finally:
        steps.Run.call = called  # type: ignore[method-assign]
    return found[0]


def test_weights_that_are_written_are_packed_again(two: Any) -> None:
    model, fast, _, given = two
    with torch.no_grad():
        for _ in range(3):
            model.deep[1].weight.mul_(1.5)
            model.norms[2].running_var.add_(0.5)
            for _ in range(2):
                torch.testing.assert_close(fast(*given), model(*given), rtol=2e-4, atol=1e-5)


def test_a_step_that_refuses_stops_both(two: Any) -> None:
    model, fast, _, given = two
    with torch.no_grad():
        for _ in range(3):
            with pytest.raises(IndexError):
                fast(given[0], torch.tensor([0, 1, 99, 2, 3]))
            torch.testing.assert_close(fast(*given), model(*given), rtol=2e-4, atol=1e-5)


def test_idle_workers_take_no_time(two: Any) -> None:
    _, fast, _, given = two
    with torch.no_grad():
        fast(*given)
    before = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before < 0.1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_process_that_was_forked_has_its_own_worker(two: Any) -> None:
    model, fast, _, given = two
    with torch.no_grad():
        wanted = fast(*given)
        child = os.fork()
        if not child:
            same = all(torch.equal(a, b) for a, b in zip(fast(*given), wanted, strict=True))
            os._exit(0 if same else 1)
        ended = time.monotonic() + 60
        while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < ended:
            time.sleep(0.01)
        if done[0] == 0:
            os.kill(child, 9)
            os.waitpid(child, 0)
        assert done == (child, 0)
        assert all(torch.equal(a, b) for a, b in zip(fast(*given), wanted, strict=True))


def test_no_race_under_the_thread_sanitizer(tmp_path: Path) -> None:
    compiler, program = shutil.which(os.environ.get("CXX", "g++")), tmp_path / "two_workers"
    source = Path(__file__).with_name("two_workers.cpp")
    words = [str(compiler), "-std=c++17", "-O1", "-g", "-fsanitize=thread", "-fopenmp", f"-I{CPP}", str(source)]
    if compiler is None or subprocess.run([*words, "-o", str(program)], capture_output=True).returncode:
        pytest.skip("this compiler has no thread sanitizer")
    # another sanitizer may be loaded into this process, and two do not go together
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"} | {"TSAN_OPTIONS": "die_after_fork=0"}
    done = subprocess.run([program, "3", "150"], capture_output=True, text=True, timeout=300, env=environment)
    if "FATAL: ThreadSanitizer" in done.stderr:  # addresses that it cannot map here
        pytest.skip(done.stderr.strip().splitlines()[0])
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr
    assert done.stdout.startswith("0 wrong")


def test_a_sum_into_what_a_run_is_given_is_no_difference() -> None:
    """The same steps in Python took the memory of an input, which the run in C++ then read."""
    convolutions = [nn.Conv2d(8, 8, size, padding=size // 2) for size in (1, 3, 1, 3)]

    def function(x: Any) -> Any:
        first, second, third, fourth = convolutions
        y = first(x).relu()
        drawn = torch.rand(1)  # ends the first run
        return fourth((third(second(y).relu() * drawn) + y).relu())

    torch._dynamo.reset()
    backend.reports.clear()
    fast = torch.compile(function, backend="gnomon")
    x = torch.randn(2, 8, 12, 12)
    for seed in range(4):
        torch.manual_seed(seed)
        made = fast(x)
        torch.manual_seed(seed)
        torch.testing.assert_close(made, function(x), rtol=2e-4, atol=1e-5)
    runs = [run for report in backend.reports for run in report.runs]
    assert runs and not any(run.trial is not None and run.trial.verdict.get("wrong") for run in runs)
