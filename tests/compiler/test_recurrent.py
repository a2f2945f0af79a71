"""`nn.LSTM` and `nn.GRU`: one node and one kernel, equal to eager for any sizes; compiled once for all of them."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the compiler's tests need it")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from gnomon.compiler import backend  # noqa: E402
from gnomon.compiler.build import has_compiler  # noqa: E402
from gnomon.compiler.explain import explained, lines  # noqa: E402
from gnomon.compiler.kernels.recurrent import Layers, Recurrent  # noqa: E402
from gnomon.compiler.tune.gate import alike  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler"),
    pytest.mark.usefixtures("fresh"),
]

MODULES = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}


class Tagger(torch.nn.Module):
    """Words to tags, by a recurrent layer between two others."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(20, 6)
        self.recurrent = MODULES[name](6, 17, batch_first=True, **options)
        self.tags = torch.nn.Linear(17, 3)

    def forward(self, ids: Any) -> Any:
        return torch.softmax(self.tags(self.recurrent(self.words(ids))[0]), -1)


def compiled(module: Any, **options: Any) -> Any:
    return torch.compile(module, backend=backend.gnomon, **options)


def function_of(name: str, module: Any) -> Recurrent:
    """The module as the backend would call it."""
    directions = 2 if module.bidirectional else 1
    layers = Layers(name, module.bias, module.num_layers, directions, module.batch_first, 2 if name == "lstm" else 1)
    return Recurrent(layers)


@settings(max_examples=20)
@given(
    name=st.sampled_from(list(MODULES)),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 14), st.integers(1, 40), st.integers(1, 9)),
    layers=st.integers(1, 3),
    bias=st.booleans(),
    batch_first=st.booleans(),
    bidirectional=st.booleans(),
)
def test_any_module_is_that_of_eager(
    name: str,
    sizes: tuple[int, int, int, int],
    layers: int,
    bias: bool,
    batch_first: bool,
    bidirectional: bool,
) -> None:
    steps, batch, hidden, inputs = sizes
    module = MODULES[name](
        inputs, hidden, layers, bias=bias, batch_first=batch_first, bidirectional=bidirectional
    ).eval()
    x = torch.randn((batch, steps, inputs) if batch_first else (steps, batch, inputs))
    states = [torch.randn(layers * (1 + bidirectional), batch, hidden) for _ in range(2 if name == "lstm" else 1)]
    torch.set_num_threads(1)
    with torch.no_grad():
        out, last = module(x, tuple(states) if len(states) == 2 else states[0])
        made = function_of(name, module).run(x, *states, *module._flat_weights)
    for one, other in zip(made, (out, *(last if len(states) == 2 else [last])), strict=True):
        assert alike(one, other)
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", MODULES)
def test_threads_share_the_units_and_change_no_bit(name: str) -> None:
    module = MODULES[name](30, 200, bidirectional=True)
    for weights in (module.weight_ih_l0, module.weight_ih_l0_reverse):
        torch.nn.init.zeros_(weights)  # the library's product, whose bits may depend on threads, is exact
    x, results = torch.randn(12, 5, 30), []
    states = [torch.zeros(2, 5, 200)] * (2 if name == "lstm" else 1)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        with torch.no_grad():
            results.append(function_of(name, module).run(x, *states, *module._flat_weights))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", MODULES)
def test_one_compilation_serves_all_lengths_and_batches(name: str) -> None:
    module = Tagger(name).eval()
    function = compiled(module, dynamic=True)
    with torch.no_grad():
        for batch, steps in ((3, 5), (2, 40), (9, 7)):
            ids = torch.randint(0, 20, (batch, steps))
            with torch._dynamo.config.patch(error_on_recompile=True):
                for _ in range(2):  # on trial, and after it
                    torch.testing.assert_close(function(ids), module(ids), rtol=1e-5, atol=1e-6)
    [one] = backend.reports[-1].recurrent
    assert [trial.kept for trial in one.trials.values()] == [True] * len(one.trials)
    assert one.packed
    shown = "\n".join(lines(explained(backend.reports[-1]), "graph"))
    assert f"{name.upper()} of 17 units" in shown and "(kept)" in shown


