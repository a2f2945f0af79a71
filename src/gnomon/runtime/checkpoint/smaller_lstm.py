"""A folder of weights without the hidden units that ISS removed, and a module of their sizes: dense LSTMs, smaller.

`shrink(whole, target, lstms)` writes the tensors of a module without the rows and columns of units whose components are
0, and `iss.json` with what is left of each layer. `smaller(module, folder)` makes the user's module of these sizes and
gives it the weights: each `nn.LSTM` becomes an `LstmLayers`, a linear that reads one has fewer inputs. It computes what
the whole one did. Leaves out training (`optim.iss`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from gnomon.errors import InputError
from gnomon.methods.learnt.iss import GATES, Lstm, LstmLayer
from gnomon.runtime.checkpoint.rewrite import exchanged, indexed
from gnomon.runtime.parameters.packed import raw
from gnomon.runtime.parameters.weights import Folder

SIZES = "iss.json"
SCHEMA = "gnomon.iss/1"


def shrink(whole: Path, target: Path, lstms: Sequence[Lstm]) -> dict[str, tuple[int, ...]]:
    """Writes the folder `target`; returns by LSTM the units that each of its layers has left."""
    folder = Folder.of(whole)
    stored = {name: raw(folder, name) for name in _touched(lstms)}
    new = dict(stored)
    sizes_left: dict[str, tuple[int, ...]] = {}
    for lstm in lstms:
        sizes = []
        for layer in lstm.layers:
            stay = _stay(stored, layer)
            sizes.append(int(stay.sum()))
            # Matrices of an LSTM have the rows of one gate after those of another.
            rows = np.tile(stay, GATES)
            for name in (layer.input_weights, layer.recurrent, *layer.biases):
                new[name] = new[name][rows]
            for name in (layer.recurrent, *layer.readers):
                new[name] = new[name][:, stay]
        sizes_left[lstm.path] = tuple(sizes)
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted({file for file, _ in folder.entries.values()}):
        own = {name: entry for name, (of, entry) in folder.entries.items() if of == file}
        shrunk = {name: (own[name].dtype, new[name]) for name in own if name in new}
        exchanged(folder, file, target, shrunk, frozenset(shrunk))
    indexed(folder, target)
    for path in whole.iterdir():
        if path.suffix == ".json" and not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)
    record = {"schema": SCHEMA, "lstms": {path: list(sizes) for path, sizes in sizes_left.items()}}
    (target / SIZES).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return sizes_left


def _touched(lstms: Sequence[Lstm]) -> list[str]:
    layers = [layer for lstm in lstms for layer in lstm.layers]
    names = [name for one in layers for name in (one.input_weights, one.recurrent, *one.biases, *one.readers)]
    return list(dict.fromkeys(names))


def _stay(stored: Mapping[str, NDArray[Any]], layer: LstmLayer) -> NDArray[np.bool_]:
    """(hidden,) whether a unit has any number, as nothing that reads it has one for a removed unit. bfloat16 is its
    bits, of which minus 0 has one."""
    nonzero = {name: _nonzero(stored[name]) for name in (layer.input_weights, layer.recurrent, *layer.readers)}
    gates = (nonzero[name].reshape(GATES, layer.hidden, -1) for name in (layer.input_weights, layer.recurrent))
    stay = np.logical_or.reduce([gate.any((0, 2)) for gate in gates])
    for name in (layer.recurrent, *layer.readers):
        stay |= nonzero[name].any(0)
    # As in training a layer keeps one unit at least.
    if not stay.any():
        stay[0] = True
    return np.asarray(stay)


def _nonzero(x: NDArray[Any]) -> NDArray[np.bool_]:
    return np.asarray((x & 0x7FFF) != 0 if x.dtype == np.uint16 else x != 0)


class LstmLayers(nn.Module):
    """An `nn.LSTM` whose layers have sizes of their own, one way, from zeros."""

    def __init__(self, like: nn.LSTM, sizes: Sequence[int]) -> None:
        super().__init__()
        inputs = (like.input_size, *sizes)
        self.layers = nn.ModuleList(
            nn.LSTM(inputs[n], size, 1, bias=like.bias, batch_first=like.batch_first) for n, size in enumerate(sizes)
        )
        self.dropout = like.dropout

    def forward(self, x: Tensor, hx: None = None) -> tuple[Tensor, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
        """(outputs of the last layer, (last h of each layer, last c of each)), which are of several sizes."""
        if hx is not None:
            raise InputError("an LSTM that lost hidden units begins at zeros: its layers have sizes of their own")
        hs, cs = [], []
        for n, layer in enumerate(self.layers):
            if n and self.dropout and self.training:
                x = nn.functional.dropout(x, self.dropout)
            x, (h, c) = layer(x)
            hs.append(h)
            cs.append(c)
        return x, (tuple(hs), tuple(cs))


def smaller(module: nn.Module, folder: str | Path) -> nn.Module:
    """The module, changed in place and returned, with the sizes and weights of a folder that `gnomon run` with `iss`
    exported. InputError for a folder of another module."""
    path = Path(folder).expanduser()
    if not (path / SIZES).is_file():
        raise InputError(f"{path} has no {SIZES}; give a folder that gnomon run --export wrote for a plan with iss")
    record = json.loads((path / SIZES).read_text(encoding="utf-8"))
    files = Folder.of(path)
    values = {name: files.read(name).clone() for name in files.entries}
    for name, sizes in record["lstms"].items():
        found = dict(module.named_modules()).get(name)
        if not isinstance(found, nn.LSTM) or found.num_layers != len(sizes):
            raise InputError(f"{path} is of a module with an LSTM {name!r} of {len(sizes)} layers, and this has none")
        small = LstmLayers(found, (*sizes,))
        if (first := values.get(f"{name}.weight_ih_l0")) is not None:  # which may read another LSTM
            small.layers[0] = _like(found, first.shape[1], sizes[0])
        for n in range(len(sizes)):
            for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                if (value := values.pop(f"{name}.{part}_l{n}", None)) is not None:
                    values[f"{name}.layers.{n}.{part}_l0"] = value
        _put(module, name, small)
    for name, part in list(module.named_modules()):
        weight = values.get(f"{name}.weight")
        if isinstance(part, nn.Linear) and weight is not None and weight.shape != part.weight.shape:
            _put(module, name, nn.Linear(weight.shape[1], weight.shape[0], bias=part.bias is not None))
    try:
        module.load_state_dict(values, strict=False)
    except RuntimeError as error:
        raise InputError(
            f"the weights in {path} are not this module's: {str(error).splitlines()[-1].strip()}"
        ) from None
    if missing := [name for name, _ in module.named_parameters() if name not in values]:
        raise InputError(f"{path} has no {missing[0]}; give the module that was trained")
    return module


def _like(lstm: nn.LSTM, inputs: int, size: int) -> nn.LSTM:
    return nn.LSTM(inputs, size, 1, bias=lstm.bias, batch_first=lstm.batch_first)


def _put(module: nn.Module, name: str, part: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    part.to(next(module.parameters()).dtype)
    setattr(module.get_submodule(parent) if parent else module, own, part)
