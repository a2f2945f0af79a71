"""Every kind of the registry against plain torch: dims, results, gradients, what is kept, FLOPs, and every strategy.

Examples and oracles are in `examples`; a kind without an example fails. Strategies run on ranks that are threads
(`thread_ranks`): operands are cut as the strategy says, results put together as it says, and what was sent is held to
the collectives that it lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from ops.examples import EXAMPLES, Example, mixed, mixture  # noqa: E402
from ops.thread_ranks import ThreadRanks  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from gnomon import ops  # noqa: E402
from gnomon.errors import GraphError  # noqa: E402
from gnomon.graph import (  # noqa: E402
    Dim,
    Dtypes,
    Setting,
    backward,
    forward_work,
    grad_work,
    gradients,
    lower,
    nbytes,
    storages,
)
from gnomon.models.presets import model  # noqa: E402
from gnomon.ops.strategy import Strategy  # noqa: E402
from gnomon.plans import Dispatch, Experts, Layout, Plan  # noqa: E402
from gnomon.plans.experts import under  # noqa: E402
from gnomon.prediction.software_kernels import kernels_of  # noqa: E402
from gnomon.runtime.mesh import collectives  # noqa: E402
from gnomon.runtime.ops import function_of  # noqa: E402
from gnomon.runtime.ops.captured import calls, captured  # noqa: E402
from gnomon.runtime.ops.gathered import gathered_combine, gathered_dispatch, gathered_routing  # noqa: E402
from gnomon.runtime.ops.linear import linear  # noqa: E402
from gnomon.runtime.ops.routing import combine, dispatch, grouped_linear, routing_of  # noqa: E402
from gnomon.runtime.ops.site import Axis, Site  # noqa: E402
from gnomon.runtime.parameters.parameters import Tape  # noqa: E402
from gnomon.sharding.context import chunks_of  # noqa: E402
from gnomon.sharding.strategies import setting_of, strategies  # noqa: E402
from gnomon.software.catalogue import stack  # noqa: E402
from gnomon.tensors.layout import Scene, Sharding  # noqa: E402
from gnomon.tensors.names import TOKEN_DIMS, base  # noqa: E402

pytestmark = pytest.mark.torch

FP32 = Dtypes(compute="fp32", param="fp32")
SETTING = Setting(sizes={}, dtypes=FP32, causal_flops="full")
OWN = kernels_of(stack("gnomon"))[0]
"""What the runtime keeps: the choices of its record."""

CASES = [
    pytest.param(example, id=f"{kind}-{index}")
    for kind, made in EXAMPLES.items()
    for index, example in enumerate(made(Random(f"{kind} 1")))
]
EXPERTS = ("dispatch", "grouped_linear", "combine")
"""Kinds whose rows lie sorted by expert where they run: held to the loop over experts, all three together."""


def test_every_kind_has_an_example() -> None:
    assert {kind.name for kind in ops.every()} == set(EXAMPLES)
    for name, made in EXAMPLES.items():
        assert made(Random(0)) and all(example.op.kind == name for example in made(Random(0))), name


class Held:
    """A parameter as ops read it (`runtime.parameters.parameters.Weight`), whose gradient stays here."""

    def __init__(self, value: Tensor, rows: int) -> None:
        self.value, self.shape, self.tape, self.trained = value, tuple(value.shape), Tape(), True
        self.matrix = value.flatten(0, rows - 1).flatten(1) if rows else value.flatten()
        self.grad = torch.zeros_like(value)

    def add(self, grad: Tensor) -> None:
        self.grad += grad.view_as(self.grad)

    def add_matmul(self, left: Tensor, right: Tensor) -> None:
        self.add(left.T @ right)

    def add_matmuls(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.add(torch.stack([left @ right for left, right in pairs]))

    def add_rows(self, at: Tensor, rows: Tensor) -> None:
        self.grad.view(self.shape[0], -1).index_add_(0, at, rows)


def operands_of(example: Example, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Random operands in the op's order, which want gradients where they are floats."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for name in example.op.inputs:
        tensor = example.block.tensor(name)
        shape = [_size(dim) for dim in tensor.dims]
        if tensor.kind == "state" and not tensor.is_float:
            found.append(torch.arange(shape[0]))
        elif not tensor.is_float:
            least, below = example.at_least.get(name, 0), example.below[name]
            found.append(torch.randint(least, below, shape, generator=generator))
        else:
            made = torch.randn(shape, generator=generator, dtype=dtype)
            found.append(made if example.op.rules.gradient == "none" else made.requires_grad_())
    return found


def _size(dim: Dim) -> int:
    found = 1
    for atom in dim.atoms:
        found *= atom.size or next(int(d) for d in (8,))
    return found


def ungraded(example: Example) -> set[int]:
    return set(example.op.rules.ungraded)


def site_of(example: Example, strategy: str = "local", axes: Mapping[str, Axis] | None = None, **more: Any) -> Site:
    return Site(op=example.op, block=example.block, strategy=strategy, axes=axes or {}, **more)


def computed(site: Site, given: Sequence[Tensor], example: Example) -> tuple[tuple[Tensor, ...], list[Any]]:
    """(outputs, operands as the function got them) of the op's torch function."""
    op, block = site.op, site.block
    rows = site.weight_rows if op.contracts else None
    operands: list[Any] = []
    for name, x in zip(op.inputs, given, strict=True):
        if block.tensor(name).kind == "parameter":
            depth = (rows if rows is not None and name == op.inputs[1] else 0) if op.contracts else max(0, x.dim() - 1)
            operands.append(Held(x.detach(), depth or 0))
        else:
            operands.append(x)
    divided = example.divided if site.axes and example.divided is not None else None
    if divided is not None:
        operands = list(given)
        out = divided(site, *given)
    elif op.kind == "linear":
        out = linear(site, *operands)
    elif op.captured is not None:
        sizes = {dim.name: dim.size or 0 for tensor in block.tensors for dim in tensor.atoms}
        out = captured(calls(op, sizes, sizes, given[0].dtype, given[0].device), given[0].device, site, *operands)
    elif op.rules.runs == "lowered":
        operands = list(given)
        out = example.oracle(*given)
    else:
        out = function_of(op.kind)(site, *operands)
    return (out if isinstance(out, tuple) else (out,)), operands


