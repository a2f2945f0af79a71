"""Which kernels run a block: `lower` rewrites its ops into those that kernels execute, with their side outputs.

Flash attention is one op that also writes the log-sum-exp; unfused it is repeat, matmul, softmax, dropout, matmul, with
all the s² tensors between. Dropout writes a mask, norms their statistics. After lowering, what backward needs is
among the inputs and outputs of each op, by name. Side tensors are named `path:what`.
Leaves out: which implementation is fastest, tiles, launch costs (room `prices`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from gnomon.errors import GraphError
from gnomon.graph.types import Block
from gnomon.ops.op import AttrValue, Op, attrs
from gnomon.tensors.dims import Dim
from gnomon.tensors.tensor import Tensor

Fusion = Literal["fused", "unfused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The choices that change what is kept and moved. No defaults: they belong to the stack that runs the model."""

    attention: Literal["flash", "unfused", "unfused_fp32_softmax"]
    """flash: one kernel, keeps q, k, v, out and the fp32 log-sum-exp (Dao 2022). unfused: matmul, softmax, matmul, as
    Megatron-LM does. unfused_fp32_softmax: the softmax also writes fp32 and is cast back, as eager transformers do."""
    norm: Fusion
    """unfused: RMSNorm in steps as in eager PyTorch, with an fp32 copy of the input. Other norms: always fused."""
    glu: Fusion
    """unfused: the activation and the product are two kernels, and the activated gate is kept too; `gelu_new` of
    transformers runs step by step, and keeps three tensors beside its input; `relu2` is two kernels."""
    cross_entropy: Literal[Fusion, "in_place"]
    """fused: keeps the logits and an fp32 log-sum-exp. unfused: casts the logits to fp32 and keeps the log-softmax.
    in_place: the same steps, with softmax and gradient written over the one fp32 copy, as Megatron-LM does."""
    full_recompute: Literal["whole", "needed"]
    """Of a layer of which only the input is kept. whole: its forward is run again to the end. needed: to the last
    tensor that its backward reads, so without its last product."""
    expert_weights: Literal["output", "activation"] = "output"
    """Where rows of experts are multiplied by the router's weights. output: as they are added up, which keeps what the
    last product wrote. activation: before it, which keeps nothing of that; without a gate, a feed-forward then keeps
    its activation with and without weights."""
    ruled_recompute: Literal["whole", "needed"] = "whole"
    """The same of a layer under preset `full` of which rules name single tensors. needed: the least that makes again
    what is not kept."""
    attention_in_steps: bool = False
    """Attention that says `in_steps` runs as products, softmax and products, of scaled copies of its operands, whatever
    else does: torch has no kernel for it on a CPU (sdp_utils_cpp.cpp: heads of equal widths, a bias of no gradient)."""
    scan_recomputed: bool = False
    """A state-space scan is run again in backward; otherwise it keeps what it wrote before the gate."""


FUSED = Kernels(attention="flash", norm="fused", glu="fused", cross_entropy="fused", full_recompute="whole")
"""Flash attention and fused norms, activations and loss."""
UNFUSED = Kernels(attention="unfused", norm="unfused", glu="unfused", cross_entropy="unfused", full_recompute="whole")
"""Everything in steps, the softmax in the compute dtype."""
EAGER = Kernels(
    attention="unfused_fp32_softmax", norm="unfused", glu="unfused", cross_entropy="unfused", full_recompute="whole"
)
"""Everything in steps, as the eager code of transformers runs it."""


def kv_dim(dim: Dim) -> Dim:
    """The key axis that runs over the same positions as `dim`: `seq` -> `kv_seq`, of the same size unless said."""
    if dim.factors:
        return Dim(name=f"kv_{dim.name}", factors=tuple(kv_dim(f) for f in dim.factors))
    if dim.size is not None:
        return Dim(name=f"kv_{dim.name}", size=dim.size)
    return Dim(name=f"kv_{dim.name}", same_as=dim.name)