def test_a_graph_does_not_grow_with_the_number_of_steps() -> None:
    module, nodes = Tagger("gru").eval(), []
    with torch.no_grad():
        for steps in (4, 400):
            torch._dynamo.reset()
            compiled(module)(torch.zeros(2, steps, dtype=torch.int64))
            nodes.append(len(list(backend.reports[-1].program.graph.nodes)))
    assert nodes[1] <= nodes[0] < 30  # of many rows the last layer and its softmax may be one kernel


@pytest.mark.parametrize("change", ["copy", "data", "negated"])
def test_weights_that_change_are_packed_again(change: str) -> None:
    module = torch.nn.LSTM(4, 16)
    function, x = compiled(module), torch.randn(6, 2, 4)
    with torch.no_grad():
        function(x)
        function(x)
        if change == "copy":
            module.weight_hh_l0.copy_(torch.randn_like(module.weight_hh_l0))
        elif change == "data":  # of which PyTorch keeps no count
            module.weight_hh_l0.data[3, 5] = 1.0
        else:
            module.weight_hh_l0.data.neg_()
        torch.testing.assert_close(function(x), module(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MODULES)
def test_training_gives_the_gradients_of_eager(name: str) -> None:
    module, ids, gradients = Tagger(name, num_layers=2), torch.randint(0, 20, (3, 7)), []
    for function in (module, compiled(module)):
        module.zero_grad()
        function(ids).square().sum().backward()
        gradients.append([p.grad.clone() for p in module.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


class Frozen(torch.nn.Module):
    """A recurrent layer without gradients before one that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = torch.nn.GRU(4, 8), torch.nn.Linear(8, 2)

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            y = self.recurrent(x)[0]
        return self.head(y).sin()


def test_a_layer_without_gradients_is_one_node_of_a_graph_with_them() -> None:
    module, x, gradients = Frozen(), torch.randn(5, 3, 4), []
    for function in (module, compiled(module)):
        module.zero_grad()
        function(x).sum().backward()
        gradients.append(module.head.weight.grad.clone())
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
    assert any(report.recurrent for report in backend.reports[-2:])


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_what_the_kernel_does_not_serve_runs_as_in_eager() -> None:
    module, x = torch.nn.LSTM(4, 8, num_layers=2, dropout=0.5), torch.randn(5, 3, 4)
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, [5, 3, 2])
    with torch.no_grad():
        torch.manual_seed(1)
        wanted = module(x)[0]
        torch.manual_seed(1)
        assert torch.equal(compiled(module)(x)[0], wanted)
        module.eval()
        torch.testing.assert_close(compiled(module)(packed)[0].data, module(packed)[0].data)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(compiled(module)(x)[0], module(x)[0])
        half = torch.nn.LSTM(4, 8).to(torch.bfloat16)
        assert torch.equal(compiled(half)(x.bfloat16())[0], half(x.bfloat16())[0])
        narrow = torch.nn.LSTM(4, 8, proj_size=3)
        assert torch.equal(compiled(narrow)(x)[0], narrow(x)[0])
        nothing = torch.nn.GRU(4, 8)
        assert torch.equal(compiled(nothing)(x[:, :0])[0], nothing(x[:, :0])[0])
        with pytest.raises(RuntimeError):
            nothing(x[:0])
        with pytest.raises(RuntimeError):
            compiled(nothing)(x[:0])


def test_other_backends_still_break_their_graphs_there() -> None:
    from torch._dynamo.testing import EagerAndRecordGraphs

    other, module = EagerAndRecordGraphs(), Tagger("gru")
    with torch.no_grad():
        torch.compile(module, backend=other)(torch.zeros(2, 4, dtype=torch.int64))
    assert all(node.target is not torch.gru for graph in other.graphs for node in graph.graph.nodes)