def floats(outputs: Iterable[Any]) -> list[Tensor]:
    return [x for x in outputs if x.is_floating_point()]


def oracle_of(example: Example, given: Sequence[Tensor]) -> list[Tensor]:
    out = example.oracle(*given)
    return floats(out if isinstance(out, (tuple, list)) else (out,))


def weights_like(outputs: Sequence[Tensor]) -> list[Tensor]:
    """A random cotangent of each output."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in outputs]


def pull(outputs: Sequence[Tensor], along: Sequence[Tensor], operands: Sequence[Any]) -> list[Tensor | None]:
    """Gradients of the operands."""
    pairs = [(x, w) for x, w in zip(outputs, along, strict=True) if x.requires_grad]
    if not pairs:
        return [None] * len(operands)
    torch.autograd.backward([x for x, _ in pairs], [w for _, w in pairs])
    return [x.grad for x in operands]


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("example", CASES)
def test_results_and_gradients_are_those_of_plain_torch(example: Example) -> None:
    if example.op.kind in EXPERTS:
        pytest.skip("rows lie sorted by expert: held below, all three together")
    given = operands_of(example, torch.float64)
    outputs, operands = computed(site_of(example), given, example)
    shapes = [[_size(d) for d in example.block.tensor(name).dims] for name in example.op.outputs]
    assert [list(x.shape) for x in outputs] == shapes
    outs, expected = floats(outputs), oracle_of(example, given)
    for a, b in zip(outs, expected, strict=True):
        close(a, b.to(a.dtype), 1e-10)
    along = weights_like(outs)
    mine = pull(outs, along, operands)
    fresh = operands_of(example, torch.float64)
    theirs = pull(oracle_of(example, fresh), [w.to(x.dtype) for w, x in zip(along, expected, strict=True)], fresh)
    wanted = gradients(example.block)
    for at, (name, a, b) in enumerate(zip(example.op.inputs, mine, theirs, strict=True)):
        if at in ungraded(example):
            assert a is None or not a.any(), name
            continue
        b = b if b is not None else torch.zeros_like(fresh[at])
        assert (name in wanted) >= bool(b.any() if b.is_floating_point() else False), name
        if fresh[at].is_floating_point():
            close(a if a is not None else torch.zeros_like(b), b, 1e-9)


@pytest.mark.parametrize("example", CASES)
def test_what_backward_keeps_is_what_autograd_keeps(example: Example) -> None:
    if example.op.kind in EXPERTS or example.keeps or example.op.rules.runs == "lowered":
        pytest.skip(example.keeps or "held below, or the runtime runs what it is a step of")
    given = operands_of(example, torch.float32)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        outputs, _ = computed(site_of(example), given, example)
    known = {x.untyped_storage().data_ptr(): name for name, x in zip(example.op.inputs, given, strict=True)}
    known |= {x.untyped_storage().data_ptr(): name for name, x in zip(example.op.outputs, outputs, strict=True)}
    block = lower(example.block, OWN)
    roots, wanted = storages(block, FP32), gradients(block)
    activations = {t.name for t in block.tensors if t.kind == "activation"}
    said = {roots[n] for op in block.ops for n in op.rules.saved(op, block, wanted) if n in activations}
    named = {known[x.untyped_storage().data_ptr()] for x in kept if x.untyped_storage().data_ptr() in known}
    assert {roots[n] for n in named if n in activations} == {n for n in said if ":" not in n}
    others = {x.untyped_storage().data_ptr(): x for x in kept if x.untyped_storage().data_ptr() not in known}
    beside = sum(nbytes(block.tensor(n), {}, FP32) for n in said if ":" in n)
    assert sum(x.numel() * x.element_size() for x in others.values()) == beside


@pytest.mark.parametrize("example", CASES)
def test_where_a_result_is_said_to_be_zero_it_is(example: Example) -> None:
    """The same places of operands are set to 0, and plain torch says where the result is."""
    op, zeros = example.op, example.op.rules.zeros_of(example.op)
    if zeros == "unknown" or (zeros == "of the weight" and len(op.inputs) == 1):
        return
    given = [x.detach() for x in operands_of(example, torch.float64)]
    if zeros in ("of the matrix", "of the weight", "of the table", "of the values"):
        at = 2 if zeros == "of the values" else 1
        for x in given[at:]:
            x.zero_()
        given[at] -= float(op.attr("offset", 0.0))  # of a norm that multiplies by 1 + weight
        assert not oracle_of(example, given)[0].any()
        return
    place = torch.rand(given[0].shape, generator=torch.Generator().manual_seed(1)) < 0.5
    for x in given if zeros in ("all", "joined") else given[:1]:
        x[place if x.shape == place.shape else ...] = 0
    outs = oracle_of(example, given)
    if outs[0].shape == place.shape and zeros in ("all", "either", "in place"):
        assert not outs[0][place].any()
    elif zeros not in ("all", "either") and sum(map(Tensor.numel, outs)) == sum(map(Tensor.numel, given)):
        assert sum(int((x == 0).sum()) for x in outs) == sum(
            int((x == 0).sum()) for x in given if x.is_floating_point()
        )
    assert op.rules.is_view <= (zeros in ("in place", "by names", "cut"))


@pytest.mark.parametrize("example", CASES)
def test_flops_are_those_that_torch_counts(example: Example) -> None:
    if example.op.kind in EXPERTS:
        pytest.skip("held below")
    given = operands_of(example, torch.float32)
    with FlopCounterMode(display=False) as forward:
        outs = oracle_of(example, given)
    with FlopCounterMode(display=False) as back:
        pull(outs, weights_like(outs), given)
    block = lower(example.block, replace(OWN, scan_recomputed=True))
    work = forward_work(block.ops[-1], block, SETTING)
    expected = forward.get_total_flops() if example.flops is None else example.flops
    assert work.matmul_flops == expected
    grads = [grad_work(step, block, SETTING) for step in backward(example.block, OWN, FP32).ops]
    counted = back.get_total_flops() if example.flops is None else example.flops_back
    assert sum(w.matmul_flops for w in grads) == counted
    if example.op.rules.memory in ("view", "part"):
        assert work.read_bytes == work.write_bytes == 0
    elif example.op.kind not in ("cast", "embedding", "softcap"):  # rows that are chosen; three kernels' traffic
        moved = sum(nbytes(block.tensor(n), {}, FP32) for n in {*block.ops[-1].inputs, *block.ops[-1].outputs})
        if example.op.captured is None and example.op.kind != "paged_attention":
            assert work.read_bytes + work.write_bytes == moved


@pytest.mark.parametrize("example", CASES)
def test_an_output_of_other_dims_is_refused(example: Example) -> None:
    op, block = example.op, example.block
    if op.rules.dims == "open":
        assert op.kind == "opaque", "its dims are those that were captured; every other kind has a rule"
        return
    out = block.tensor(op.outputs[0])
    wrong = [(*out.dims, Dim(name="stray", size=2))]
    if out.dims and not example.free:
        wrong.append((*out.dims[:-1], Dim(name="stray", size=13)))
    if out.dims:
        wrong.append(out.dims[1:])
    for dims in wrong:
        tensors = tuple(replace(t, dims=dims) if t.name == out.name else t for t in block.tensors)
        with pytest.raises(GraphError):
            replace(block, tensors=tensors)


# Strategies


@dataclass
class Cut:
    """How one tensor lies on a mesh: which elements of each atom a rank has."""

    tensor: Any
    sharding: Sharding
    axes: Mapping[str, int]
    order: str
    known: dict[str, int] = field(default_factory=dict)

    def indices(self, place: Mapping[str, int]) -> list[list[int]]:
        found = []
        for atom in self.tensor.atoms:
            own = list(range(atom.size))
            for axis in self.sharding.axes_of(atom.name):
                ranks, index = self.axes[axis], place[axis]
                if axis == "cp" and base(atom.name) in TOKEN_DIMS:  # images are cut into bands
                    chunks = chunks_of(index, ranks, self.order)
                    length = len(own) // (ranks * len(chunks))
                    own = [own[c * length + i] for c in chunks for i in range(length)]
                elif len(own) < ranks:
                    own = [own[index * len(own) // ranks]]
                else:
                    length = len(own) // ranks
                    own = own[index * length : (index + 1) * length]
            found.append(own)
        return found

    def local(self, x: Tensor, place: Mapping[str, int]) -> Tensor:
        """This rank's part."""
        out = self._apart(x)
        for at, own in enumerate(self.indices(place)):
            out = out.index_select(at, torch.tensor(own))
        return self._together(out)

    def whole(self, parts: Sequence[Tensor], places: Sequence[Mapping[str, int]], partial: Iterable[str]) -> Tensor:
        """Parts of all ranks put together: added up over `partial` axes, one of equal copies over others."""
        divided = {axis for axis, _ in self.sharding.shards}
        first: dict[tuple[int, ...], Tensor] = {}
        out = torch.zeros([atom.size for atom in self.tensor.atoms], dtype=parts[0].dtype)
        for part, place in zip(parts, places, strict=True):
            key = tuple(index for axis, index in place.items() if axis in divided or axis in partial)
            if key in first:
                close(part, first[key], 1e-4)  # every rank of the axis has all of it
                continue
            first[key] = part
            indices = self.indices(place)
            if not indices:
                out = out + part
                continue
            grid = torch.meshgrid([torch.tensor(own) for own in indices], indexing="ij")
            out = out.index_put(tuple(grid), part.reshape([len(own) for own in indices]), accumulate=True)
        return self._together(out)

    def _apart(self, x: Tensor) -> Tensor:
        return x.reshape([atom.size for atom in self.tensor.atoms])

    def _together(self, x: Tensor) -> Tensor:
        for at, dim in enumerate(self.tensor.dims):
            x = x.flatten(at, at + len(dim.atoms) - 1)
        return x


