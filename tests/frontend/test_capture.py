"""`gnomon.capture`: what is found in a module, and that the Graph computes what the module does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from frontend.models import Branching, Convolved, Custom, NanoGPT  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import gnomon  # noqa: E402
from gnomon.cli import main  # noqa: E402
from gnomon.errors import CaptureError, FormatError, InputError, PlanError  # noqa: E402
from gnomon.frontend.capture import CapturedModule, captured  # noqa: E402
from gnomon.frontend.inputs import CodeModel  # noqa: E402
from gnomon.frontend.opaque import shares  # noqa: E402
from gnomon.frontend.sizes import fit  # noqa: E402
from gnomon.graph import BF16, EAGER, UNFUSED, Setting, Size, graph_work  # noqa: E402
from gnomon.plans import Layout, Mesh, Plan, Schedule, Workload  # noqa: E402
from gnomon.request.model import is_code, with_inputs  # noqa: E402
from gnomon.runtime.checks.prove import check, prove  # noqa: E402
from gnomon.sharding import shard_graph  # noqa: E402

pytestmark = pytest.mark.torch
DIMS = {"ids": ("batch", "seq"), "targets": ("batch", "seq")}


def batch(b: int = 2, s: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(0, 65, (b, s), generator=generator) for _ in range(2))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def nano() -> CapturedModule:
    return captured(NanoGPT(), batch(), dims=DIMS)


def test_layers_are_found_and_stored_once(nano: CapturedModule) -> None:
    calls = {call.name: call for call in nano.graph.calls}
    assert list(calls) == ["embed", "h", "head"]
    assert (calls["h"].repeat, calls["h"].prefix, calls["h"].first) == (3, "h", 0)
    assert [layer.label for layer in nano.graph.layers()] == ["embed", "h[0]", "h[1]", "h[2]", "head"]


def test_parameters_have_the_module_s_names_and_tied_ones_count_once(nano: CapturedModule) -> None:
    module = NanoGPT()
    assert set(nano.graph.parameters()) == {name for name, _ in module.named_parameters()}
    assert nano.graph.num_parameters() == sum(p.numel() for p in module.parameters())


def test_dims_are_found_by_role(nano: CapturedModule) -> None:
    layer = nano.graph.block("h")
    assert [str(d) for d in layer.tensor("x").dims] == ["batch", "seq", "hidden=32"]
    assert [str(d) for d in layer.tensor("up.weight").dims] == ["hidden=32", "ffn=128"]
    core = layer.op("attn.core")
    assert [str(d) for d in layer.tensor(core.inputs[0]).dims] == ["batch", "seq", "heads=4", "head_dim=8"]
    assert core.attr("causal", False) is True
    assert [str(d) for d in nano.graph.block("head").tensor("lm_head").dims] == ["batch", "seq", "vocab=65"]


@pytest.mark.parametrize("sizes", [(2, 16), (3, 40)])
def test_flops_are_those_that_torch_counts(nano: CapturedModule, sizes: tuple[int, int]) -> None:
    """At the sizes of the recording and at others. Attention in products, as the counter knows no CPU kernel of it."""
    module = NanoGPT()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        loss = module(*batch(*sizes))
        forward = counted.get_total_flops()
        loss.backward()
    setting = Setting(sizes={"batch": sizes[0], "seq": sizes[1]}, dtypes=BF16, causal_flops="full")
    work = graph_work(nano.graph, EAGER, setting)
    assert (work.forward.matmul_flops, work.total.matmul_flops) == (forward, counted.get_total_flops())


@pytest.mark.parametrize(
    ("module", "example"),
    [(NanoGPT(), batch()), (Convolved(), (torch.randn(2, 3, 16, 16),)), (nn.LSTM(8, 12, 2), (torch.randn(5, 2, 8),))],
    ids=["nanogpt", "convolved", "lstm"],
)
def test_graph_and_module_compute_the_same(module: nn.Module, example: tuple[Tensor, ...]) -> None:
    proof = prove(module, example)
    check(proof, type(module).__name__)
    assert 0 <= proof.outputs < 1e-9 and proof.gradients < 1e-9


def test_a_backward_of_one_s_own_is_named_and_fails_the_proof() -> None:
    result = captured(Custom(), (torch.randn(2, 8),))
    assert any("Square" in note and "models.py:" in note for note in result.notes)
    proof = prove(Custom(), (torch.randn(2, 8),))
    assert proof.outputs == 0 and proof.gradients > 0.1
    with pytest.raises(CaptureError, match="gradients by"):
        check(proof, "Custom")


def test_a_branch_on_values_is_marked_with_file_and_line() -> None:
    result = captured(Branching(), (torch.randn(2, 8),))
    assert any("models.py:" in note and "depends on values" in note for note in result.notes)
    with pytest.raises(CaptureError, match=r"models\.py:\d+: Python reads a number that depends on"):
        captured(Branching().to("meta"), (torch.empty(2, 8, device="meta"),))


def test_an_error_in_the_forward_has_its_line() -> None:
    with pytest.raises(CaptureError, match=r"models\.py:\d+: ValueError: Expected input batch_size"):
        captured(NanoGPT(), (torch.zeros(2, 16, dtype=torch.int64), torch.zeros(2, 15, dtype=torch.int64)), dims={})


class Slopes(nn.Module):
    """Attention with a bias of each head and distance (ALiBi), and a number beside the rows."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
        far = (torch.arange(x.shape[1])[None] - torch.arange(x.shape[1])[:, None]).abs()
        bias = -torch.tensor([0.5, 0.25, 0.1, 0.05])[:, None, None] * far * scale
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias[None]).transpose(1, 2).flatten(2)


