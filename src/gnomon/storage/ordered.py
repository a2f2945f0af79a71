"""Integers whose groups are not of columns side by side: each column says whose scale and zero it has.

A number is (code - zero) * scale of its column's group, in float32. GPTQ rounds columns in the order of their
activations and makes groups of that order (`desc_act`, and `actorder: group` of compressed-tensors), which its files
undo for codes and keep for groups. Rows have groups alike.
Source: AutoGPTQ 0.7 and GPTQModel (`g_idx`), compressed-tensors 0.10 (`weight_g_idx`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.storage.form import Array, Arrays, Shape, Storage
from gnomon.storage.integers import Integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered(Storage):
    bits: int
    """Of a code: 2, 3, 4 or 8."""
    group: int
    """Columns that share a scale, wherever they are."""
    scale: str = "float16"
    """Dtype of scales."""

    @property
    def name(self) -> str:
        return f"int{self.bits}-g{self.group}-ordered"

    @property
    def _plain(self) -> Integers:
        """The same with groups side by side."""
        return Integers(bits=self.bits, group=self.group, zeros=True, scale=self.scale)

    def arrays(self, shape: Shape) -> dict[str, Array]:
        return {**self._plain.arrays(shape), "order": Array(dtype="int32", shape=(shape[1],))}

    def unfit(self, shape: Shape) -> str:
        return self._plain.unfit(shape)

    def narrow(self, weight: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        """Groups are of columns by their size, the largest first, as without activations."""
        by_size = np.argsort(-np.abs(np.asarray(weight, np.float32)).sum(0), kind="stable")
        order = np.empty(weight.shape[1], np.int32)
        order[by_size] = np.arange(weight.shape[1]) // self.group
        side_by_side = self._plain.narrow(weight[:, by_size])
        codes = np.empty(weight.shape, np.uint8)
        codes[:, by_size] = self._plain.codes_of(side_by_side, (weight.shape[0], weight.shape[1]))
        return self.of_codes(codes, side_by_side["scales"], side_by_side["zeros"], order)

    def of_codes(
        self, codes: NDArray[np.uint8], scales: NDArray[Any], zeros: NDArray[np.uint8], order: NDArray[Any]
    ) -> dict[str, NDArray[Any]]:
        """codes (rows, columns), a byte each; scales and zeros (rows, groups); order (columns,): each one's group."""
        return {**self._plain.of_codes(codes, scales, zeros), "order": order.astype(np.int32)}

    def widen(self, arrays: Arrays, shape: Shape) -> NDArray[np.float32]:
        codes, order = self._plain.codes_of(arrays, shape).astype(np.float32), arrays["order"]
        return (codes - arrays["zeros"].astype(np.float32)[:, order]) * arrays["scales"].astype(np.float32)[:, order]