LAYOUTS = [Layout(), Layout(sequence_parallel=True), Layout(keep_gathered=True, context_order="contiguous")]
LAYOUTS += [Layout(context=way) for way in ("all_gather", "ulysses")]  # type: ignore[arg-type]
LAYOUTS += [Layout(loss_parallel=False)]


def ways(example: Example) -> Iterable[tuple[Mapping[str, int], Layout, Strategy]]:
    """Every strategy of an example, on each of its meshes and layouts that lead to another one."""
    seen = []
    for mesh in example.meshes:
        for layout in LAYOUTS:
            setting = setting_of(example.block, layout, Scene(axis_sizes=mesh, sizes={}, dtypes=FP32))
            for strategy in strategies(example.op, setting):
                key = mesh, strategy, layout.keep_gathered, layout.context_order
                if key not in seen:
                    seen.append(key)
                    yield mesh, layout, strategy


def simulate(
    example: Example, mesh: Mapping[str, int], layout: Layout, strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = operands_of(example, torch.float32)
    expected = oracle_of(example, given)
    along = weights_like(expected)
    op, block, order = example.op, example.block, layout.context_order
    theirs = pull(expected, along, given)
    ranks = ThreadRanks(mesh, order)
    places = [ranks.coordinates(rank) for rank in range(len(ranks.places))]
    axes = [ranks.mesh(rank) for rank in range(len(ranks.places))]
    ins = [Cut(block.tensor(n), s, mesh, order) for n, s in zip(op.inputs, strategy.inputs, strict=True)]
    float_outputs = [at for at, name in enumerate(op.outputs) if block.tensor(name).is_float]
    outs = [Cut(block.tensor(op.outputs[at]), strategy.outputs[at], mesh, order) for at in float_outputs]
    tokens = next((a.name for a in ins[0].tensor.atoms if base(a.name) in TOKEN_DIMS), "") if ins else ""
    positions = strategy.inputs[0].axes_of(tokens) if tokens else ()

    parts = Counter[str]()
    for cut in (*ins, *outs):
        parts |= {name: prod(mesh[axis] for axis in cut.sharding.axes_of(name)) for _, name in cut.sharding.shards}

    def rank_of(rank: int) -> tuple[list[Tensor], list[Tensor | None]]:
        mine = [cut.local(x.detach(), places[rank]) for cut, x in zip(ins, given, strict=True)]
        mine = [x.requires_grad_() if x.is_floating_point() else x for x in mine]
        site = site_of(
            example, strategy.name, axes[rank], divided=positions, keep_gathered=layout.keep_gathered, ways=parts
        )
        outputs, operands = computed(site, mine, example)
        results = floats(outputs)
        ranks.phases[rank][0] = "backward"
        back = [cut.local(w, places[rank]) for cut, w in zip(outs, along, strict=True)]
        return [x.detach() for x in results], pull(results, back, operands)

    monkeypatch.setattr(collectives, "dist", ranks)
    every = ranks.run(rank_of)
    for at, cut in enumerate(outs):
        whole = cut.whole([results[at] for results, _ in every], places, strategy.outputs[float_outputs[at]].partial)
        close(whole, expected[at].detach(), 1e-4)
    for at, cut in enumerate(ins):
        if theirs[at] is None or at in ungraded(example):
            continue
        parts = [grads[at] for _, grads in every]
        parts = [x if x is not None else torch.zeros(()) for x in parts]
        close(cut.whole(parts, places, strategy.grad_partial[at]), theirs[at], 1e-3)  # type: ignore[arg-type]
    listed = Counter[tuple[str, str, str]]()
    for one in strategy.inside:
        listed[one.phase, one.kind, one.axis] += int(one.bytes) * one.steps
    assert ranks.sent[0] == listed


@pytest.mark.parametrize("example", [case for case in CASES if case.values[0].meshes])  # type: ignore[attr-defined]
def test_every_strategy_gives_the_same_on_divided_tensors(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    for mesh, layout, strategy in ways(example):
        with monkeypatch.context() as patch:
            try:
                simulate(example, mesh, layout, strategy, patch)
            except AssertionError as error:
                raise AssertionError(f"{example.op.kind} as {strategy} on {dict(mesh)}, {layout}: {error}") from error


@pytest.mark.parametrize("way", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("mesh", [{}, {"ep": 2}, {"etp": 2}, {"ep": 2, "etp": 2}], ids=str)
def test_experts_give_what_a_loop_over_them_gives(
    mesh: Mapping[str, int], way: Dispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has tokens of its own, as many for each expert; weights are divided by experts and by their width."""
    gathers = way == "all_gather" and "ep" in mesh
    block, ranks = mixture(Random(3)), ThreadRanks(mesh, "contiguous")
    scene, layout = Scene(axis_sizes=mesh, sizes={}, dtypes=FP32), Layout(sequence_parallel=True, dispatch=way)
    setting = setting_of(block, layout, scene)
    generator = torch.Generator().manual_seed(5)
    count, cuts = len(ranks.places), {}
    weights = {}
    for name in ("up.weight", "down.weight"):
        shape = [dim.size or 0 for dim in block.tensor(name).dims]
        weights[name] = torch.randn(shape, generator=generator, requires_grad=True)
        cuts[name] = Cut(block.tensor(name), setting.home(name), mesh, "contiguous")
    x = torch.randn(count, 2, 8, 4, generator=generator, requires_grad=True)
    by = torch.rand(count, 2, 8, 2, generator=generator, requires_grad=True)
    order = torch.stack([torch.randperm(16, generator=generator) for _ in range(count)])
    chosen = torch.stack([order % 4, (order + 1) % 4], -1).view(count, 2, 8, 2)  # every expert as often
    expected = torch.stack([mixed(x[i], chosen[i], by[i], *weights.values()) for i in range(count)])
    along = torch.randn(expected.shape, generator=generator)
    expected.backward(along)
    places = [ranks.coordinates(rank) for rank in range(count)]
    axes = [ranks.mesh(rank) for rank in range(count)]

    def rank_of(rank: int) -> tuple[Tensor, ...]:
        ep, etp = (axes[rank].get(name, Axis()) for name in ("ep", "etp"))
        mine, rows_by = (t[rank].detach().requires_grad_() for t in (x, by))
        up, down = (Held(cuts[name].local(w.detach(), places[rank]), 2) for name, w in weights.items())
        routing = (gathered_routing if gathers else routing_of)(chosen[rank], 4, ep=ep, etp=etp)
        rows = (gathered_dispatch if gathers else dispatch)(mine, routing, ep=ep, etp=etp)
        made = grouped_linear(grouped_linear(rows, up, routing), down, routing)  # type: ignore[arg-type]
        out = (gathered_combine if gathers else combine)(made, rows_by, routing, ep=ep, etp=etp)
        ranks.phases[rank][0] = "backward"
        out.backward(along[rank])
        assert mine.grad is not None and rows_by.grad is not None
        return out.detach(), mine.grad, rows_by.grad, up.grad, down.grad

    monkeypatch.setattr(collectives, "dist", ranks)
    every = ranks.run(rank_of)
    for at, whole in ((0, expected.detach()), (1, x.grad), (2, by.grad)):
        assert whole is not None
        close(torch.stack([results[at] for results in every]), whole, 1e-4)
    for at, name in ((3, "up.weight"), (4, "down.weight")):
        gradient = weights[name].grad
        assert gradient is not None  # experts' gradients are of all ranks' tokens: rows came to them
        close(cuts[name].whole([results[at] for results in every], places, mesh), gradient, 1e-3)
    listed = Counter[tuple[str, str]]()
    for op in block.ops:
        for one in strategies(op, setting)[0].inside:
            listed[one.phase, one.axis] += int(one.bytes)
    sent = Counter[tuple[str, str]]()
    for (phase, _, axis), amount in ranks.sent[0].items():
        sent[phase, axis] += amount
    assert sent == listed


def test_experts_count_the_flops_of_their_rows() -> None:
    block = mixture(Random(3))
    rows, width, inner = 2 * 8 * 2, 4, block.tensor("up.weight").dims[1].size or 0
    assert sum(forward_work(op, block, SETTING).matmul_flops for op in block.ops) == 2 * (2 * rows * width * inner)
    steps = backward(block, OWN, FP32).ops
    assert sum(grad_work(step, block, SETTING).matmul_flops for step in steps) == 4 * (2 * rows * width * inner)


@pytest.mark.parametrize("asked", ["fp32", "fp64"])
def test_a_routers_product_is_computed_in_its_own_dtype(asked: str) -> None:
    """Forward and both gradients of a product of bf16, each to the bit what torch makes of the widened operands."""
    graph = under(model("mixtral-8x7b"), Plan(experts=Experts(router_dtype=asked)))  # type: ignore[arg-type]
    block = next(block for block in graph.blocks if block.does("routes"))
    router = next(op for op in block.ops if op.does == "routes")
    gate = next(op for op in block.ops if router.inputs[0] in op.outputs)
    assert {block.tensor(router.inputs[0]).dtype, block.tensor(router.outputs[0]).dtype} == {asked}
    wide, generator = {"fp32": torch.float32, "fp64": torch.float64}[asked], torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, 4096, generator=generator).bfloat16()
    weight = Held(torch.randn(8, 4096, generator=generator).bfloat16(), 1)
    grad = torch.randn(2, 3, 8, generator=generator, dtype=wide)
    given = x.clone().requires_grad_()
    out = linear(Site(op=gate, block=block, strategy="local", axes={}), given, weight)  # type: ignore[arg-type]
    out.backward(grad)
    assert torch.equal(out, x.to(wide) @ weight.value.to(wide).T)
    assert given.grad is not None and torch.equal(given.grad, (grad @ weight.value.to(wide)).bfloat16())
    assert torch.equal(weight.grad, (grad.flatten(0, 1).T @ x.to(wide).flatten(0, 1)).bfloat16())
    assert under(graph, Plan()) == model("mixtral-8x7b")