def test_a_bias_of_attention_is_added_to_scores_that_are_written_out() -> None:
    """Its dims have their own names, and one has a single element. `scale` has no batch, which `x` decides."""
    graph = captured(Slopes(), (torch.randn(3, 10, 32), torch.ones(1))).graph
    setting = Setting(sizes={"batch": 3}, dtypes=BF16, causal_flops="full")
    assert graph_work(graph, UNFUSED, setting).forward.matmul_flops == 2 * 2 * 3 * 4 * 10 * 10 * 8


class Near(nn.Module):
    """A layer whose attention has a bias of each head and distance, as T5's: the first makes it for all."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.q, self.k, self.out = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.bias = nn.Embedding(64, 4) if first else None

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.bias is not None:
            places = torch.arange(x.shape[1])
            bias = self.bias((places[None] - places[:, None]).abs()).permute(2, 0, 1)[None].contiguous()
        q, k = (f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k))
        assert bias is not None
        made = F.scaled_dot_product_attention(q, k, k, attn_mask=bias).transpose(1, 2).flatten(2)
        return x + self.out(made), bias


class Nearer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Near(place == 0) for place in range(2))

    def forward(self, x: Tensor) -> Tensor:
        bias = None
        for layer in self.h:
            x, bias = layer(x, bias)
        return x


def test_layers_of_a_class_are_layers_though_one_has_more() -> None:
    """So that pp cuts between them; and what attention adds to each head's scores is divided with the heads."""
    graph = captured(Nearer(), (torch.randn(2, 10, 32),)).graph
    assert len(graph.layers()) == 2 and len(graph.blocks) == 2
    for block in graph.blocks:
        (op,) = (op for op in block.ops if op.kind == "attention")
        assert [dim.name for dim in block.tensor(op.inputs[3]).dims][1] == "heads"
    sizes = {"batch": 2, "seq": 10}
    sharded = shard_graph(graph, Layout(), Mesh(tp=2), sizes, BF16)
    for block in sharded.values():
        (op,) = (op for op in block.ops if op.op.kind == "attention")
        assert op.strategy.inputs[3].dim_of("tp") == "heads"


