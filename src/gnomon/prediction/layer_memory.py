"""What one layer on one rank keeps in memory: each tensor for its backward, and gradients while that runs.

`LayerMemory` counts the bytes of a block that `layer` prices. Leaves out parameters, which `memory` counts by stage,
and which of the tensors are kept (`graph.saved`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

from gnomon.graph import DTYPE_BITS, BackwardBlock, Dtypes, Op, SavedTensor, Tensor, nbytes, storages
from gnomon.plans.vocabulary import has_vocab
from gnomon.prediction.layer_moments import Moments
from gnomon.prediction.layer_types import LocalContext, SavedBytes
from gnomon.prediction.numbers import as_int, larger, smaller
from gnomon.prices.kernels import Low
from gnomon.sharding import ShardedBlock
from gnomon.sharding.homes import routed_tensors

_NARROW_BITS: Mapping[str, float] = {"fp8": 8 + 8 / 32, "rowwise": 8 + 8 / 32, "mxfp8": 8 + 8 / 32, "fp4": 4 + 8 / 16}
"""Bits of a kept element: the value, and a byte of scale for 32 or 16 of them (Open Compute Project, MX v1.0)."""


class LayerMemory:
    """Bytes of one layer's tensors on one rank; arrays where sizes are arrays (`layer.price_layer`).

    low: path of an op -> the eight or four bits it reads in.
    """

    def __init__(
        self,
        context: LocalContext,
        sharded: ShardedBlock,
        back: BackwardBlock,
        dtypes: Dtypes,
        low: Callable[[str], Low],
    ) -> None:
        self.context, self.sharded, self.back, self.dtypes, self.low = context, sharded, back, dtypes, low
        self.block = back.forward
        self.routed = routed_tensors(self.block) if context.load != 1 else frozenset()
        # gradients written over a tensor that is kept anyway take no memory of their own
        in_place = [op for op in self.block.ops if op.attr("in_place", False)]
        self.no_bytes = frozenset(name for op in in_place for name in (op.inputs[0], op.outputs[0]))
        self._sizes: dict[str, int] = {}

    def bytes_of(self, tensor: Tensor) -> int:
        """Bytes of a tensor while it is kept; of logits where the loss goes part by part, of one part."""
        if tensor.name not in self._sizes:
            whole = as_int(self.sharded.kept_bytes_of(tensor) * self._skew(tensor))
            self._sizes[tensor.name] = smaller(whole, self._part) if self._in_parts(tensor) else whole
        return self._sizes[tensor.name]

    def _in_parts(self, tensor: Tensor) -> bool:
        """Logits, and what is computed of them, where the loss never has them whole."""
        return self.context.facts.chunked_loss and tensor.kind != "parameter" and has_vocab(tensor)

    @cached_property
    def _part(self) -> int:
        """Bytes of logits that a loss has at once which runs part by part: as many as the head reads.

        Source: linkedin/Liger-Kernel src/liger_kernel/ops/fused_linear_cross_entropy.py: rows in as many parts as the
        vocabulary is wider than the hidden state, so that a part is as large as the hidden states.
        """
        total: int = sum(
            as_int(self.sharded.kept_bytes_of(self.block.tensor(name)))
            for name in self.block.inputs
            if name not in self.context.no_grad
        )
        return total

    def _skew(self, tensor: Tensor) -> float:
        """Rows of a tensor on the busiest rank over those of balanced routing: 1 but for the rows of experts."""
        return self.context.load if tensor.name in self.routed and tensor.kind != "parameter" else 1

    def saved_bytes(self, entries: Sequence[SavedTensor]) -> tuple[SavedBytes, ...]:
        """What is kept of these for the backward, but for parameters."""
        roots, part_of = storages(self.block, self.dtypes), self.context.block.part_of
        inputs = {roots[name] for name in self.block.inputs}
        # what one part of a layer hands another is kept as within the layer
        outer = inputs if part_of is None else {roots[n] for n in self.block.inputs if n in part_of.inputs}
        return tuple(
            SavedBytes(
                tensor=entry.tensor.name,
                is_input=roots[entry.tensor.name] in inputs,
                is_logits=has_vocab(entry.tensor),
                bytes=self._kept_bytes(entry, roots[entry.tensor.name] in outer),
            )
            for entry in entries
            if entry.tensor.kind != "parameter"
        )

    def _kept_bytes(self, entry: SavedTensor, is_input: bool) -> int:
        """Bytes of a kept tensor; what only narrow matmuls read again is kept as they read it, with its scales."""
        whole = self.bytes_of(entry.tensor)
        narrow = {self.low(path) for path in entry.needed_by} or {""}
        if is_input or len(narrow) > 1 or not (low := narrow.pop()):
            return whole
        size = DTYPE_BITS[self.dtypes.resolve(entry.tensor.dtype)]
        # Bits with their scale are whole 32nds, so times 32 the quotient is of integers.
        rounded: int = as_int(whole * int(32 * _NARROW_BITS[low]) // (32 * size))
        return rounded

    def deferred(self) -> int:
        """Bytes that weight gradients wait for: inputs of products as they are kept, and gradients of their outputs as
        the matmuls read them (gathered)."""
        steps = [grad for grad in self.back.ops if grad.phase == "weight_grad"]
        roots = storages(self.block, self.dtypes)
        reads = {roots[name] for grad in steps for name in grad.reads}
        total = sum(self.bytes_of(self.block.tensor(name)) for name in sorted(reads))
        for name, path in {name: grad.path for grad in steps for name in grad.grads_in}.items():
            tensor = self.block.tensor(name)
            total += as_int(nbytes(tensor, self.sharded.sizes(path), self.dtypes) * self._skew(tensor))
        return total

    @cached_property
    def _moments(self) -> Moments | None:
        """Follows the moments of a layer with captured ops."""
        if not any(op.captured is not None for op in self.block.ops):
            return None
        return Moments(self.back, storages(self.block, self.dtypes), self._bytes_inside)

    @cached_property
    def _followed(self) -> tuple[int, int]:
        assert self._moments is not None, "asked of layers with captured ops"
        return self._moments.backward()

    def _bytes_inside(self, tensor: Tensor, op: Op) -> int:
        """Gives the bytes of a tensor of the block, or of one inside a captured op."""
        if tensor.name in self._named:
            return self.bytes_of(tensor)
        size: int = as_int(nbytes(tensor, self.sharded.sizes(op.path), self.dtypes))
        return size

    @cached_property
    def _named(self) -> frozenset[str]:
        return frozenset(tensor.name for tensor in self.block.tensors)

    def forward(self, entries: Sequence[SavedTensor]) -> int:
        """Most bytes at once during the forward of a captured layer, its inputs and what it keeps (entries) with them,
        but inputs of the model that it does not keep; 0 for other layers."""
        if self._moments is None:
            return 0
        names = {entry.tensor.name for entry in entries}
        apart = (self.block.tensor(name) for name in self.context.no_grad if name not in names)
        most: int = self._moments.forward(names) - sum(self.bytes_of(tensor) for tensor in apart)
        return most

    def transient(self) -> int:
        """Most bytes of gradients of activations alive at once; of a captured layer less what its backward has let go
        of what it keeps."""
        if self._moments is not None:
            transient_bytes: int = larger(*self._followed)
            return transient_bytes
        most = 0
        for alive in self._alive():
            most = larger(most, alive)
        return most

    def around_gradients(self) -> tuple[int, int]:
        """(that until the first gradient of a parameter is computed, that from then on less the kept tensors that the
        backward has read for the last time by then). A layer's input goes with the layer that made it."""
        if self._moments is not None:
            return self._followed
        back, roots = self.back, storages(self.block, self.dtypes)
        begins = next((i for i, grad in enumerate(back.ops) if self._of_parameter(grad.grads_out)), len(back.ops))
        inputs = {roots[name] for name in self.block.inputs}
        last = {roots[name]: i for i, grad in enumerate(back.ops) for name in grad.reads if grad.phase != "accumulate"}
        saved_tensors = {entry.tensor.name: entry.tensor for entry in back.saved if entry.tensor.name not in inputs}
        early, late, freed = 0, None, 0
        for i, alive in enumerate(self._alive()):
            if i < begins:
                early = larger(early, alive)
            else:
                late = alive - freed if late is None else larger(late, alive - freed)
            # What a step reads for the last time is still there during it.
            freed += sum(self.bytes_of(tensor) for name, tensor in saved_tensors.items() if last.get(name) == i)
        return early, 0 if late is None else late

    def _of_parameter(self, names: Sequence[str]) -> bool:
        return any(self.block.tensor(name).kind == "parameter" for name in names)

    def _alive(self) -> Iterator[int]:
        """Bytes of gradients of activations during each step of the backward: each from the step that makes it to the
        last that reads it."""
        last = {name: i for i, grad in enumerate(self.back.ops) for name in grad.grads_in}
        alive = {name: self._grad_bytes(name) for name in self.block.outputs if name in last}
        for i, grad in enumerate(self.back.ops):
            for name in grad.grads_out:
                alive.setdefault(name, self._grad_bytes(name))
            yield sum(alive.values())
            for name in grad.grads_in:
                if last[name] == i:
                    alive.pop(name, None)

    def _grad_bytes(self, name: str) -> int:
        tensor = self.block.tensor(name)
        if tensor.kind == "parameter" or name in self.no_bytes:
            return 0
        size: int = as_int(self.sharded.bytes_of(tensor) * self._skew(tensor))
        return smaller(size, self._part) if self._in_parts(tensor) else size
