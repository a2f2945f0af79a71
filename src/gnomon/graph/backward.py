"""The backward of a block, derived: its gradient steps and what they need kept, for one choice of kernels.

`backward` lowers a block and walks it in reverse; `saved` says which tensors are kept, offloaded or recomputed under a
policy. A tensor is identified by its storage: three linears reading one tensor keep it once, and a view keeps the
storage it looks into. Parameters and states are not counted: they live anyway. Leaves out: numbers (`totals.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal, TypeAlias

from gnomon.errors import GraphError, nearest
from gnomon.graph.kernels import lower
from gnomon.graph.types import Block
from gnomon.ops.kernels import Kernels
from gnomon.ops.op import Op
from gnomon.ops.work import GradOp
from gnomon.tensors.dims import Dtypes
from gnomon.tensors.tensor import Tensor

Action: TypeAlias = Literal["keep", "recompute", "offload"]
Policy: TypeAlias = Mapping[str, Action]
"""Tensor name or pattern (`self_attn.core:*`, `*`) -> action. An exact name beats a pattern; of patterns, the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor that lives from forward to backward."""

    tensor: Tensor
    """The storage that is kept (the base, if a view was asked for)."""
    needed_by: tuple[str, ...]
    """Paths of the ops whose backward reads it, in forward order."""
    where: Literal["input", "internal", "output"]
    """input: made by an earlier block, so two blocks may share it. output: later blocks may read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardBlock:
    """A lowered block with its backward."""

    forward: Block
    """The lowered block that the paths and names refer to."""
    ops: tuple[GradOp, ...]
    """Gradient steps in an order in which they can run."""
    saved: tuple[SavedTensor, ...]
    """What the steps read, if nothing is recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSplit:
    """What becomes of a block's tensors between forward and backward, under a policy."""

    on_device: tuple[SavedTensor, ...]
    """Stay in device memory."""
    offloaded: tuple[SavedTensor, ...]
    """Leave device memory and come back."""
    recomputed: tuple[SavedTensor, ...]
    """Needed by backward and recomputed."""
    recompute_ops: tuple[str, ...]
    """Paths of the lowered ops to run again before the backward, in forward order."""


def storages(block: Block, dtypes: Dtypes) -> Mapping[str, str]:
    """Tensor name -> name of the tensor whose storage it looks into (itself, unless made by a view).

    A cast between dtypes that resolve to the same one is a view.
    """
    roots = {t.name: t.name for t in block.tensors}
    for op in block.ops:
        memory = op.rules.memory
        if memory == "own":
            continue
        source = op.inputs[0]
        for out in op.outputs:
            # bf16 parameters under bf16 compute: a cast that makes nothing, whose result must not be counted beside its
            # source.
            if memory != "cast" or len({dtypes.resolve(block.tensor(n).dtype) for n in (source, out)}) == 1:
                roots[out] = roots[source]
    return roots


def gradients(block: Block, frozen: tuple[str, ...] = (), no_grad_inputs: tuple[str, ...] = ()) -> frozenset[str]:
    """Names of the tensors of a block that get a gradient.

    frozen: parameters that are not trained. no_grad_inputs: block inputs that want none (the model's own inputs).
    """
    # Only to raise GraphError for a name that the block does not have.
    for name in (*frozen, *no_grad_inputs):
        block.tensor(name)
    # What an op reads without a gradient by its kind, as labels or indices.
    ungraded = {op.inputs[at] for op in block.ops for at in op.rules.ungraded if at < len(op.inputs)}
    names = {t.name for t in block.parameters if t.name not in frozen and t.name not in ungraded}
    names |= {n for n in block.inputs if block.tensor(n).is_float and n not in no_grad_inputs}
    for op in block.ops:
        reads = any(name in names for name in op.inputs) and not op.stops_gradients
        if reads or op.attr("written", False):  # what is written into its memory later has gradients
            names |= {name for name in op.outputs if block.tensor(name).is_float and not _is_side(op, name)}
    return frozenset(names)


@lru_cache(maxsize=256)
def backward(
    block: Block,
    kernels: Kernels,
    dtypes: Dtypes,
    *,
    frozen: tuple[str, ...] = (),
    no_grad_inputs: tuple[str, ...] = (),
) -> BackwardBlock:
    """The gradient steps of a block and what they read, for a choice of kernels.

    frozen, no_grad_inputs: as in `gradients`. Raises GraphError for a name that the block does not have.
    """
    forward = lower(block, kernels)
    need_grad = gradients(forward, frozen, no_grad_inputs)
    readers: dict[str, list[str]] = {}
    for op in forward.ops:
        # An op that reads a tensor twice (x · x) hands back one gradient.
        for name in dict.fromkeys(op.inputs):
            if name in need_grad and any(out in need_grad for out in op.outputs):
                readers.setdefault(name, []).append(op.path)
    steps: list[GradOp] = []
    for op in reversed(forward.ops):
        for out in op.outputs:
            # Walking in reverse, all readers of `out` have stepped by now: their gradients are added up before its
            # maker needs the sum.
            if len(readers.get(out, ())) > 1:
                steps.append(_accumulate(out, readers[out]))
        steps += _steps(op, forward, need_grad)
    for name in forward.inputs:
        if len(readers.get(name, ())) > 1:
            steps.append(_accumulate(name, readers[name]))
    return BackwardBlock(forward=forward, ops=tuple(steps), saved=_needed(forward, need_grad, dtypes))


def _accumulate(name: str, readers: list[str]) -> GradOp:
    return GradOp(phase="accumulate", path=name, reads=tuple(readers), grads_in=(), grads_out=(name,))