class Spare(nn.Module):
    """A product that nothing reads, experts in one weight each, and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.out = nn.Module(), nn.Linear(16, 16)
        self.experts.up = nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        self.out(x[:, :2])
        return self.out(torch.einsum("bsi,eio->bso", x, self.experts.up))


def test_products_that_nothing_reads_are_said() -> None:
    result = captured(Spare(), (torch.randn(2, 8, 16),))
    ((where, flops),) = result.unread
    assert flops == 2 * 2 * 2 * 16 * 16
    assert f"{where}: a product that no output depends on is left out" in result.notes


def test_experts_of_an_op_without_a_rule_are_whole_and_other_axes_work() -> None:
    graph = captured(Spare(), (torch.randn(2, 8, 16),), name="spare").graph
    work, one = Workload(global_batch_size=16, seq_len=1), Schedule(micro_batch_size=2)
    with pytest.raises(
        PlanError, match=r"ep x etp = 2, but \S+ \(\S*test_capture\.py:\d+\) computes the experts of 'spare'"
    ):
        gnomon.predict(graph, "1x8xh100-sxm", Plan(mesh=Mesh(dp_shard=8, ep=2), schedule=one), work)
    for mesh in (Mesh(dp_shard=8), Mesh(dp_replicate=4, tp=2)):
        assert gnomon.predict(graph, "1x8xh100-sxm", Plan(mesh=mesh, schedule=one), work).step_s > 0


class Looped(Spare):
    """The same, expert by expert, as transformers' eager experts are."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(sum(F.linear(x, self.experts.up[place]) for place in range(4)))  # type: ignore[arg-type]


def test_experts_that_a_loop_takes_out_are_named_with_their_line() -> None:
    graph = captured(Looped(), (torch.randn(2, 8, 16),), name="looped").graph
    plan = Plan(mesh=Mesh(dp_shard=8, ep=2), schedule=Schedule(micro_batch_size=2))
    with pytest.raises(PlanError, match=r"\(\S*test_capture\.py:\d+\) takes single experts of 'looped' out of the"):
        gnomon.predict(graph, "1x8xh100-sxm", plan, Workload(global_batch_size=16, seq_len=1))


class Written(nn.Module):
    """Rows in, rows out, with a norm that is written out: what runs through is no feed-forward's width."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(16, 40) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(40, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(F.silu(up(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))))
        return x


class Products(nn.Module):
    """Weights (in, out) before, behind and below, and one (out, in) that is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(8, 12)), nn.Parameter(torch.randn(12, 8))
        self.bias, self.square = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(12, 12))

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.relu(x @ self.up) @ self.square.T
        return torch.addmm(self.bias, wide.flatten(0, 1), self.down) - 0.5 * torch.mm(wide[0], self.down)[:1]


def test_a_product_with_a_weight_is_a_linear() -> None:
    example = (torch.randn(2, 6, 8),)
    graph = gnomon.capture(Products(), example, dims={"x": ("batch", "seq", "")})
    products = [op for block in graph.blocks for op in block.ops if op.contracts]
    assert [(op.kind, op.inputs[1]) for op in products] == [
        ("linear", name) for name in ("up", "square", "down", "down")
    ]
    assert not any(op.inputs == ("square",) for block in graph.blocks for op in block.ops)
    assert not shares(graph).keys() & {"aten.addmm", "aten.mm"}
    assert prove(Products(), example).holds
    scaled = gnomon.capture(Scaled(), (torch.randn(4, 8),))
    assert not any(op.contracts for block in scaled.blocks for op in block.ops)
    assert prove(Scaled(), (torch.randn(4, 8),)).holds


