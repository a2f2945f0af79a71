"""A folder of weights, made smaller: linears of layers rounded to groups of integers, or with most numbers put to zero.

`compress(source, target, storage, method, text)` writes a new folder, whole or not at all, and returns a
`CompressionReport`: errors by tensor, sizes, and the loss before and after on text that no method has seen. Integers
and eight-bit floats are written as compressed-tensors has them, sparse weights with their zeros in place. Embeddings,
the head, norms, biases and routers stay as they are, but for norms and biases that take back the scales of `awq`. The
loss after is that of the folder as it was written and read back. Source: GPTQ (Frantar et al. 2023), Algorithm 1, with
the columns in their order and no reordering; Wanda (Sun et al. 2024), section 3; `admm` has its own. All see the inputs
of the model as it was, in one pass, where the papers compress a layer before they look at the next one's inputs. Leaves
out which words ask for what (`cli.compress`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import gcd, isfinite, prod
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gnomon.compiler.kernels.stored import BITS
from gnomon.compiler.kernels.stored_choice import storage_s
from gnomon.compiler.machine import this_machine
from gnomon.compiler.tiles.tile_cost import Rates, rates
from gnomon.errors import InputError, RunError
from gnomon.formats.huggingface.known import layout
from gnomon.formats.huggingface.quantised import eight_config, packed, packed_config
from gnomon.formats.huggingface.weights import Layout, parameters_of
from gnomon.graph import Graph, Layer
from gnomon.graph.low_bits import bits_needed
from gnomon.graph.zeros import columns_read
from gnomon.methods.learnt.trained_weights import KEPT_WHOLE
from gnomon.runtime.checkpoint.admm import admm
from gnomon.runtime.checkpoint.awq import Scales, scales_of
from gnomon.runtime.checkpoint.pretrained import CONFIG, companion_files, load, model_of, refuse_gguf
from gnomon.runtime.checkpoint.rewrite import Tensors, exchanged, indexed
from gnomon.runtime.data.documents import documents, find
from gnomon.runtime.data.encode import Encoder
from gnomon.runtime.module.one_process import OneProcess
from gnomon.runtime.parameters.packed import raw
from gnomon.runtime.parameters.weights import DTYPES, Folder, settled
from gnomon.storage.dense import Dense, bfloat16_of, wide_bfloat16
from gnomon.storage.float8 import Float8
from gnomon.storage.form import Storage, in_groups
from gnomon.storage.integers import LEAST_GROUP, Integers
from gnomon.storage.n_of_m import NM
from gnomon.storage.sparse import Sparse
from gnomon.storage.unstructured import Bitmap

Stored: TypeAlias = Integers | Sparse | Float8
How = Literal["rtn", "gptq", "awq", "magnitude", "wanda", "admm", "as trained"]
"""`as trained`: numbers that can be stored so as they are, which a run's method left."""
SEES_INPUTS: tuple[How, ...] = ("gptq", "awq", "wanda", "admm")
"""Methods that want text."""
SEES_PAIRS: tuple[How, ...] = ("gptq", "awq", "admm")
"""Of these, those that want the products of every two inputs."""
PLAIN: Mapping[How, How] = {"gptq": "rtn", "awq": "rtn", "wanda": "magnitude", "admm": "magnitude"}
"""Methods that do the same without."""
LONGEST, SEEN, HELD_OUT = 512, 128, 32
"""Tokens of a row; rows that a method sees, and rows that the loss is measured on, at most."""
DAMPING = 0.01
"""Of the mean of the diagonal, added to it, as GPTQ does."""
IN_A_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """What storing one tensor in few bits loses."""

    tensor: str
    """Name of the weight."""
    shape: tuple[int, int]
    """Its (rows, columns)."""
    relative: float
    """Root of the summed squares of the differences, over that of the weights; 0 for a matrix of zeros."""
    size: float
    """That of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerError:
    """One layer, in order."""

    layer: int
    """Number of the layer, from 0."""
    weights: float
    """As `Error.relative`, of all its linears together."""
    outputs: float | None
    """The same of what the layer makes of a held-out row, after all layers before it; None without text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutLoss:
    """Cross-entropy on held-out text before and after, in nats per token."""

    before: float
    """With the weights as they were."""
    after: float
    """With those that were written."""
    tokens: int
    """That were predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionReport:
    """What was written, with the errors of each matrix."""

    errors: tuple[Error, ...]
    """Of each weight that was stored in fewer bits."""
    layers: tuple[LayerError, ...]
    """Of each layer."""
    bytes_before: int
    """Of all files with weights."""
    bytes_after: int
    """Of all files with weights that were written."""
    loss: HeldOutLoss | None
    """None without text."""
    tokens_per_s: tuple[float, float] | None
    """Before and after, predicted of this machine: one sequence, one thread, the products alone, in bfloat16 where
    nothing is rounded. None of experts, of which a token meets a part."""
    notes: tuple[str, ...]
    """What the tokenizer has to say, a sentence each; empty without text."""
    idle: int = 0
    """Weights that the pattern keeps and that change no result, behind or before what it made zero: zero too."""
    few_bits: Mapping[str, int] = field(default_factory=dict)
    """Activations (`layer.tensor`) that only products in eight bits read, and their bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutText:
    """Held-out rows of tokens: (rows, tokens + 1) each, the last one to be predicted."""

    tokens: Tensor
    """What scales and orders are chosen on."""
    held_out: Tensor
    """What losses are measured on, and nothing is chosen by."""
    notes: tuple[str, ...] = ()
    """What the tokenizer has to say, a sentence each."""