@lru_cache(maxsize=256)
def lower(block: Block, kernels: Kernels) -> Block:
    """The same block in the ops that kernels run. Idempotent on ops that have no choice."""
    low = _Lowering(block)
    weighted = _weighted(block) if kernels.expert_weights == "activation" else frozenset()
    for op in block.ops:
        done = len(low.ops)
        if op.kind == "attention":
            steps = kernels.attention_in_steps and op.attr("in_steps", False)
            low.attention(op, "steps" if steps else kernels.attention)
        elif op.kind == "norm":
            low.norm(op, kernels.norm == "fused" or op.attr("fn", "") != "rms")
        elif op.kind == "glu" and kernels.glu == "unfused":
            low.glu(op)
        elif op.kind == "activation" and kernels.glu == "unfused" and op.attr("fn", "") == "gelu_new":
            low.gelu_new(op)
        elif op.kind == "activation" and kernels.glu == "unfused" and op.attr("fn", "") == "relu2":
            low.relu_squared(op)
        elif op.kind == "cross_entropy":
            low.cross_entropy(op, kernels.cross_entropy)
        elif (
            op.kind == "state_space" and not kernels.scan_recomputed
        ):  # its backward wants what the scan wrote before it was gated
            y = block.tensor(op.outputs[0])
            low.emit(op, Tensor(name=f"{op.path}:ungated", dims=y.dims, dtype=y.dtype))
        elif op.kind == "dropout":
            x = block.tensor(op.inputs[0])
            low.emit(op, Tensor(name=f"{op.path}:mask", dims=x.dims, dtype="bool"))
        elif op.kind == "opaque" and op.captured is not None:
            low.emit(op, *(t for t in op.captured.tensors if t.name in op.captured.keeps))
        elif op.kind == "combine" and weighted:
            low.ops.append(replace(op, attrs=attrs(**dict(op.attrs), weighted=True)))
        elif op.kind == "activation" and op.path in weighted:
            out = block.tensor(op.outputs[0])
            low.emit(op, Tensor(name=f"{op.path}:plain", dims=out.dims, dtype=out.dtype))
        else:
            low.ops.append(op)
        if op.attr("no_grad", False):
            low.ops[done:] = [
                replace(part, attrs=attrs(**dict(part.attrs) | {"no_grad": True})) for part in low.ops[done:]
            ]
    return replace(block, tensors=tuple(low.tensors), ops=tuple(low.ops))


def _weighted(block: Block) -> frozenset[str]:
    """Paths of the activations whose products `combine` adds up."""
    made_by = {name: op for op in block.ops for name in op.outputs}
    last = [made_by[op.inputs[0]] for op in block.ops if op.kind == "combine" and op.inputs[0] in made_by]
    return frozenset(made_by[op.inputs[0]].path for op in last if op.inputs[0] in made_by)


