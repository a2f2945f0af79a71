"""Seconds of the serving engine's own kernels on a machine that was measured: packed products, attention over pages.

`StoredPrices.of(device)` reads the tables that `gnomon calibrate` writes of them (`hardware.served`); None where there
are none. Products go with the elements of a matrix, attention with heads and their width, passes over activations with
the bytes that caches move. Between points as `prices.measured`. Leaves out what the host does between two iterations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gnomon.hardware import served
from gnomon.hardware.measured import Measured
from gnomon.hardware.types import Device
from gnomon.prices.curves import Array
from gnomon.prices.measured import table_seconds

CACHED_ELEMENTS = 1 << 18
"""Of the sum whose rate stands for passes over an iteration's activations: in the caches of a core."""
FORMS: Mapping[float, str] = {5.0: "int4-g64", 12.0: "int8", 16.0: "bf16", 32.0: "fp32"}
"""Most bits of a weight, scales included -> the form that is measured."""


@dataclass(frozen=True, slots=True)
class StoredPrices:
    """Prices of stored weights on one device."""

    measured: Measured
    """What was timed of its kernels."""

    @staticmethod
    def of(device: Device) -> StoredPrices | None:
        """None for a device of which these kernels were not measured."""
        if device.measured is None or all(table.what != "stored_linear" for table in device.measured.tables):
            return None
        return StoredPrices(device.measured)

    def linear_s(self, elements: float, bits: float, rows: Array) -> Array | None:
        """rows times a matrix; None for a form that was not measured."""
        # FORMS is in order of bits: the first that is wide enough.
        form = next((name for most, name in FORMS.items() if bits <= most), "")
        seconds = self._table("stored_linear", form, {"rows": rows})
        return None if seconds is None else seconds * (elements / served.SIDE**2)

    def decode_s(self, group: float, width: int, kv_heads: int) -> tuple[float, float]:
        """(seconds of a sequence's query in one layer, more for each key)."""
        keys = np.array([float(served.KEYS[0]), float(served.KEYS[-1])])
        both = self._table("paged_decode", "bf16", {"keys": keys, "group": np.array([group, group])})
        assert both is not None, "measured with the products"
        least, most = (float(x) / (served.SEQUENCES * served.KV_HEADS) for x in both)
        # A line through the shortest and the longest cache that were measured.
        each = (most - least) / (served.KEYS[-1] - served.KEYS[0])
        # Measured with heads of HEAD; time goes with heads and their width.
        scale = kv_heads * width / served.HEAD
        return max(0.0, least - each * served.KEYS[0]) * scale, each * scale

    def prompt_s(self, new: int, before: int, heads: int, width: int) -> float:
        """Attention of a piece of a prompt in one layer."""
        sizes = {"new": np.array([float(new)]), "before": np.array([float(max(1, before))])}
        seconds = self._table("paged_prompt", "bf16", sizes)
        assert seconds is not None, "measured with the products"
        return float(seconds[0]) * heads / served.PROMPT_HEADS * width / served.HEAD

    def pass_s(self, nbytes: Array) -> Array:
        """Passes over activations that lie in caches."""
        one = self._table("add", "fp32", {"elements": np.array([float(CACHED_ELEMENTS)])}, "forward")
        assert one is not None, "of every calibration"
        # A sum in fp32 reads two elements and writes one, of 4 bytes each.
        return nbytes * (float(one[0]) / (3 * 4 * CACHED_ELEMENTS))

    def _table(self, what: str, dtype: str, sizes: Mapping[str, Array], direction: str = "") -> Array | None:
        if all(table.key != (what, dtype, direction) for table in self.measured.tables):
            return None
        return np.asarray(table_seconds(self.measured, what, dtype, direction, **sizes))