def read_text(data: Path, folder: Path, tokenizer: Path | None) -> HeldOutText:
    """The beginning of a corpus in rows: the first quarter, at most HELD_OUT rows, is held out, what follows may be
    seen. Prompts count as the rest of a text does. InputError for too little, or tokens that the model does not have.
    tokenizer: None for the folder's own, or bytes."""
    own = folder / "tokenizer.json"
    encoder = Encoder.open(tokenizer or (own if own.is_file() else None))
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    longest = min(LONGEST, int(config.get("max_position_embeddings") or LONGEST))
    ids: list[int] = []
    for encoded in encoder.encode(documents(find(data))):
        ids += encoded.ids.tolist()
        if len(ids) > (SEEN + HELD_OUT) * longest:
            break
    length = min(longest, (len(ids) - 1) // 4)
    if length < 2:
        raise InputError(f"{data} has {len(ids)} tokens, and a loss wants at least 9; give more text")
    size = config.get("vocab_size")
    if isinstance(size, int) and max(ids) >= size:
        raise InputError(
            f"{data} has token {max(ids)} as {encoder.name} writes it, and the model has {size} of them; give its own "
            f"tokenizer.json (--tokenizer)"
        )
    # Rows overlap by one token: the last of a row, which is only predicted, is the first of the next.
    rows = torch.tensor(ids).unfold(0, length + 1, length)[: SEEN + HELD_OUT]
    num_held_out = max(1, min(HELD_OUT, len(rows) // 4))
    return HeldOutText(tokens=rows[num_held_out:], held_out=rows[:num_held_out], notes=encoder.notes)


Note: TypeAlias = Callable[[int, int], None]
"""Is told how many linears are done, of how many."""


def _nothing(done: int, of: int) -> None:
    """Nobody asks how far it is."""


def compress(
    source: Path, target: Path, storage: Stored, method: How, text: HeldOutText | None = None, note: Note = _nothing
) -> CompressionReport:
    """Writes `target`, which must not exist. InputError for weights that cannot be stored so, a loss or weights that
    are not finite, and a method that wants text without one; nothing is left behind then."""
    if method in SEES_INPUTS and text is None:
        raise InputError(f"{method} looks at the inputs of each linear; give it text (--data)")
    check_places(source, target)
    model, folder = model_of(source), Folder.of(source)
    config = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    if "quantization_config" in config:
        raise InputError(f"{source} is quantised already (quantization_config); give the folder that it was made from")
    where = settled(folder, layout(model.graph, model.model_type))
    chosen = _chosen(model.graph, where, storage, source)
    before, seen, made_before, off = 0.0, Inputs({}, squares=method in SEES_PAIRS), list[Tensor](), list[float]()
    if text is not None:
        _check_decoder(model.graph)
        whole = load(source)
        before = _loss(whole, text.held_out)
        if not isfinite(before):
            raise InputError(f"the loss of {source} is {before} as it is; nothing was written")
        made_before = layer_outputs(whole, text.held_out[0])
        if method in SEES_INPUTS:
            seen = inputs_of_linears(whole, where, text.tokens, squares=method in SEES_PAIRS)
        del whole
    scales = _scales(folder, model.model_type, storage, seen) if method == "awq" else Scales()
    # Beside the target, so that the last step is a rename within one file system: the folder is there whole or not at
    # all.
    temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    files = sorted({file for file, _ in folder.entries.values()})
    errors: list[Error] = []
    done = count()

    def one(name: str, x: tuple[str, NDArray[Any]]) -> tuple[Tensors, NDArray[np.float32], NDArray[np.float32]]:
        note(next(done), len(chosen))
        return _stored(name, x, storage, method, seen, scales)

    try:
        for file in files:
            errors += _write(folder, file, temporary, chosen, one, scales)
        unstored = {name.removesuffix(".weight") for name in _linears(model.graph, where) if name not in chosen}
        _write_rest(folder, temporary, config, storage, sorted({*unstored, "lm_head"}))
        any_mask = isinstance(storage, Sparse) and not isinstance(storage, NM)  # n of m keeps n wherever they count
        idle = _without_idle(temporary, model.graph, where, chosen) if any_mask else 0
        loss = None
        if text is not None:
            tokens = text.held_out[:, 1:].numel()
            small = load(temporary)
            loss = HeldOutLoss(before=before, after=_loss(small, text.held_out), tokens=tokens)
            off = [_off(x, y) for x, y in zip(made_before, layer_outputs(small, text.held_out[0]), strict=True)]
            if not isfinite(loss.after):
                raise InputError(
                    f"the loss would be {loss.after} (it was {before:.4f}); nothing was written: take more bits, or "
                    f"keep more of the weights"
                )
        after = sum(file.stat().st_size for file in temporary.glob("*.safetensors"))
        temporary.chmod(0o777 & ~_umask())
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return CompressionReport(
        errors=tuple(errors),
        layers=_by_layer(errors, off),
        bytes_before=sum((folder.path / file).stat().st_size for file in files),
        bytes_after=after,
        loss=loss,
        tokens_per_s=predicted_tokens_per_s(model.graph, where, chosen, storage),
        notes=() if text is None else text.notes,
        idle=idle,
        few_bits=_few_bits(model.graph, where, chosen) if isinstance(storage, Integers) else {},
    )


def stored_as_trained(whole: Path, target: Path, storage: Stored) -> CompressionReport:
    """Writes `target`, which must not have files, from a folder whose matrices a run's method left as `storage` can
    have them. RunError where some are not, and nothing is written."""
    if target.is_dir():
        target.rmdir()
    report = compress(whole, target, storage, "as trained")
    wrong = [error for error in report.errors if error.relative]
    if wrong:
        shutil.rmtree(target)
        raise RunError(
            f"{wrong[0].tensor} is not as {storage.name} has it after training (off by {wrong[0].relative:.2g}); the "
            f"weights are in {whole}, whole"
        )
    return report


def predicted_tokens_per_s(
    graph: Graph, where: Layout, chosen: Mapping[str, tuple[int, int]], storage: Stored, at: Rates | None = None
) -> tuple[float, float] | None:
    """Tokens per second of batch-1 decoding: of the model as it is, and with the chosen matrices stored so. at: rates;
    None for this machine's, which are measured."""
    shapes = {piece.tensor: (piece.shape[0], prod(piece.shape[1:])) for own in where.pieces.values() for piece in own}
    linears = set(_linears(graph, where))
    outside = {name for name, shape in shapes.items() if not IN_A_LAYER.search(name) and min(shape) > 1}
    if not outside or any(".experts." in name for name in linears):
        return None
    heads = {name for name in outside if "head" in name} or {max(outside, key=lambda name: prod(shapes[name]))}
    # Decoding one sequence multiplies every matrix with one row, so its time is the sum over matrices.
    read = [*chosen, *heads]  # the table of embeddings is a product where it is the head's matrix too
    whole = Dense(dtype="bf16")
    small: Storage = whole if isinstance(storage, Float8) else storage  # the engine widens eight-bit floats
    if isinstance(storage, Sparse):
        small = replace(storage, value="bf16")
    out = []
    for form in (whole, small):
        stored = {name: form if name in chosen else whole for name in read}
        total_bytes = float(sum(one.bytes(shapes[name]) for name, one in stored.items()))
        seconds = sum(
            storage_s(one, shapes[name], 1, total_bytes, at or rates(), this_machine()) for name, one in stored.items()
        )
        out.append(1 / seconds)
    return out[0], out[1]


def _few_bits(graph: Graph, where: Layout, chosen: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Activations that the engine's products of chosen matrices, which round what they multiply, alone read."""
    multiplied = {
        name: BITS["int8"] for name, pieces in where.pieces.items() if all(one.tensor in chosen for one in pieces)
    }
    return bits_needed(graph, multiplied, {})


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def check_places(source: Path, target: Path) -> None:
    """InputError for a folder that is not there, or one that cannot be made."""
    refuse_gguf(source)
    if source.is_file():
        raise InputError(f"{source} is a file; give its folder, with {CONFIG} and *.safetensors")
    if not source.is_dir():
        raise InputError(f"there is no folder {str(source)!r}; give one with {CONFIG} and *.safetensors")
    if target.exists() or target.is_symlink():
        raise InputError(f"{target} exists already; give another folder to write to, or remove it")
    if target.resolve().is_relative_to(source.resolve()):
        raise InputError(f"{target} is in {source}, in which nothing is changed; give a folder outside it")
    if not target.absolute().parent.is_dir():
        raise InputError(f"there is no folder {str(target.absolute().parent)!r} to write {target.name} into")


def _check_decoder(graph: Graph) -> None:
    """InputError for a model whose loss on a text is not that of each next token: encoders read more than the text."""
    if others := {tensor.name for tensor in graph.inputs} - {"input_ids", "labels"}:
        raise InputError(
            f"{graph.name} does not predict each next token of a text (it reads {', '.join(sorted(others))}), so no "
            f"loss is measured on it; leave --data out, with rtn or magnitude"
        )


def _linears(graph: Graph, where: Layout) -> dict[str, str]:
    """Tensors of the folder with a matrix of the model, and a parameter that lies in each."""
    known = parameters_of(graph)
    return {piece.tensor: name for name, pieces in where.pieces.items() if known[name].rows for piece in pieces}


def _chosen(graph: Graph, where: Layout, storage: Stored, source: Path) -> dict[str, tuple[int, int]]:
    """The tensors that change, (outputs, inputs) each. InputError for what does not fit the storage."""
    out: dict[str, tuple[int, int]] = {}
    pieces = {piece.tensor: piece for own in where.pieces.values() for piece in own}
    for tensor in _linears(graph, where):
        if not IN_A_LAYER.search(tensor) or KEPT_WHOLE.search(tensor):
            continue
        shape, order = pieces[tensor].shape, pieces[tensor].order
        if len(shape) != 2 or order or not tensor.endswith(".weight"):
            raise InputError(
                f"{source}: {tensor} of {' x '.join(map(str, shape))} is no matrix of outputs by inputs in its file; "
                f"models whose linears lie so (Llama, Qwen, Mistral, …) are compressed"
            )
        out[tensor] = shape[0], shape[1]
    for tensor, shape in out.items():
        if why := storage.refused(shape):
            raise InputError(f"{tensor} cannot be stored as {why}{_other_group(storage, out.values())}")
    if not out:
        raise InputError(f"{source} has no linear in a layer to compress")
    return out


def _other_group(storage: Stored, shapes: Iterable[tuple[int, int]]) -> str:
    """What to ask for where a group does not divide all matrices."""
    if not isinstance(storage, Integers):
        return ""
    common = gcd(*(columns for _, columns in shapes))
    fits = [group for group in range(LEAST_GROUP, min(common, storage.group) + 1, LEAST_GROUP) if common % group == 0]
    return f"; take --group {f'{fits[-1]}, which divides all, or ' if fits else ''}0 for a whole row"


def _loss(model: OneProcess, rows: Tensor) -> float:
    """Mean cross-entropy per token over rows, in nats."""
    total = 0.0
    with torch.no_grad():
        for row in rows:
            total += float(model.output({"input_ids": row[None, :-1], "labels": row[None, 1:]}))
    return total / rows[:, 1:].numel()


def layer_outputs(model: OneProcess, row: Tensor) -> list[Tensor]:
    """What each repeated layer makes of a row of text, in order."""
    graph, outputs = model.graph, dict[str, Tensor]()
    last = {
        layer.label: graph.block(layer.call.block).outputs[0]
        for layer in graph.layers()
        if layer.call.first is not None
    }

    def note(layer: Layer, name: str, x: Tensor) -> None:
        if last.get(layer.label) == name:
            outputs[layer.label] = x.detach().clone()

    model.stage.watch = note
    try:
        with torch.no_grad():
            model.output({"input_ids": row[None, :-1], "labels": row[None, 1:]})
    finally:
        model.stage.watch = None
    return [outputs[label] for label in last]


def _off(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / x.norm().clamp(min=1e-30))


def _by_layer(errors: Sequence[Error], outputs: Sequence[float]) -> tuple[LayerError, ...]:
    """Adds up errors of tensors layer by layer. outputs: the relative error of each layer's outputs; none without
    text."""
    of_layer: dict[int, list[Error]] = {}
    for error in errors:
        if (match := IN_A_LAYER.search(error.tensor)) is not None:
            of_layer.setdefault(int(match[1]), []).append(error)
    layer_errors = []
    for number, own in sorted(of_layer.items()):
        size = sum(error.size**2 for error in own) ** 0.5
        off = sum((error.relative * error.size) ** 2 for error in own) ** 0.5
        known = outputs[number] if number < len(outputs) else None
        layer_errors.append(LayerError(layer=number, weights=off / size if size else 0.0, outputs=known))
    return tuple(layer_errors)


@dataclass(slots=True)
class Inputs:
    """What linears were given, by tensor of the folder."""

    sums: dict[str, Tensor]
    """(inputs,) the sum of each input's squares; with `squares` (inputs, inputs), of all products of two; float64."""
    squares: bool

    def add(self, tensor: str, x: Tensor) -> None:
        """Adds the inputs (…, inputs) of one call of a linear to its statistics."""
        rows = x.detach().flatten(0, -2).double()
        # In fp64: GPTQ inverts these sums, which are close to singular for correlated inputs.
        new = rows.T @ rows if self.squares else (rows**2).sum(0)
        self.sums[tensor] = self.sums[tensor] + new if tensor in self.sums else new


class _Watch(TorchFunctionMode):
    """Adds the input of each product with a weight that lies at a known address."""

    def __init__(self, inputs: Inputs, tensors: Mapping[int, str]) -> None:
        super().__init__()
        self.inputs, self.tensors = inputs, tensors

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.nn.functional.linear and (name := self.tensors.get(args[1].data_ptr())) is not None:
            self.inputs.add(name, args[0])
        return func(*args, **(kwargs or {}))


def inputs_of_linears(model: OneProcess, where: Layout, rows: Tensor, *, squares: bool) -> Inputs:
    """Runs rows of text and gathers statistics of the inputs of every linear. Parts of one tensor (q, k and v in one)
    have the same inputs, which count once for each."""
    if not len(rows):
        raise InputError("there is too little text to hold some out and see the rest; give more (--data)")
    flat = model.parameters.flat
    assert flat is not None
    names = {
        # A weight that is multiplied is a view of the flat buffer, so its address says which one it is.
        flat.data_ptr() + slot.start * flat.element_size(): where.pieces[slot.name][0].tensor
        for slot in model.slots
    }
    inputs = Inputs({}, squares=squares)
    with torch.no_grad(), _Watch(inputs, names):
        for row in rows:
            model.output({"input_ids": row[None, :-1], "labels": row[None, 1:]})
    return inputs


def _wide(dtype: str, x: NDArray[Any]) -> NDArray[np.float32]:
    return wide_bfloat16(x) if dtype == "BF16" else x.astype(np.float32)


def _scales(folder: Folder, model_type: str, storage: Stored, seen: Inputs) -> Scales:
    """AWQ's, under which matrices are rounded to groups of integers."""
    assert isinstance(storage, Integers)
    form = replace(storage, scale="float32")

    def weight(name: str) -> NDArray[np.float32]:
        return _wide(folder.entries[name][1].dtype, raw(folder, name))

    def rounded(x: NDArray[np.float32]) -> NDArray[np.float32]:
        return form.widen(form.narrow(x), (x.shape[0], x.shape[1]))

    shapes = {name: entry.shape for name, (_, entry) in folder.entries.items()}
    squares = {name: sums.numpy() for name, sums in seen.sums.items()}
    return scales_of(shapes, model_type, weight, squares, rounded)


def _stored(
    name: str, entry: tuple[str, NDArray[Any]], storage: Stored, method: How, seen: Inputs, scales: Scales
) -> tuple[Tensors, NDArray[np.float32], NDArray[np.float32]]:
    """(the tensors that stand for a weight, the weight, what they stand for)."""
    dtype, x = entry
    weight = _wide(dtype, x)
    if not np.isfinite(weight).all():
        raise InputError(f"{name} has numbers that are not finite; nothing was written")
    if method in SEES_INPUTS and name not in seen.sums:
        raise InputError(f"no product with {name} was seen, which {method} wants; take {PLAIN[method]}")
    if isinstance(storage, Sparse):
        score = np.abs(weight)
        if method == "admm":
            stored_values = admm(weight, seen.sums[name].numpy(), lambda sizes: by_rows(storage, sizes))
            return (
                {name: (dtype, as_dtype(stored_values, x.dtype))},
                weight,
                _wide(dtype, as_dtype(stored_values, x.dtype)),
            )
        mask = wanda(storage, score, seen.sums[name].numpy()) if method == "wanda" else storage.mask(score)
        # Of the numbers as they were, not their float32: what stays is the same to the bit.
        pruned = np.where(mask, x, np.zeros((), x.dtype))
        return {name: (dtype, pruned)}, weight, _wide(dtype, pruned)
    shape = (weight.shape[0], weight.shape[1])
    base = name.removesuffix("weight")
    if isinstance(storage, Float8):
        eight = storage.narrow(weight)
        made8: Tensors = {name: ("F8_E4M3", eight["codes"]), f"{base}weight_scale": ("F32", eight["scales"])}
        return made8, weight, storage.widen(eight, shape)
    scale = dtype if dtype in ("F16", "BF16") else "F32"
    form = replace(storage, scale="float16" if scale == "F16" else "float32")

    def settle(scales: NDArray[Any]) -> NDArray[Any]:
        """Scales as the file will have them."""
        return wide_bfloat16(bfloat16_of(scales)) if scale == "BF16" else scales

    if method == "gptq":
        # Scales are rounded to the file's dtype before codes are chosen, so that codes make up for the rounding.
        arrays = gptq(form, weight, seen.sums[name].numpy(), settle)
    elif method == "as trained":
        arrays = form.coded(weight, settle(np.abs(in_groups(weight, form.group)).max(-1).astype(form.scale)))
    else:
        scaled = scales.scaled(name, weight)
        arrays = form.coded(scaled, settle(form.narrow(scaled)["scales"]))
    wide = scales.taken_back(name, form.widen(arrays, shape))
    if form.ternary:
        form, arrays = as_two_bits(form, arrays, shape)
    parts = packed(form, arrays, shape)
    by = bfloat16_of(parts["weight_scale"]) if scale == "BF16" else parts["weight_scale"]
    tensors: Tensors = {
        f"{base}weight_packed": ("I32", parts["weight_packed"]),
        f"{base}weight_scale": (scale, by),
        f"{base}weight_shape": ("I64", parts["weight_shape"]),
    }
    if not np.isfinite(wide).all():
        raise InputError(f"{name} is too large for scales in {form.scale}; nothing was written")
    return tensors, weight, wide


def as_dtype(x: NDArray[np.float32], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Values as a file has them: bfloat16 as uint16."""
    return bfloat16_of(x) if dtype == np.uint16 else x.astype(dtype)


def as_two_bits(
    form: Integers, arrays: Mapping[str, NDArray[Any]], shape: tuple[int, int]
) -> tuple[Integers, dict[str, NDArray[Any]]]:
    """Ternary weights as codes of two bits around their middle, which others know: -1, 0 and 1 as 1, 2 and 3."""
    two = replace(form, ternary=False)
    codes = form.codes_of(arrays, shape) + np.uint8(two.zero - form.zero)
    return two, two.of_codes(codes, arrays["scales"])


def by_rows(storage: Sparse, score: NDArray[np.float32]) -> NDArray[np.bool_]:
    """What is kept of scores; numbers that may lie anywhere are compared within a row."""
    if isinstance(storage, Bitmap):
        return np.concatenate([storage.mask(row[None]) for row in score])
    return storage.mask(score)


def wanda(storage: Sparse, score: NDArray[np.float32], sums: NDArray[np.float64]) -> NDArray[np.bool_]:
    """What is kept by |weight| times the norm of its input; numbers are compared within a row, whole blocks all."""
    by = (score * np.sqrt(sums)).astype(np.float32)
    return by_rows(storage, by)


def gptq(
    form: Integers,
    weight: NDArray[np.float32],
    squares: NDArray[np.float64],
    settle: Callable[[NDArray[Any]], NDArray[Any]],
) -> dict[str, NDArray[Any]]:
    """Columns are rounded one after another, and those that follow take up the error, as the inverse of `squares`
    (inputs, inputs) says. A group's scale is that of its numbers when its turn comes. An input that was always 0 has
    its weights rounded as they are."""
    w, h = weight.astype(np.float64), squares.copy()
    columns = w.shape[1]
    never = np.diag(h) == 0
    # An input that is always 0 leaves a zero row: 1 on the diagonal makes the matrix invertible and couples it to
    # nothing.
    h[never, never] = 1
    h[np.diag_indices(columns)] += DAMPING * np.diag(h).mean()
    # Row j of the upper Cholesky factor of the inverse has what GPTQ's Algorithm 1 needs at column j: the inverse of
    # the Hessian of the columns not rounded yet, without inverting it anew for each.
    upper = np.linalg.cholesky(np.linalg.inv(h)).T
    # Without groups a row is one.
    size = form.group or columns
    # For a single column under the scale of its group.
    one = replace(form, group=0)
    codes, scales = np.empty(w.shape, np.uint8), []
    for start in range(0, columns, size):
        own = slice(start, start + size)
        scale = settle(one.narrow(w[:, own].astype(np.float32))["scales"])
        scales.append(scale)
        errors = np.empty((w.shape[0], size))
        for j in range(start, start + size):
            column = w[:, j : j + 1].astype(np.float32)
            arrays = one.coded(column, scale)
            codes[:, j] = one.codes_of(arrays, (w.shape[0], 1))[:, 0]
            errors[:, j - start] = (w[:, j] - one.widen(arrays, (w.shape[0], 1))[:, 0]) / upper[j, j]
            w[:, j + 1 : own.stop] -= np.outer(errors[:, j - start], upper[j, j + 1 : own.stop])
        # Columns beyond the group are updated once, by one matmul (the paper's lazy batch updates); those of the group
        # one by one, since its scale is fixed before.
        w[:, own.stop :] -= errors @ upper[own, own.stop :]
    return form.of_codes(codes, np.concatenate(scales, 1))


def _write(
    folder: Folder,
    file: str,
    folder_new: Path,
    chosen: Mapping[str, tuple[int, int]],
    stored: Callable[[str, tuple[str, NDArray[Any]]], tuple[Tensors, NDArray[np.float32], NDArray[np.float32]]],
    scales: Scales,
) -> list[Error]:
    """Writes one file; of what is not chosen, norms and biases are divided by scales. New tensors are held until its
    header is known; the others are copied from file to file."""
    own = {name: entry for name, (of, entry) in folder.entries.items() if of == file}
    new: dict[str, tuple[str, NDArray[Any]]] = {}
    errors = []
    for name in own:
        if name not in chosen:
            continue
        if own[name].dtype not in DTYPES:
            raise InputError(f"{folder.path / file}: {name} is {own[name].dtype}; {', '.join(DTYPES)} are compressed")
        tensors, weight, wide = stored(name, (own[name].dtype, raw(folder, name)))
        new.update(tensors)
        size = float(np.linalg.norm(weight.astype(np.float64)))
        off = float(np.linalg.norm(wide.astype(np.float64) - weight))
        relative = off / size if size else 0.0
        errors.append(Error(tensor=name, shape=chosen[name], relative=relative, size=size))
    for name in own:
        if name not in chosen and name in scales.divided:
            x = raw(folder, name)
            new[name] = own[name].dtype, as_dtype(_wide(own[name].dtype, x) / scales.divided[name], x.dtype)
    exchanged(folder, file, folder_new, new, frozenset({*chosen, *new}))
    return errors


def _without_idle(folder_new: Path, graph: Graph, where: Layout, chosen: Mapping[str, tuple[int, int]]) -> int:
    """Sets what changes no result to zero in the files; how many weights that are. Matrices that lie in their file as
    the Graph has them, of one layer each."""
    folder, found = Folder.of(folder_new), 0
    names = {
        parameter: own[0].tensor
        for parameter, own in where.pieces.items()
        if len(own) == 1 and not own[0].order and not own[0].pick and own[0].tensor in folder.entries
    }
    layers = [
        {layer.call.parameter_name(one.name, layer.index) for one in graph.block(layer.call.block).parameters}
        for layer in graph.layers()
    ]
    shared = {name for number, own in enumerate(layers) for other in layers[:number] for name in own & other}
    matrices = {name: tensor for name, tensor in names.items() if tensor in chosen and name not in shared}
    reader = _NonzeroMasks(folder, {name: (tensor, chosen[tensor]) for name, tensor in matrices.items()})
    for name, mask in columns_read(graph, reader, _vectors(folder, graph, names)).items():
        tensor = matrices[name]
        idle = reader[name] & ~mask
        if idle.any():
            found += int(idle.sum())
            file, entry = folder.entries[tensor]
            numbers = raw(folder, tensor).reshape(mask.shape)
            numbers[idle] = 0
            with (folder_new / file).open("r+b") as out:
                out.seek(entry.begin)
                out.write(numbers.tobytes())
    return found


@dataclass(frozen=True, slots=True)
class _NonzeroMasks(Mapping[str, NDArray[np.bool_]]):
    """Masks of where matrices are not zero, read from their files one at a time."""

    folder: Folder
    where: Mapping[str, tuple[str, tuple[int, int]]]
    """Parameter -> tensor, and (outputs, inputs)."""

    def __getitem__(self, name: str) -> NDArray[np.bool_]:
        tensor, shape = self.where[name]
        return np.asarray(raw(self.folder, tensor).reshape(shape) != 0)

    def __iter__(self) -> Iterator[str]:
        return iter(self.where)

    def __len__(self) -> int:
        return len(self.where)


def _vectors(folder: Folder, graph: Graph, names: Mapping[str, str]) -> dict[str, NDArray[np.float32]]:
    """Numbers of biases and norms as they lie in the files; of tables of embeddings which columns are zero."""
    tables = {
        layer.call.parameter_name(op.inputs[1], layer.index)
        for layer in graph.layers()
        for op in graph.block(layer.call.block).ops
        if op.does == "looks up" and len(op.inputs) == 2
    }
    out = {}
    for name, tensor in names.items():
        dtype, shape = folder.entries[tensor][1].dtype, folder.entries[tensor][1].shape
        if dtype not in DTYPES or (len(shape) != 1 and name not in tables):
            continue
        numbers = raw(folder, tensor)
        zero = (numbers == 0).all(0) if name in tables else None
        out[name] = _wide(dtype, numbers) if zero is None else np.where(zero, 0, np.nan).astype(np.float32)
    return out


def _write_rest(
    folder: Folder,
    folder_new: Path,
    config: Mapping[str, Any],
    storage: Stored,
    unstored: Sequence[str],
) -> None:
    """The index, config.json and what goes with weights."""
    for file in companion_files(folder.path):
        shutil.copyfile(file, folder_new / file.name)
    if isinstance(storage, Integers):
        quantization = {"quantization_config": packed_config(replace(storage, ternary=False), unstored)}
    elif isinstance(storage, Float8):
        quantization = {"quantization_config": eight_config(unstored)}
    else:
        # Not in `quantization_config`: the tensors are plain ones, which every program then reads without another's
        # package.
        structure = storage.name if isinstance(storage, NM) else "unstructured"
        sparse = {"format": "dense", "sparsity_structure": structure, "storage": storage.name}
        quantization = {"sparsity_config": {**sparse, "targets": ["Linear"], "ignore": list(unstored)}}
    (folder_new / CONFIG).write_text(json.dumps({**config, **quantization}, indent=2) + "\n", encoding="utf-8")
    indexed(folder, folder_new)
