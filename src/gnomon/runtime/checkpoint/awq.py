"""Scales of inputs under which rounding costs least where inputs are large, and where they are taken back.

`scales_of(…)` finds for the linears that read the same inputs one scale for each input: its root mean square to a
power, which is chosen so that the rounded products are nearest to the whole ones. Columns are multiplied by it before
they are rounded, and what makes the inputs (a norm, or the linear before) is divided by it, so that the function stays.
Leaves out the search for a smaller largest number of a group (AutoAWQ's clipping), and zeros. Pure: numpy.
Source: Lin et al. 2024, "AWQ: Activation-aware Weight Quantization", section 3.2 and AutoAWQ 0.2 (`quantizer.py`): 20
powers from 0 to 1, scales over the root of their largest and smallest; their mean size of inputs is a root mean square
here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import InputError
from gnomon.formats.huggingface.known import TYPES

POWERS = 20
IN_LAYER = re.compile(r"(.*\.layers\.\d+\.)self_attn\.q_proj\.weight$")
PLACES: Sequence[tuple[tuple[str, ...], str]] = (
    (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "input_layernorm"),
    (("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm"),
    (("self_attn.o_proj",), "self_attn.v_proj"),
    (("mlp.down_proj",), "mlp.up_proj"),
)
"""Linears of a layer that read the same inputs, and what makes these."""
Weight = Callable[[str], NDArray[np.float32]]
Rounded = Callable[[NDArray[np.float32]], NDArray[np.float32]]
Vector = NDArray[np.float32]


@dataclass(slots=True, kw_only=True)
class Scales:
    """The factors by which AWQ scales tensors of the folder before they are rounded, by name."""

    columns: dict[str, Vector] = field(default_factory=dict)
    """A linear's inputs are multiplied by these before they are rounded."""
    divided: dict[str, Vector] = field(default_factory=dict)
    """Rows of a linear, or the numbers of a norm or a bias, are divided by these."""

    def scaled(self, name: str, weight: NDArray[np.float32]) -> NDArray[np.float32]:
        """(outputs, inputs) as it is rounded."""
        return weight * self._by(name, weight)

    def taken_back(self, name: str, wide: NDArray[np.float32]) -> NDArray[np.float32]:
        """A rounded matrix (outputs, inputs) with the scaling of `scaled` taken back."""
        return wide / self._by(name, wide)

    def _by(self, name: str, weight: NDArray[np.float32]) -> NDArray[np.float32]:
        columns = self.columns.get(name, np.ones(weight.shape[1], np.float32))
        rows = self.divided.get(name, np.ones(weight.shape[0], np.float32))
        return columns[None, :] / rows[:, None]


def scales_of(
    names: Mapping[str, tuple[int, ...]],
    model_type: str,
    weight: Weight,
    squares: Mapping[str, NDArray[np.float64]],
    rounded: Rounded,
) -> Scales:
    """Searches AWQ's scales layer by layer. names: every tensor of the folder and its shape. squares: (inputs, inputs)
    of each linear, sums of all products of two inputs. rounded: what a matrix is once it is stored. InputError for a
    model whose layers are not known."""
    known = TYPES.get(model_type)
    if known is None or not known.llama_layers:
        able = ", ".join(name for name, one in TYPES.items() if one.llama_layers)
        raise InputError(
            f"awq takes scales back in the norm or the linear before each one, whose places are known of "
            f"{able}, and this is {model_type}; take gptq"
        )
    smoothing = Scales()
    for start in sorted({match[1] for name in names if (match := IN_LAYER.match(name))}):
        for linears, maker in PLACES:
            own = [f"{start}{linear}.weight" for linear in linears]
            before = f"{start}{maker}.weight"
            if names[before][0] != names[own[0]][1]:  # grouped heads: a value's row goes to several inputs
                continue
            scales = _best({name: weight(name) for name in own}, squares[own[0]], rounded)
            smoothing.columns |= dict.fromkeys(own, scales)
            smoothing.divided[before] = scales
            if (bias := f"{start}{maker}.bias") in names:
                smoothing.divided[bias] = scales
    return smoothing


def _best(linears: Mapping[str, NDArray[np.float32]], squares: NDArray[np.float64], rounded: Rounded) -> Vector:
    """(inputs,) of linears that read the same inputs."""
    size = np.sqrt(np.maximum(np.diag(squares), 0))
    # An input that was always 0 would have the scale 0, which is divided by.
    size = np.where(size > 0, size, size[size > 0].min() if (size > 0).any() else 1.0)
    best, least = np.ones(len(size), np.float32), np.inf
    for step in range(POWERS):
        scales = size ** (step / POWERS)
        scales = (scales / np.sqrt(scales.max() * scales.min())).astype(np.float32)
        error = 0.0
        for weight in linears.values():
            # (W' - W) X, by the products of inputs: its squared length is the trace of off · squares · offᵀ.
            off = (rounded(weight * scales) / scales - weight).astype(np.float64)
            error += float(np.einsum("ij,ij->", off @ squares, off))
        if error < least:
            best, least = scales, error
    return best