class Scaled(nn.Module):
    """What no linear says: twice the product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight, alpha=2)


def test_what_a_module_takes_and_returns_is_not_the_width_of_a_feed_forward() -> None:
    graph = captured(Written(), (torch.randn(2, 10, 16),)).graph
    assert graph.inputs[0].dims[-1].name != "ffn"
    wide = {
        block.tensor(op.inputs[1]).dims[0].name for block in graph.blocks for op in block.ops if op.kind == "linear"
    }
    assert "ffn" in wide


class Routed(nn.Module):
    """Two experts of a token, their rows sorted by expert: rows are batch · seq · 2, of a product and of a size."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.up = nn.Linear(16, 4), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(rows).topk(2, dim=-1)
        order = chosen.flatten().sort(stable=True).indices
        made = self.up(rows[order // 2]) * weights.flatten()[order, None]
        counts = F.one_hot(chosen, 4).sum((0, 1)).tolist()
        parts = [part * (place + 1) for place, part in enumerate(made.split(counts))]
        return torch.zeros_like(rows).index_add(0, order // 2, torch.cat(parts)).view_as(x)


@pytest.mark.parametrize("seq", [16, 18, 20])
def test_rows_of_experts_are_a_product_and_each_expert_s_a_number(seq: int) -> None:
    x = torch.randn(2, seq, 16, generator=torch.Generator().manual_seed(0))
    result = captured(Routed(), {"x": x}, dims={"x": ("batch", "seq", "")})
    assert result.symbols == ("batch", "seq")
    assert any("tolist depends on values" in note for note in result.notes)
    setting = Setting(sizes={"batch": 2, "seq": seq}, dtypes=BF16, causal_flops="full")
    assert graph_work(result.graph, UNFUSED, setting).forward.matmul_flops == 2 * 2 * seq * 16 * (4 + 2 * 16)


def test_attention_that_drops_is_attention() -> None:
    """On the CPU torch writes it out, and draws in memory of its own."""

    class Drops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
            return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1 if self.training else 0.0)

    result = captured(Drops(), {"x": torch.randn(2, 10, 32)})
    (op,) = (op for block in result.graph.blocks for op in block.ops if op.kind == "attention")
    assert op.attr("dropout", 0.0) == 0.1 and not result.opaque


def test_tables_made_in_the_first_forward_do_not_fix_the_batch() -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept: dict[int, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] not in self.kept:
                self.kept[x.shape[1]] = torch.arange(x.shape[1]).cos()
            return x * self.kept[x.shape[1]]

    assert captured(Tables(), {"x": torch.randn(2, 10)}).symbols == ("batch",)


def test_a_mask_that_is_made_for_each_pair_is_captured() -> None:
    """As transformers makes masks: a function of two positions, over all of them, which asks for a tensor inside."""

    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            def allowed(i: Tensor, j: Tensor) -> Tensor:
                return i.new_ones((), dtype=torch.bool) & (j <= i)

            at = torch.arange(x.shape[1])
            mask = torch.vmap(torch.vmap(allowed, (None, 0)), (0, None))(at, at)
            return x @ x.transpose(1, 2) * mask

    assert captured(Masked(), {"x": torch.randn(2, 10, 8)}).symbols == ("batch",)


def test_layers_that_are_dropped_at_random_are_all_there() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.layerdrop = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), 0.9

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x if self.training and torch.rand([]) < self.layerdrop else layer(x)
            return x * 2

    module = Dropped()
    result = captured(module, {"x": torch.randn(2, 8)})
    assert result.graph.num_parameters() == 4 * (64 + 8) and module.layerdrop == 0.9
    assert any("layerdrop" in note for note in result.notes)


def test_a_batch_that_cannot_vary_is_the_only_one_that_is_planned() -> None:
    """Images of a packed batch have their sizes in an input, whose rows are no samples and columns no sequence."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, x: Tensor, grid: Tensor) -> Tensor:
            ((tall, wide),) = grid.tolist()
            return self.up(x.view(tall, wide, 8).mean(1))

    result = captured(Packed(), {"x": torch.randn(12, 8), "grid": torch.tensor([[3, 4]])})
    assert result.symbols == ()
    plan = Plan(schedule=Schedule(micro_batch_size=12))
    work = Workload(global_batch_size=24, seq_len=1)
    assert gnomon.predict(result.graph, "1x1xh100-sxm", plan, work).step_s > 0
    with pytest.raises(PlanError, match=r"2 samples in a rank's microbatch, but Packed was captured at 12"):
        gnomon.predict(result.graph, "1x1xh100-sxm", Plan(schedule=Schedule(micro_batch_size=2)), work)
    found = gnomon.plan(result.graph, "1x2xh100-sxm", work, fixed={"pp": 1}).best[0].plan
    assert found.schedule.micro_batch_size == 12 and found.mesh.data_ranks == 2
    with pytest.raises(PlanError, match="Packed was captured at a batch of 12 and does something else at others"):
        gnomon.plan(result.graph, "1x2xh100-sxm", work, fixed={"micro_batch_size": 4})


def test_what_is_no_plain_module_is_refused() -> None:
    with pytest.raises(InputError, match="wants a torch.nn.Module, not a function"):
        captured(lambda x: x, (torch.zeros(1),))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="and it has 2 dims"):
        captured(NanoGPT(), batch(), dims={"ids": ("batch",)})
    compiled = torch.compile(Convolved(), backend="eager")
    assert "was compiled" in captured(compiled, (torch.randn(2, 3, 16, 16),)).notes[0]


def test_the_module_is_left_as_it_was() -> None:
    module = Convolved().eval()
    before = {name: x.clone() for name, x in module.state_dict().items()}
    gnomon.capture(module, (torch.randn(2, 3, 16, 16),))
    assert not module.training
    assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())


@pytest.mark.parametrize(
    ("x", "y", "wanted"),
    [
        (64, 64, 64),
        (3, 4, Size(1, ("batch",))),
        (48, 32, Size(1, ("batch", "seq"))),
        (256, 64, Size(1, ("seq", "seq"))),
        (17, 9, Size(1, ("seq",), 1)),
        (80, 40, Size(5, ("seq",))),
        (5, 11, None),
    ],
)
def test_sizes_follow_from_those_of_the_inputs(x: int, y: int, wanted: object) -> None:
    assert fit(x, y, {"batch": 3, "seq": 16}, {"batch": 4, "seq": 8}) == wanted


def test_a_name_of_code_is_read() -> None:
    named = CodeModel.parse("a.b:build(ids=int64[batch,seq=128]<1000, pixels=float32[batch,3,8,8])")
    assert (named.module, named.function, named.sizes) == ("a.b", "build", (("seq", 128),))
    assert {n: tuple(x.shape) for n, x in named.example().items()} == {"ids": (2, 128), "pixels": (2, 3, 8, 8)}
    assert with_inputs("a:b", "ids=int64[batch,seq]", 8) == "a:b(ids=int64[batch,seq=8])"
    assert not is_code("llama-3.1-8b") and not is_code("C:/models/config.json") and is_code("a.b:c")
    for wrong in ("ids=int64", "ids=float8[batch]", "ids=int64[batch] x"):
        with pytest.raises(FormatError):
            CodeModel.parse(f"a:b({wrong})")
    with pytest.raises(InputError, match="is none"):
        with_inputs("llama-3.1-8b", "ids=int64[batch,seq]", None)


def test_predict_takes_a_function_of_one_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Path(__file__).with_name("models.py").read_text(encoding="utf-8")
    (tmp_path / "my_network.py").write_text(source + "\n\ndef build():\n    return NanoGPT()\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GNOMON_CACHE", str(tmp_path / "cache"))
    inputs = "ids=int64[batch,seq],targets=int64[batch,seq]"
    asked = ["predict", "my_network:build", "--inputs", inputs, "--on", "1x2xh100-sxm", "--seq-len", "32"]
    try:
        assert main(asked) == 0
        first = capsys.readouterr().out
        assert "my_network.build on 1x2xh100-sxm" in first and "without a rule of their own" in " ".join(first.split())
        del sys.modules["my_network"]
        assert main(asked) == 0  # kept on disk: nothing is imported
        assert capsys.readouterr().out == first and "my_network" not in sys.modules
        (tmp_path / "my_network.py").write_text(source + "\n\ndef build():\n    return NanoGPT(layers=5)\n")
        assert main(asked) == 0
        assert capsys.readouterr().out != first
    finally:
        sys.modules.pop("my_network", None)
    assert main(["predict", "no_such_module:build", "--inputs", inputs, "--on", "1x2xh100-sxm"]) == 2
    assert "cannot import 'no_such_module'" in capsys.readouterr().err


class Gated(nn.Module):
    """A gate of the module itself, as no function of what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tanh(self.gate)


def test_an_activation_of_a_parameter_is_its_aten_op() -> None:
    """A rank holds parts of parameters (`Weight`), which activations do not take."""
    graph = gnomon.capture(Gated(), (torch.randn(2, 8),))
    assert [op.kind for block in graph.blocks for op in block.ops if "gate" in op.inputs] == ["opaque"]
    assert prove(Gated(), (torch.randn(2, 8),)).holds