def _steps(op: Op, block: Block, need_grad: frozenset[str]) -> list[GradOp]:
    grads_in = tuple(
        n for n in (op.outputs if op.captured is not None else op.outputs[:2]) if n in need_grad and not _is_side(op, n)
    )
    if not grads_in or not any(n in need_grad for n in op.inputs):
        return []
    activations = tuple(n for n in dict.fromkeys(op.inputs) if n in need_grad and block.tensor(n).kind != "parameter")
    parameters = tuple(n for n in dict.fromkeys(op.inputs) if n in need_grad and block.tensor(n).kind == "parameter")
    reads = op.rules.saved(op, block, need_grad)
    if op.rules.weight_grad == "together":
        both = (*activations, *parameters)
        return [GradOp(phase="input_grad", path=op.path, reads=reads, grads_in=grads_in, grads_out=both)]
    steps = []
    # A contraction: the input's gradient needs the weight alone and the weight's the input alone, which is why a
    # schedule may take them apart (zero bubble).
    if activations:
        steps.append(
            GradOp(phase="input_grad", path=op.path, reads=op.inputs[1:2], grads_in=grads_in, grads_out=activations)
        )
    if parameters:
        reads_of_weight = (
            op.inputs[:1] if op.inputs[1] in need_grad else ()
        )  # a bias alone needs only the incoming gradient
        steps.append(
            GradOp(phase="weight_grad", path=op.path, reads=reads_of_weight, grads_in=grads_in, grads_out=parameters)
        )
    return steps


def _is_side(op: Op, name: str) -> bool:
    """Whether an output is a mask or statistic that `lower` added: no gradient flows through it."""
    return name.startswith(f"{op.path}:") and name != op.outputs[0]


def _needed(block: Block, need_grad: frozenset[str], dtypes: Dtypes) -> tuple[SavedTensor, ...]:
    roots = storages(block, dtypes)
    users: dict[str, list[str]] = {}
    for op in block.ops:
        if not any(n in need_grad for n in op.inputs) or op.stops_gradients:
            continue
        for name in op.rules.saved(op, block, need_grad):
            root = roots[name]
            # Parameters and states live anyway.
            if block.tensor(root).is_activation and op.path not in users.setdefault(root, []):
                users[root].append(op.path)
    order = [t.name for t in block.tensors if t.name in users]
    return tuple(_saved(block, name, tuple(users[name])) for name in order)


def _saved(block: Block, name: str, users: tuple[str, ...]) -> SavedTensor:
    where: Literal["input", "internal", "output"] = "internal"
    if name in block.inputs:
        where = "input"
    elif name in block.outputs:
        where = "output"
    return SavedTensor(tensor=block.tensor(name), needed_by=users, where=where)


def _action(block: Block, policy: Policy, name: str) -> Action:
    if name in policy:
        return policy[name]
    for pattern, action in policy.items():
        if fnmatchcase(name, pattern) and not (action == "recompute" and name in block.inputs):
            return action
    return "keep"


def _check_policy(block: Block, policy: Policy) -> None:
    names = [t.name for t in block.tensors if t.is_activation]
    for pattern, action in policy.items():
        if action not in ("keep", "recompute", "offload"):
            raise GraphError(f"block {block.name!r}: policy {pattern!r} is {action!r}; use keep, recompute or offload")
        if not any(fnmatchcase(name, pattern) for name in names):
            raise GraphError(f"block {block.name!r}: policy {pattern!r} matches no tensor{nearest(pattern, names)}")
        if action == "recompute" and pattern in block.inputs:
            raise GraphError(f"block {block.name!r}: input {pattern!r} cannot be recomputed inside the block; keep it")


def saved(back: BackwardBlock, policy: Policy, dtypes: Dtypes) -> SavedSplit:
    """What is kept, offloaded and recomputed under `policy` (empty: all that backward reads is kept).

    A tensor marked recompute is recomputed by its op from what that op reads: tensors that are kept or offloaded, block
    inputs (which are then kept), and, failing these, others that are recomputed in turn. A name marked `keep` or
    `offload` explicitly ends that chain there. Raises GraphError for a pattern that matches nothing.
    """
    block = back.forward
    _check_policy(block, policy)
    roots = storages(block, dtypes)
    made_by = {out: op for op in block.ops for out in op.outputs}
    needed = {s.tensor.name: s for s in back.saved}
    # A block's input cannot be made again within the block, whatever a pattern says of it.
    available = {n for n in needed if _action(block, policy, n) != "recompute" or n in block.inputs}
    rerun: set[str] = set()
    # Backward closure over makers: each op runs again at most once, so the loop ends after as many turns as the block
    # has tensors.
    todo = [n for n in needed if n not in available]
    while todo:
        op = made_by[todo.pop()]
        if op.path in rerun:
            continue
        rerun.add(op.path)
        for name in op.inputs:
            root = roots[name]
            if not block.tensor(root).is_activation or root in available:
                continue
            # Where the chain of recomputation ends: at an input, or at a tensor that backward does not read itself and
            # that is named for it.
            if root in block.inputs or (root not in needed and policy.get(root) in ("keep", "offload")):
                available.add(root)
                continue
            todo.append(root)
    order = [t.name for t in block.tensors if t.name in available]
    entries = [needed.get(n) or _saved(block, n, ()) for n in order]
    offloaded = tuple(s for s in entries if _action(block, policy, s.tensor.name) == "offload")
    return SavedSplit(
        on_device=tuple(s for s in entries if s not in offloaded),
        offloaded=offloaded,
        recomputed=tuple(s for s in back.saved if s.tensor.name not in available),
        recompute_ops=tuple(op.path for op in block.ops if op.path in rerun),
    )
