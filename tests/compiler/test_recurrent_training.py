"""Training of `nn.LSTM` and `nn.GRU`, and bfloat16: gradients of any module against double, through torch.compile, with
threads, and where the kernels are given back."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the compiler's tests need it")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from gnomon.compiler import backend  # noqa: E402
from gnomon.compiler.build import has_compiler  # noqa: E402
from gnomon.compiler.explain import explained, lines  # noqa: E402
from gnomon.compiler.kernels import recurrent_training  # noqa: E402
from gnomon.compiler.kernels.recurrent import Layers, Recurrent  # noqa: E402
from gnomon.compiler.kernels.recurrent_training import Learner, gradients, seeds  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler"),
    pytest.mark.usefixtures("fresh"),
]

MODULES = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}
FLOAT, HALF = torch.float32, torch.bfloat16


def arguments(
    name: str, sizes: tuple[int, int, int, int], layers: int = 1, bias: bool = True, dtype: Any = FLOAT, **options: bool
) -> tuple[Layers, list[Any]]:
    """What a module is, and its x, states and weights."""
    steps, batch, hidden, inputs = sizes
    both, rows_first = options.get("bidirectional", False), options.get("batch_first", False)
    module = MODULES[name](inputs, hidden, layers, bias=bias, **options)
    x = torch.randn((batch, steps, inputs) if rows_first else (steps, batch, inputs))
    states = [torch.randn(layers * (1 + both), batch, hidden) for _ in range(2 if name == "lstm" else 1)]
    every = [x, *states, *[w.detach() for w in module._flat_weights]]
    spec = Layers(name, bias, layers, 1 + both, rows_first, len(states))
    return spec, [one.to(dtype) for one in every]


def apart(ours: Sequence[Any], exact: Sequence[Any]) -> float:
    """The largest difference of a result in units of its largest element."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, exact, strict=True))


@settings(max_examples=6)
@given(
    name=st.sampled_from(list(MODULES)),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 14), st.integers(2, 40), st.integers(1, 9)),
    layers=st.integers(1, 3),
    bias=st.booleans(),
    dtype=st.sampled_from([FLOAT, HALF]),
    batch_first=st.booleans(),
    bidirectional=st.booleans(),
)
def test_results_and_gradients_of_any_module_are_those_of_double(
    name: str, sizes: tuple[int, int, int, int], layers: int, bias: bool, dtype: Any, **options: bool
) -> None:
    torch.set_num_threads(1)
    spec, args = arguments(name, sizes, layers, bias, dtype, **options)
    exact = Learner(spec)._both_by_aten(*[one.double() for one in args])
    ours = [one.double() for one in Learner(spec)._both(*args)]
    # An element of bfloat16 is known to 2**-9, and gates of all steps and layers are rounded to it
    assert apart(ours, exact) < (1e-5 if dtype == FLOAT else 0.1)
    inference = Recurrent(spec).run(*args)
    assert apart([one.double() for one in inference], exact[: len(inference)]) < (1e-5 if dtype == FLOAT else 0.03)


@pytest.mark.parametrize("name", MODULES)
def test_bfloat16_is_not_further_from_double_than_eager(name: str) -> None:
    spec, args = arguments(name, (20, 4, 48, 16), dtype=HALF)
    made = Learner(spec)
    exact = made._both_by_aten(*[one.double() for one in args])
    ours, eager = ([one.double() for one in f(*args)] for f in (made._both, made._both_by_aten))
    assert apart(ours, exact) < 1.5 * apart(eager, exact)


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
@pytest.mark.parametrize("name", MODULES)
def test_threads_share_the_units_and_change_no_bit(name: str, dtype: Any) -> None:
    spec, args = arguments(name, (6, 5, 200, 8), bidirectional=True, dtype=dtype)
    learner, each, results = Learner(spec), len(args[1 + spec.states :]) // 2, []
    for direction in range(2):
        args[1 + spec.states + direction * each].zero_()  # the library's product of the inputs is exact
    for threads in (1, 2):
        torch.set_num_threads(threads)
        *out, kept = learner.run(*args)
        given = [seeds(one) for one in out]
        found = gradients(spec, given, args, out, kept, True)
        states = found[1 : 1 + spec.states]  # all else is the library's product of what these are made of
        results.append([*out, *kept[:2], *states])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("name", MODULES)
def test_several_threads_of_python_train_beside_each_other(name: str) -> None:
    spec, args = arguments(name, (7, 3, 96, 5))
    learner, wanted, found = Learner(spec), Learner(spec)._both(*args), list[Any]()

    def work() -> None:
        torch.set_num_threads(1)
        found.extend(learner._both(*args) for _ in range(5))

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 15
    for made in found:
        torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-6)


