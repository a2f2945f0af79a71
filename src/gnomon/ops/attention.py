"""Attention and what tells it where tokens stand: `attention`, `rotary`, `alibi`, and its `softmax` in steps.

Dims of q, k and v are (…, seq, heads, dim); k and v share all but the last, and heads may be a multiple of theirs.
Leaves out attention over a cache.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from gnomon.errors import GraphError, PlanError
from gnomon.ops.bases import MOVES_BYTES
from gnomon.ops.curve import Curve, Stream, once
from gnomon.ops.divided import BOTH, own_collective, with_inside
from gnomon.ops.kernels import Kernels
from gnomon.ops.op import AttrValue, Op, Problem, RuledCall, Steps, Tensors, attrs
from gnomon.ops.rules import (
    cannot_write,
    elementwise_work,
    first_dims,
    moved_back,
    per_element,
    per_element_back,
    saves_output,
)
from gnomon.ops.strategy import Division, Strategy
from gnomon.ops.work import CausalFlops, GradOp, Setting, Work
from gnomon.tensors.dims import Dim, Number, numel, size_of
from gnomon.tensors.layout import CollectiveKind, Phase, ceil_div
from gnomon.tensors.names import HEAD_DIMS
from gnomon.tensors.tensor import Tensor


def attention_pairs_x2(q: Number, kv: Number, *, causal: bool, window: int, convention: CausalFlops) -> Number:
    """Twice the number of (query, key) pairs that count; twice, so that half of an odd square stays an integer.

    q: queries, the last q of kv positions. Full: q·kv. Half: a query at position t sees min(t, window) keys,
    integrated over t from kv−q to kv, so a causal square counts q²/2 (not q(q+1)/2). window 0: none.
    Raises GraphError if q > kv under a causal mask.
    """
    if not causal and not window or convention == "full":
        return 2 * q * kv
    if not causal:
        return 2 * q * np.minimum(2 * window, kv) if isinstance(kv, np.ndarray) else 2 * q * min(2 * window, kv)
    if np.any(np.asarray(q) > np.asarray(kv)):
        raise GraphError(f"causal attention of {q} queries over {kv} keys: keys include the queries' own positions")
    if not window:
        # Twice the integral of t over t from kv - q to kv.
        return kv * kv - (kv - q) * (kv - q)
    limit: int = window
    if isinstance(kv, int) and isinstance(q, int):
        # Twice the integral of min(t, window) over t from kv - q to kv: t² up to the window, 2 · window · t beyond it.
        low, high = min(kv - q, limit), min(kv, limit)
        return high * high - low * low + 2 * limit * (max(kv, limit) - max(kv - q, limit))
    low_a, high_a = np.minimum(kv - q, limit), np.minimum(kv, limit)
    return np.asarray(high_a**2 - low_a**2 + 2 * limit * (np.maximum(kv, limit) - np.maximum(kv - q, limit)))


def kv_dim(dim: Dim) -> Dim:
    """The key axis that runs over the same positions as `dim`: `seq` -> `kv_seq`, of the same size unless said."""
    if dim.factors:
        return Dim(name=f"kv_{dim.name}", factors=tuple(kv_dim(f) for f in dim.factors))
    if dim.size is not None:
        return Dim(name=f"kv_{dim.name}", size=dim.size)
    return Dim(name=f"kv_{dim.name}", same_as=dim.name)


def pairs_of(op: Op, q: Number, kv: Number, convention: CausalFlops) -> Number:
    """`attention_pairs_x2` under the op's own mask."""
    window = op.attr("window", 0)
    assert isinstance(window, int)
    return attention_pairs_x2(q, kv, causal=bool(op.attr("causal", False)), window=window, convention=convention)


def _flops(op: Op, block: Tensors, setting: Setting) -> Number:
    """Counts the FLOPs of flash attention's forward."""
    q, k, v = (block.tensor(name) for name in op.inputs[:3])
    sizes = setting.sizes
    pairs_x2 = pairs_of(op, size_of(q.dims[-3], sizes), size_of(kv_dim(k.dims[-3]), sizes), setting.causal_flops)
    # 2 FLOPs a multiply-add, of q·k over d_k and p·v over d_v: pairs are given twice, which is this factor.
    rows = numel((*q.dims[:-3], q.dims[-2]), sizes)
    return rows * (size_of(q.dims[-1], sizes) + size_of(v.dims[-1], sizes)) * pairs_x2


def _work(op: Op, block: Tensors, setting: Setting) -> Work:
    return elementwise_work(op, block, setting, flops=(_flops(op, block, setting), 0))


