"""What one pipeline rank does for an embedding and a head that are divided by vocabulary over the pipeline
(`Schedule.vocabulary`): what each action computes, what the ranks exchange, and what it holds.

`VocabularyShare` is a rank's part; its layers are priced like tensor-parallel ones over the ranks of the pipeline,
without the collectives, which are rows of their own. Where a stack does not say otherwise (`hidden_dtype`), widths and
collectives are those of sail-sg/VocabularyParallelism 6191c3b megatron/core/pipeline_parallel/
vocab_parallel_schedule.py: hidden states go out in fp32 with a number a token for the loss before; three numbers a
token of the softmax are added up; gradients travel in the compute dtype. Leaves out the order
(`orders.patterns.vocabulary`) and the final norm's place: it is priced on every rank, where that program has it on the
last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from gnomon.graph import Layer, Op, Tensor
from gnomon.hardware import Device
from gnomon.orders.patterns.vocabulary import PARTS, SHARED
from gnomon.plans import Vocabulary
from gnomon.prediction.layer_types import LayerPrice, Phase
from gnomon.prices.curves import curves_for
from gnomon.prices.kernels import FREE, OpPrice
from gnomon.prices.links import AxisLink
from gnomon.prices.stream import stream_seconds

KINDS = frozenset((*PARTS, *SHARED))
"""Actions of the divided embedding and head."""

_HEAD: Mapping[Vocabulary, Mapping[str, tuple[str, ...]]] = {
    "ends": {},
    "vocab_1": {"S": ("forward",), "T": ("input_grad", "weight_grad")},
    "vocab_2": {"S": ("forward", "input_grad"), "T": ("weight_grad",)},
    "interlaced": {"S": ("forward", "input_grad", "weight_grad")},
}
_EMBEDDING = {"EMBED": ("forward",), "EGRAD": ("input_grad", "weight_grad")}

_STATISTICS = 3
"""fp32 numbers a token that ranks add up: the largest logit, the label's logit, the sum of exponentials."""


@dataclass(frozen=True, kw_only=True)
class VocabularyShare:
    """One pipeline rank's part of the embedding and the head."""

    how: Vocabulary
    """How embedding and head are divided over the pipeline."""
    head: LayerPrice
    """Its part of the head."""
    embedding: LayerPrice | None
    """None for a graph without one."""
    layers: tuple[tuple[LayerPrice, Layer], ...]
    """The same, with the layers that they are."""
    whole: frozenset[str]
    """Labels of those whose other parameters (positions, norms) this rank holds."""
    link: AxisLink
    """Between the ranks of the pipeline."""
    narrow: bool = False
    """Hidden states go out in the compute dtype, alone."""

    def holds(self, layer: Layer, tensor: Tensor) -> bool:
        """Whether a parameter, or a part of it, is on this rank."""
        return layer.label in self.whole or any(dim.name.split(".")[-1] == "vocab" for dim in tensor.atoms)

    def layer(self, kind: str) -> LayerPrice | None:
        """Says of which of the two layers an action is part."""
        return self.embedding if kind in ("EMBED", "EGRAD", "SUM_E", "CAST_E") else self.head

    def phases(self, kind: str) -> list[Phase]:
        """What an action computes, without collectives."""
        layer = self.layer(kind)
        names = _EMBEDDING.get(kind) or _HEAD[self.how].get(kind, ())
        return [replace(getattr(layer, name), comm_s={}, collectives={}) for name in names] if layer else []

    def gathers_weights(self, kind: str) -> bool:
        """Whether an action ends with a weight gradient."""
        return kind in ("T", "EGRAD") or (kind == "S" and self.how == "interlaced")

    @cached_property
    def _loss(self) -> Op:
        return next(op for op in self.head.sharded.block.ops if op.does == "compares labels")

    def _elements(self, tensor: str) -> int:
        return int(self.head.sharded.local_elements[tensor])

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on one rank."""
        return self._elements(self._loss.inputs[1])

    @property
    def hidden_bytes_sent(self) -> int:
        """Bytes that the broadcast of hidden states sends."""
        if self.narrow or self.how == "interlaced":
            return self.head.input_bytes // max(self._hidden, 1) * self._hidden
        return 4 * self._hidden + 4 * self.tokens

    @property
    def _hidden(self) -> int:
        return self._elements(self.head.sharded.block.inputs[0])

    def exchanged(self, kind: str) -> list[tuple[str, int]]:
        """(collective, bytes) of an action, in order."""
        hidden, embedded = self.head.input_bytes, self.embedding.output_bytes if self.embedding else 0
        sums = [("all_reduce", 4 * self.tokens)] * _STATISTICS
        together = self.how == "interlaced"
        back = [("all_reduce", hidden)]
        exchanges: Mapping[str, list[tuple[str, int]]] = {
            "CAST_H": [("broadcast", self.hidden_bytes_sent)],
            "SUM_V": sums + (back if self.how == "vocab_2" else []),
            "SUM_H": back,
            "SUM_E": [("all_reduce", embedded)],
            "CAST_E": [("broadcast", embedded)],
            "S": [("broadcast", self.hidden_bytes_sent), *sums, *back] if together else [],
            "EMBED": [("all_reduce", embedded)] if together else [],
            "EGRAD": [("broadcast", embedded)] if together else [],
        }
        return [exchange for exchange in exchanges.get(kind, []) if exchange[1]]

    def passes(self, kind: str, device: Device) -> OpPrice:
        """Kernels that the parts of a divided softmax take beyond those of a whole one: hidden states that came in fp32
        are narrowed; the softmax of a part is scaled once its sum over all parts is known."""
        curves, total = curves_for(device), FREE
        if self.how == "interlaced" or kind not in ("S", "T") or (self.narrow and kind == "S"):
            return total
        if kind == "S":
            moved, kernels = (4 * self._hidden, self.head.input_bytes), 2
        else:
            scaled = 4 * self._elements(self._loss.inputs[0])
            moved, kernels = (scaled, scaled), 1
        return OpPrice(device_s=stream_seconds(*moved, device, curves, kernels=kernels), kernels=kernels)

    def buffer_bytes(self) -> dict[str, int]:
        """Bytes of a microbatch in the buffers of `orders.patterns.vocabulary`."""
        hidden, embedded = self.head.input_bytes, self.embedding.output_bytes if self.embedding else 0
        logits = sum(tensor.bytes for tensor in self.head.saved if tensor.is_logits)
        early = 2 * hidden if self.how == "vocab_2" else 0
        numbers = 4 * _STATISTICS * self.tokens + early
        return {"HX": hidden, "VS": logits, "VL": numbers, "HG": hidden, "EX": embedded, "EG": embedded}

    def inside(self, kind: str) -> int:
        """Bytes alive only inside an action: gradients, logits before they are fp32, and, in the one that is the whole
        head, the softmax."""
        layer = self.layer(kind)
        if layer is None or kind not in PARTS:
            return 0
        if kind in ("EMBED", "EGRAD"):
            return layer.output_bytes
        logits = sum(tensor.bytes for tensor in layer.saved if tensor.is_logits)
        return layer.transient_bytes + (logits + layer.input_bytes if self.how == "interlaced" else 0)