class Tagger(torch.nn.Module):
    """Words to tags, by recurrent layers between two others."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(20, 6)
        self.recurrent = MODULES[name](6, 17, batch_first=True, **options)
        self.tags = torch.nn.Linear(17 * (1 + self.recurrent.bidirectional), 3)

    def forward(self, ids: Any) -> Any:
        return torch.softmax(self.tags(self.recurrent(self.words(ids))[0]), -1)


def stepped(module: Any, function: Any, *inputs: Any) -> list[Any]:
    """The result of one step and all gradients."""
    module.zero_grad()
    out = function(*inputs)
    out.float().square().sum().backward()
    return [out.detach(), *[p.grad.clone() for p in module.parameters() if p.grad is not None]]


def training_reports() -> list[Any]:
    return [one for report in backend.reports for one in report.recurrent if isinstance(one, Learner)]


@pytest.mark.parametrize("name", MODULES)
def test_one_compilation_trains_on_all_lengths_and_batches(name: str) -> None:
    module = Tagger(name, num_layers=2, bidirectional=True)
    backend.reports.clear()
    function = torch.compile(module, backend=backend.gnomon, dynamic=True)
    for number, (batch, steps) in enumerate(((3, 5), (2, 40), (9, 7))):
        ids = torch.randint(0, 20, (batch, steps))
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            for _ in range(2):  # on trial, and after it
                made, wanted = stepped(module, function, ids), stepped(module, module, ids)
                torch.testing.assert_close(made, wanted, rtol=1e-5, atol=2e-6)
    [one] = training_reports()
    assert [trial.kept for trial in one.trials.values()] == [True] * len(one.trials)
    shown = "\n".join(line for report in backend.reports for line in lines(explained(report), "graph"))
    assert f"{name.upper()} of 17 units, 2 layers, both directions" in shown
    assert f"{name}_grad" in shown
    if name == "lstm":  # a number that was 0 when it was compiled
        module.recurrent.dropout = 0.5
        assert not torch.equal(function(ids), function(ids))


@pytest.mark.parametrize("name", MODULES)
def test_graphs_do_not_grow_with_the_number_of_steps(name: str) -> None:
    module, nodes = Tagger(name), []
    for steps in (4, 400):
        torch._dynamo.reset()
        backend.reports.clear()
        function = torch.compile(module, backend=backend.gnomon)
        function(torch.zeros(2, steps, dtype=torch.int64)).sum().backward()
        nodes.append([len(list(report.program.graph.nodes)) for report in backend.reports])
    assert all(many <= few for few, many in zip(*nodes, strict=True))  # of many rows more may be one kernel
    assert len(nodes[0]) == 2 and max(nodes[0]) < 60  # forward and backward


class Last(torch.nn.Module):
    """The last states alone, from states that learn; the recurrent weights do not."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.recurrent = MODULES[name](4, 8)
        self.recurrent.weight_hh_l0.requires_grad_(False)
        many = 2 if name == "lstm" else 1
        self.first = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(1, 3, 8)) for _ in range(many)])

    def forward(self, x: Any) -> Any:
        states = tuple(self.first) if len(self.first) == 2 else self.first[0]
        last = self.recurrent(x, states)[1]
        return torch.cat(last, -1) if isinstance(last, tuple) else last


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
@pytest.mark.parametrize("name", MODULES)
def test_last_states_first_states_and_frozen_weights(name: str, dtype: Any) -> None:
    module, x = Last(name).to(dtype), torch.randn(5, 3, 4).to(dtype)
    function = torch.compile(module, backend=backend.gnomon)
    rounding = {"rtol": 1e-5, "atol": 1e-6} if dtype == FLOAT else {"rtol": 0.05, "atol": 0.15}
    for _ in range(2):
        made, wanted = stepped(module, function, x), stepped(module, module, x)
        assert len(made) == len(wanted)
        torch.testing.assert_close(made, wanted, **rounding)


@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_what_is_slower_is_given_back_with_the_gradients_of_eager(
    name: str, rows_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gnomon.compiler.tune import gate

    monkeypatch.setattr(gate, "SLOWER", 0.0)
    module = MODULES[name](6, 9, 2, batch_first=rows_first, bidirectional=True)
    backend.reports.clear()
    function = torch.compile(lambda x: module(x)[0].sin(), backend=backend.gnomon)
    x = torch.randn(3, 7, 6)
    for _ in range(2):
        made, wanted = stepped(module, function, x), stepped(module, lambda x: module(x)[0].sin(), x)
        torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-6)
    [one] = training_reports()
    assert [trial.kept for trial in one.trials.values()] == [False]


def test_a_kernel_that_does_not_compile_leaves_training_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent_training, "backward_kernel", lambda dtype: None)
    module, x = torch.nn.GRU(4, 8), torch.randn(5, 3, 4)
    function = torch.compile(lambda x: module(x)[0], backend=backend.gnomon)
    made, wanted = stepped(module, function, x), stepped(module, lambda x: module(x)[0], x)
    torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-6)