def _work_back(op: Op, block: Tensors, setting: Setting, grad: GradOp) -> Work:
    """dV, dP, dQ, dK: twice the forward; P is recomputed from q and k."""
    q, v = block.tensor(op.inputs[0]), block.tensor(op.inputs[2])
    d_k, d_v = size_of(q.dims[-1], setting.sizes), size_of(v.dims[-1], setting.sizes)
    flops = _flops(op, block, setting)
    # The second number is matmuls that no count of model FLOPs has: the scores once more, d_k of d_k + d_v.
    return moved_back(op, block, setting, grad, flops=(2 * flops, flops * d_k // (d_k + d_v)))


def _dims(op: Op, block: Tensors) -> Problem:
    q, k, v = (block.tensor(n) for n in op.inputs[:3])
    out = block.tensor(op.outputs[0])
    if min(len(t.dims) for t in (q, k, v)) < 3 or q.dims[-1] != k.dims[-1] or k.dims[:-1] != v.dims[:-1]:
        return f"attention of {q}, {k}, {v}: dims are (…, seq, heads, dim); k and v share the first two"
    if q.dims[:-3] != k.dims[:-3] or out.dims != (*q.dims[:-1], v.dims[-1]):
        return f"attention of {q}, {k}, {v} cannot write {out}"
    heads, kv_heads = q.dims[-2].size, k.dims[-2].size
    if heads and kv_heads and heads % kv_heads:
        return f"{heads} query heads are not a multiple of {kv_heads} key heads"
    return None


def _alibi_dims(op: Op, block: Tensors) -> Problem:
    places, out = block.tensor(op.inputs[0]).dims, block.tensor(op.outputs[0]).dims
    fits = len(places) == 1 and len(out) == 3 and out[:2] == (places[0], kv_dim(places[0]))
    return None if fits else cannot_write(op, block)


def _saves(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    """Everything that it read and wrote, the log-sum-exp of each row included (Dao 2022)."""
    return (*op.inputs, *op.outputs)


def _steps(op: Op, low: Steps, kernels: Kernels) -> None:
    """Writes attention as the ops that a stack's kernel is, with what each leaves for backward.

    `flash` is one op and keeps the log-sum-exp of a row. Otherwise scores (…, heads, seq, kv_seq) are in memory: scaled
    matmul, softcap, bias, softmax (in fp32 between casts under `unfused_fp32_softmax`), dropout, matmul with values.
    """
    in_steps = kernels.attention_in_steps and op.attr("in_steps", False)
    kernel = "steps" if in_steps else kernels.attention
    if kernel == "flash":
        q = low.block.tensor(op.inputs[0])
        low.emit(op, Tensor(name=f"{op.path}:lse", dims=(*q.dims[:-3], q.dims[-2], q.dims[-3]), dtype="fp32"))
        return
    pairs, like = _operands(op, low)
    q = low.block.tensor(op.inputs[0])
    contracts = tuple(a.name for a in q.dims[-1].atoms)
    queries, keys, values = q.name, f"{op.path}:k_view", f"{op.path}:v_view"
    if kernel == "steps":
        views = {t.name: t for t in low.tensors if t.name in (keys, values)}
        # torch's math path scales q and k by the root of the scale each, so that half precision does not overflow.
        queries = low.step(op, "q_scaled", "scale", (queries,), replace(q, kind="activation"))
        keys = low.step(op, "k_scaled", "scale", (keys,), views[keys])
        if not op.attr("values_in_rows", False):  # a batched matmul copies what does not lie so
            values = low.step(op, "v_rows", "repeat", (values,), views[values])
    x = low.step(op, "scores", "matmul", (queries, keys), like, contracts=contracts, attrs=pairs)
    if op.attr("softcap", 0.0):
        x = low.step(op, "capped", "softcap", (x,), like)
        # The derivative of tanh is 1 - tanh², so backward reads the result.
        tanh = replace(like, name=f"{op.path}:tanh")  # which backward reads
        low.tensors.append(tanh)
        low.ops[-1] = replace(low.ops[-1], outputs=(x, tanh.name))
    if len(op.inputs) > 3:
        x = low.step(op, "biased", "add", (x, _bias(op, low, like)), like)
    if kernel == "unfused_fp32_softmax":
        wide = replace(like, dtype="fp32")
        x = low.step(op, "scores_fp32", "cast", (x,), wide)
        x = low.step(op, "probs_fp32", "softmax", (x,), wide)
        x = low.step(op, "probs", "cast", (x,), like)
    else:
        # fused with scale and mask: what a causal mask empties is written, not read
        x = low.step(op, "probs", "softmax", (x,), like, attrs=attrs(causal=bool(op.attr("causal", False))))
    p = op.attr("dropout", 0.0)
    if p:
        mask = Tensor(name=f"{op.path}:mask", dims=like.dims, dtype="bool")
        dropped = Tensor(name=f"{op.path}:dropped", dims=like.dims)
        low.tensors += [mask, dropped]
        names = (dropped.name, mask.name)
        low.ops.append(Op(kind="dropout", path=dropped.name, inputs=(x,), outputs=names, attrs=attrs(p=p)))
        x = dropped.name
    kv_names = tuple(a.name for a in like.dims[-1].atoms)
    low.ops.append(replace(op, kind="matmul", inputs=(x, values), contracts=kv_names, attrs=pairs))


def _bias(op: Op, low: Steps, scores: Tensor) -> str:
    """What is added to the scores, over their dims: a captured bias has its own names for them, the last one theirs
    last as torch broadcasts, and dims of one element."""
    bias = low.block.tensor(op.inputs[3])
    if all(atom in scores.atoms for atom in bias.atoms) or len(bias.dims) > len(scores.dims):
        return bias.name
    pairs = zip(bias.dims, scores.dims[len(scores.dims) - len(bias.dims) :], strict=True)
    view = replace(bias, dims=tuple(theirs for mine, theirs in pairs if mine.size != 1), kind="activation")
    return low.step(op, "bias_view", "rename", (bias.name,), view)


def _operands(op: Op, low: Steps) -> tuple[tuple[tuple[str, AttrValue], ...], Tensor]:
    """Views (and copies, if heads share keys) of k and v over the key axis; what masks, and the scores' shape."""
    q, k, v = (low.block.tensor(n) for n in op.inputs[:3])
    heads, kv = q.dims[-2], kv_dim(k.dims[-3])
    for what, source in (("k", k), ("v", v)):
        name = source.name
        if k.dims[-2] != heads:  # batched matmul needs as many key heads as query heads: eager code copies them
            copy = Tensor(name=name, dims=(*source.dims[:-2], heads, source.dims[-1]))
            name = low.step(op, f"{what}_repeated", "repeat", (name,), copy)
        view = Tensor(name=name, dims=(*source.dims[:-3], kv, heads, source.dims[-1]))
        low.step(op, f"{what}_view", "rename", (name,), view)
    causal, window = op.attr("causal", False), op.attr("window", 0)
    pairs = attrs(causal=causal, window=window, q_dim=q.dims[-3].name, kv_dim=kv.name)
    return pairs, Tensor(name="scores", dims=(*q.dims[:-3], heads, q.dims[-3], kv))


CAUSAL_READS = 0.5
"""Share of scores (backward: of probabilities and their gradients) that a softmax fused with a causal mask reads.
Source: NVIDIA/Megatron-LM scaled_upper_triang_masked_softmax.h walks a row up to the diagonal and writes all of it."""


def _reads_causal(op: Op) -> Curve:
    return Stream(1, CAUSAL_READS if op.attr("causal", False) else 1.0, 1.0, "reduce")


def _reads_causal_back(op: Op, grad: GradOp) -> Curve:
    return _reads_causal(op)


def _whole_keys(op: Op, setting: Division) -> dict[str, Number]:
    """Keys cover the whole sequence although queries do not."""
    key_dim = setting.block.tensor(op.inputs[1]).dims[-3]
    return {f"kv_{key_dim.name}": size_of(key_dim, setting.scene.sizes)}


def _ring(op: Op, setting: Division, plain: Strategy) -> Strategy:
    """Ring attention (Liu et al. 2023): keys and values pass around in cp-1 rounds; in backward again, and their
    gradients once all the way round, in cp rounds. Gradients are counted in the compute dtype; ring-flash-attention
    (zhuzilin) sends them in fp32, twice the bytes: a stack says."""
    cp = setting.scene.ranks("cp")
    keys = setting.bytes(op.inputs[1], plain.inputs[1]) + setting.bytes(op.inputs[2], plain.inputs[2])
    inside = (
        own_collective(op, setting, "send_recv", "cp", keys, "forward", op.inputs[1], steps=cp - 1),
        own_collective(op, setting, "send_recv", "cp", keys, "backward", op.inputs[1], steps=cp - 1),
        own_collective(op, setting, "send_recv", "cp", keys, "backward", f"grad({op.inputs[1]})", steps=cp),
    )
    return with_inside(plain, "ring", inside, _whole_keys(op, setting))


def _gathered(op: Op, setting: Division, plain: Strategy) -> Strategy:
    """Keys and values gathered over cp (as in Llama 3's training); their gradients scattered. Gathered again in
    backward unless the layout keeps gathered tensors."""
    inside = []
    ways: tuple[tuple[Phase, CollectiveKind], ...] = (
        ("forward", "all_gather"),
        ("backward", "all_gather"),
        ("backward", "reduce_scatter"),
    )
    for phase, kind in ways:
        if phase == "backward" and kind == "all_gather" and setting.layout.keep_gathered:
            continue
        for name, sharding in zip(op.inputs[1:3], plain.inputs[1:3], strict=True):
            size = setting.bytes(name, sharding.without("cp"))
            inside.append(own_collective(op, setting, kind, "cp", size, phase, name))
    return with_inside(plain, "all_gather", tuple(inside), _whole_keys(op, setting))


def _ulysses(op: Op, setting: Division, plain: Strategy) -> Strategy | None:
    """DeepSpeed-Ulysses (Jacobs et al. 2023): all-to-alls exchange sequence for heads before attention and back
    after, for queries, keys, values and output, and for their gradients. None if cp does not divide the local
    heads."""
    cp, sizes = setting.scene.ranks("cp"), setting.scene.sizes
    query, key = (setting.block.tensor(name) for name in op.inputs[:2])
    local: dict[str, Number] = {}
    repeats = 1  # fewer local key-value heads than cp: each is sent to several ranks
    for tensor in (query, key):
        heads, ways = tensor.dims[-2], setting.scene.ranks("tp") * cp
        size = size_of(heads, sizes)
        if tensor is query and (not isinstance(size, int) or size % ways):
            return None
        local[heads.name] = ceil_div(size, ways)
        if isinstance(size, int) and tensor is key:
            # Local key-value heads are size / tp rounded up; with fewer than cp each goes to cp / local ranks.
            repeats = max(1, cp // -(-size // setting.scene.ranks("tp")))
    for dim in (query.dims[-3], key.dims[-3]):
        local[dim.name] = size_of(dim, sizes)
    moved = [*zip(op.inputs[:3], plain.inputs[:3], strict=True), (op.outputs[0], plain.outputs[0])]
    inside = []
    for phase, names in zip(BOTH, (moved, moved[::-1]), strict=True):
        for name, sharding in names:
            size = setting.bytes(name, sharding) * (repeats if name in op.inputs[1:3] else 1)
            inside.append(own_collective(op, setting, "all_to_all", "cp", size, phase, name))
    return with_inside(plain, "ulysses", tuple(inside), local)


def _strategies(op: Op, setting: Division, plain: Strategy) -> tuple[Strategy, ...]:
    """Lists the three ways over cp, where each rank has a part of every sequence; the layout's choice is first."""
    if setting.scene.ranks("cp") == 1:
        return (plain,)
    chosen = setting.layout.context
    # False sorts before True: the layout's choice comes first.
    order = sorted(("ring", "all_gather", "ulysses"), key=lambda name: name != chosen)
    ways = {"ring": _ring, "all_gather": _gathered, "ulysses": _ulysses}
    usable = tuple(way for name in order if (way := ways[name](op, setting, plain)) is not None)
    if usable[0].name != chosen:
        raise PlanError(f"{op.path}: context = {chosen!r} cannot divide its heads over cp; use {usable[0].name!r}")
    return usable


ATTENTION = replace(
    MOVES_BYTES,
    name="attention",
    signature="q, k, v[, bias or sinks] -> softmax(q kᵀ · scale) v; causal, window, scale, softcap, dropout, sinks",
    dims=_dims,
    saves=_saves,
    forward=_work,
    backward=_work_back,
    steps=_steps,
    fused_by="attention",
    decay="matrices",
    price="attention",
    grad_price="attention",
    strategies=_strategies,
    together=HEAD_DIMS,
    does="attends",
    served="apart",
    calls=(RuledCall(function="scaled_dot_product_attention", rule="attention"),),
    documents=True,
    zeros="of the values",
    torch="attention:attention",
)

SOFTMAX = replace(
    MOVES_BYTES,
    name="softmax",
    signature="x -> softmax over its last dim; fn: log for its logarithm; causal, in_place",
    dims=first_dims,
    saves=saves_output,
    forward=per_element(5),
    backward=per_element_back(4),
    price=_reads_causal,
    grad_price=_reads_causal_back,
    does="weighs",
    zeros="unknown",
    torch="lowered",
)

ROTARY = replace(
    MOVES_BYTES,
    name="rotary",
    signature="x[, positions] -> x turned by its position; base, scaling",
    dims=first_dims,
    saves="nothing",  # sines and cosines are tables
    forward=per_element(3),
    backward=per_element_back(3),
    calibrated="rows read",
    does="rotates",
    served="kernel a block",
    documents=True,
    zeros="unknown",
    torch="attention:rotary",
)

ALIBI = replace(
    MOVES_BYTES,
    name="alibi",
    signature="positions -> bias (positions, positions, heads): linear biases in place of positions",
    dims=_alibi_dims,
    saves="nothing",
    forward=per_element(0),
    backward=per_element_back(0),
    price=once(kernels=2),  # distances, times slopes
    grad_price=once(kernels=2),
    does="measures distance",
    zeros="unknown",
    torch="alibi:alibi",
)

KINDS = (ATTENTION, SOFTMAX, ROTARY, ALIBI)