class _Lowering:
    """The growing lowered block."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.tensors = list(block.tensors)
        self.ops: list[Op] = []

    def emit(self, op: Op, *side: Tensor) -> None:
        """The op itself, with side outputs."""
        self.tensors += side
        self.ops.append(replace(op, outputs=(*op.outputs, *(t.name for t in side))))

    def step(self, parent: Op, what: str, kind: str, inputs: tuple[str, ...], like: Tensor, **rest: object) -> str:
        """One op of an expansion; writes a new tensor `path:what` with the dims and dtype of `like`."""
        out = Tensor(name=f"{parent.path}:{what}", dims=like.dims, dtype=like.dtype)
        self.tensors.append(out)
        self.ops.append(Op(kind=kind, path=out.name, inputs=inputs, outputs=(out.name,), **rest))  # type: ignore[arg-type]
        return out.name

    def attention(self, op: Op, kernel: str) -> None:
        if kernel == "flash":
            q = self.block.tensor(op.inputs[0])
            self.emit(op, Tensor(name=f"{op.path}:lse", dims=(*q.dims[:-3], q.dims[-2], q.dims[-3]), dtype="fp32"))
            return
        pairs, like = self.operands(op)
        q = self.block.tensor(op.inputs[0])
        contracts = tuple(a.name for a in q.dims[-1].atoms)
        queries, keys, values = q.name, f"{op.path}:k_view", f"{op.path}:v_view"
        if kernel == "steps":
            views = {t.name: t for t in self.tensors if t.name in (keys, values)}
            queries = self.step(op, "q_scaled", "scale", (queries,), replace(q, kind="activation"))
            keys = self.step(op, "k_scaled", "scale", (keys,), views[keys])
            if not op.attr("values_in_rows", False):  # a batched product copies what does not lie so
                values = self.step(op, "v_rows", "repeat", (values,), views[values])
        x = self.step(op, "scores", "matmul", (queries, keys), like, contracts=contracts, attrs=pairs)
        if op.attr("softcap", 0.0):
            x = self.step(op, "capped", "softcap", (x,), like)
        if len(op.inputs) > 3:
            x = self.step(op, "biased", "add", (x, self.bias(op, like)), like)
        if kernel == "unfused_fp32_softmax":
            wide = replace(like, dtype="fp32")
            x = self.step(op, "scores_fp32", "cast", (x,), wide)
            x = self.step(op, "probs_fp32", "softmax", (x,), wide)
            x = self.step(op, "probs", "cast", (x,), like)
        else:
            # fused with scale and mask: what a causal mask empties is written, not read
            x = self.step(op, "probs", "softmax", (x,), like, attrs=attrs(causal=bool(op.attr("causal", False))))
        p = op.attr("dropout", 0.0)
        if p:
            mask = Tensor(name=f"{op.path}:mask", dims=like.dims, dtype="bool")
            dropped = Tensor(name=f"{op.path}:dropped", dims=like.dims)
            self.tensors += [mask, dropped]
            names = (dropped.name, mask.name)
            self.ops.append(Op(kind="dropout", path=dropped.name, inputs=(x,), outputs=names, attrs=attrs(p=p)))
            x = dropped.name
        kv_names = tuple(a.name for a in like.dims[-1].atoms)
        self.ops.append(replace(op, kind="matmul", inputs=(x, values), contracts=kv_names, attrs=pairs))

    def bias(self, op: Op, scores: Tensor) -> str:
        """What is added to the scores, over their dims: a captured bias has its own names for them, the last one theirs
        last as torch broadcasts, and dims of one element."""
        given = self.block.tensor(op.inputs[3])
        if all(atom in scores.atoms for atom in given.atoms) or len(given.dims) > len(scores.dims):
            return given.name
        pairs = zip(given.dims, scores.dims[len(scores.dims) - len(given.dims) :], strict=True)
        view = replace(given, dims=tuple(theirs for mine, theirs in pairs if mine.size != 1), kind="activation")
        return self.step(op, "bias_view", "rename", (given.name,), view)

    def operands(self, op: Op) -> tuple[tuple[tuple[str, AttrValue], ...], Tensor]:
        """Views (and copies, if heads share keys) of k and v over the key axis; what masks, and the scores' shape."""
        q, k, v = (self.block.tensor(n) for n in op.inputs[:3])
        heads, kv = q.dims[-2], kv_dim(k.dims[-3])
        for what, source in (("k", k), ("v", v)):
            name = source.name
            if k.dims[-2] != heads:  # batched matmul needs as many key heads as query heads: eager code copies them
                copy = Tensor(name=name, dims=(*source.dims[:-2], heads, source.dims[-1]))
                name = self.step(op, f"{what}_repeated", "repeat", (name,), copy)
            view = Tensor(name=name, dims=(*source.dims[:-3], kv, heads, source.dims[-1]))
            self.step(op, f"{what}_view", "rename", (name,), view)
        causal, window = op.attr("causal", False), op.attr("window", 0)
        pairs = attrs(causal=causal, window=window, q_dim=q.dims[-3].name, kv_dim=kv.name)
        return pairs, Tensor(name="scores", dims=(*q.dims[:-3], heads, q.dims[-3], kv))

    def norm(self, op: Op, fused: bool) -> None:
        x = self.block.tensor(op.inputs[0])
        over = str(op.attr("over", ""))
        if over not in [d.name for d in x.dims]:
            raise GraphError(f"{self.block.name}/{op.path}: norm over {over!r}, which is not a dim of {x}")
        kept = tuple(d for d in x.dims if d.name != over)
        if op.attr("fn", "") == "group":  # statistics of a sample and group, over all positions
            groups = op.attr("groups", 0)
            assert isinstance(groups, int), "written by BlockBuilder.norm"
            kept = (x.dims[0], Dim(name="norm_groups", size=groups))
        row = Tensor(name=f"{op.path}:rstd", dims=kept, dtype="fp32")
        if fused:
            mean = () if op.attr("fn", "") == "rms" else (replace(row, name=f"{op.path}:mean"),)
            self.emit(op, *mean, row)
            return
        wide = replace(x, name="wide", dtype="fp32", kind="activation")
        copy = self.step(op, "fp32", "cast", (x.name,), wide)
        # mean of squares and rsqrt: reads the fp32 copy, writes one number a row
        self.tensors.append(row)
        self.ops.append(Op(kind="row_stats", path=row.name, inputs=(copy,), outputs=(row.name,)))
        scaled = self.step(op, "scaled", "mul", (copy, row.name), wide)
        if len(op.inputs) == 1:
            self.ops.append(replace(op, kind="cast", inputs=(scaled,), attrs=()))
            return
        normed = self.step(op, "normed", "cast", (scaled,), replace(x, kind="activation"))
        self.ops.append(replace(op, kind="mul", inputs=(normed, *op.inputs[1:]), attrs=()))

    def glu(self, op: Op) -> None:
        gate, up = op.inputs
        fn = attrs(fn=op.attr("fn", "silu"))
        act = self.step(op, "activated", "activation", (gate,), self.block.tensor(gate), attrs=fn)
        self.ops.append(replace(op, kind="mul", inputs=(act, up), attrs=()))

    def gelu_new(self, op: Op) -> None:
        """0.5 x (1 + tanh(a (x + b x³))), as transformers' NewGELUActivation runs it."""
        x = self.block.tensor(op.inputs[0])
        tanh = self.step(op, "tanh", "activation", (x.name,), x, attrs=attrs(fn="tanh"))
        more = self.step(op, "one_more", "activation", (tanh,), x, attrs=attrs(fn="add_one"))
        half = self.step(op, "half", "activation", (x.name,), x, attrs=attrs(fn="half"))
        self.ops.append(replace(op, kind="mul", inputs=(half, more), attrs=()))

    def relu_squared(self, op: Op) -> None:
        """relu(x)², as torch.pow(relu(x), 2) runs it."""
        x = self.block.tensor(op.inputs[0])
        relu = self.step(op, "relu", "activation", (x.name,), x, attrs=attrs(fn="relu"))
        self.ops.append(replace(op, inputs=(relu,), attrs=attrs(fn="square")))

    def cross_entropy(self, op: Op, how: str) -> None:
        logits = self.block.tensor(op.inputs[0])
        if how == "fused":
            self.emit(op, Tensor(name=f"{op.path}:lse", dims=logits.dims[:-1], dtype="fp32"))
            return
        wide = replace(logits, name="wide", dtype="fp32")
        copy = self.step(op, "fp32", "cast", (logits.name,), wide)
        over = {"in_place": True} if how == "in_place" else {}
        logp = self.step(op, "log_probs", "softmax", (copy,), wide, attrs=attrs(fn="log", **over))
        self.ops.append(replace(op, inputs=(logp, *op.inputs[1:]), attrs=attrs(nll=True)))
