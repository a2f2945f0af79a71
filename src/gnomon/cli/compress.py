"""`gnomon compress`: a folder of weights in fewer bits or with zeros, and what that costs.

`run(options)` writes the new folder, prints loss, errors and sizes, and returns 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gnomon.cli.missing import need_torch
from gnomon.cli.options.compress import CompressOptions
from gnomon.cli.terminal import Progress, print_json, print_lines
from gnomon.errors import InputError
from gnomon.late import load_late
from gnomon.report.tables import Column, number, table, wrapped
from gnomon.storage.form import Storage
from gnomon.storage.integers import LEAST_GROUP
from gnomon.storage.names import storage_of
from gnomon.units import show_bytes

GROUP = 64
"""Weights that share a scale, usually."""
WORST = 8
"""Tensors that are shown."""
BLOCKS = re.compile(r"block:[1-9]\d*x[1-9]\d*")
BLOCKS_LEFT_OUT = "0.9"
"""Share of blocks without a word about it."""
OF_BITS, OF_ZEROS = ("rtn", "gptq", "awq"), ("magnitude", "wanda", "admm")


def run(options: CompressOptions) -> int:
    """Reads a model's weights, writes them compressed and prints their sizes."""
    storage, method = _storage_and_method(options)
    need_torch("compressing weights")
    source, target = Path(options.folder).expanduser(), Path(options.output).expanduser()
    load_late("gnomon.runtime.checkpoint.compress:check_places")(source, target)
    text = None
    if options.data is not None:
        tokenizer = Path(options.tokenizer).expanduser() if options.tokenizer else None
        text = load_late("gnomon.runtime.checkpoint.compress:read_text")(Path(options.data), source, tokenizer)
    progress = Progress(f"{storage.name} by {method}: linears", 0)

    def note(done: int, of: int) -> None:
        progress.total = of
        progress.show(done)

    try:
        compressed = load_late("gnomon.runtime.checkpoint.compress:compress")(
            source, target, storage, method, text, note
        )
    finally:
        progress.end()
    if options.json:
        print_json(_mapping(compressed, target, storage, method))
    else:
        print_lines(_lines(compressed, target, storage, method))
    return 0


def _storage_and_method(options: CompressOptions) -> tuple[Storage, str]:
    """(how linears are to be stored, the method). InputError for words that contradict each other."""
    if (options.bits is None) == (options.sparsity is None):
        both = "not both" if options.bits is not None else "one of them"
        raise InputError(
            f"give --bits 4, 8, fp8 or ternary, or --sparsity as 2:4, 4:16, 0.9 or block:16x16:0.9: {both}"
        )
    if options.tokenizer is not None and options.data is None:
        raise InputError("--tokenizer is of the text, and there is none; give --data, or leave it out")
    known = OF_BITS if options.bits is not None else OF_ZEROS
    method = options.method or known[0]
    if method not in known:
        which = "--bits" if options.bits is not None else "--sparsity"
        raise InputError(f"--method {method} does not go with {which}, which takes {' or '.join(known)}")
    if options.sparsity is not None:
        if options.group is not None:
            raise InputError("--group is of --bits; sparse weights have no scales, so leave it out")
        name = options.sparsity
        if BLOCKS.fullmatch(name):
            name = f"{name}:{BLOCKS_LEFT_OUT}"
        if not re.fullmatch(rf"\d+:\d+|({BLOCKS.pattern}:)?0?\.\d+", name):
            raise InputError(f"--sparsity {name[:40]!r} is not known; as 2:4, 4:16, 0.9 or block:16x16:0.9")
        return storage_of(name), method
    if options.bits == "fp8":
        if options.group is not None or method != "rtn":
            raise InputError(
                "--bits fp8 has a scale for each output and rounds to nearest: leave --group and --method out"
            )
        return storage_of("fp8-row"), method
    if options.bits == "ternary" and method != "rtn":
        raise InputError("--bits ternary rounds to -1, 0 and 1 times the mean size of a group: leave --method out")
    group = GROUP if options.group is None else options.group
    kind = "ternary" if options.bits == "ternary" else f"int{options.bits}"
    if 0 < group < LEAST_GROUP:
        raise InputError(
            f"--group {group}: a scale is of {LEAST_GROUP} weights at least; {GROUP} is usual, 0 is a whole row"
        )
    return storage_of(kind + (f"-g{group}" if group else "")), method


def _mapping(compressed: Any, target: Path, storage: Storage, method: str) -> dict[str, Any]:
    loss = compressed.loss
    return {
        "schema": "gnomon.compress/1",
        "path": str(target),
        "storage": storage.name,
        "method": method,
        "bytes_before": compressed.bytes_before,
        "bytes_after": compressed.bytes_after,
        "loss": None if loss is None else {"before": loss.before, "after": loss.after, "tokens": loss.tokens},
        "tokens_per_s": None
        if compressed.tokens_per_s is None
        else {"before": compressed.tokens_per_s[0], "after": compressed.tokens_per_s[1]},
        "layers": [{"layer": one.layer, "weights": one.weights, "outputs": one.outputs} for one in compressed.layers],
        "errors": {error.tensor: error.relative for error in compressed.errors},
        "idle": compressed.idle,
        "few_bits": dict(compressed.few_bits),
        "notes": list(compressed.notes),
    }


def _layers(compressed: Any) -> Sequence[str]:
    """A table of each layer's relative error: of its weights, and of its outputs on held-out text behind all compressed
    layers before it."""
    columns = (Column(name="layer"), Column(name="weights' error"), Column(name="outputs' error"))
    rows = [
        (str(one.layer), number(one.weights, 4), "-" if one.outputs is None else number(one.outputs, 4))
        for one in compressed.layers
    ]
    return table(columns, rows)


def _lines(compressed: Any, target: Path, storage: Storage, method: str) -> tuple[str, ...]:
    share = compressed.bytes_after / compressed.bytes_before
    out = [
        f"{target}: {len(compressed.errors)} linears as {storage.name} by {method}",
        f"  size   {show_bytes(compressed.bytes_before)} -> {show_bytes(compressed.bytes_after)} ({share:.0%})",
    ]
    if compressed.loss is None:
        out.append("  loss   not measured: no text was given (--data)")
    else:
        loss = compressed.loss
        out.append(
            f"  loss   {loss.before:.4f} -> {loss.after:.4f} a token ({loss.after - loss.before:+.4f}), on "
            f"{loss.tokens:,} held-out tokens"
        )
    if compressed.idle:
        out.append(f"  idle   {compressed.idle:,} weights that were kept change no result, and are zero now")
    if compressed.few_bits:
        out.append(
            f"  bits   {len(compressed.few_bits)} activations are read in 8 bits alone, by products that round them"
        )
    if compressed.tokens_per_s is not None:
        before, after = (number(one) for one in compressed.tokens_per_s)
        out.append(f"  speed  {before} -> {after} tokens/s predicted (one sequence, one thread, products alone)")
    worst = sorted(compressed.errors, key=lambda error: -error.relative)[:WORST]
    columns = (Column(name="tensor", align="left"), Column(name="shape"), Column(name="relative error"))
    rows = [(e.tensor, " x ".join(map(str, e.shape)), number(e.relative, 4)) for e in worst]
    out += ["", *table(columns, rows)]
    if len(compressed.errors) > WORST:
        out.append(f"the {WORST} worst of {len(compressed.errors)}; --json has all")
    out += ["", *_layers(compressed)]
    for note in compressed.notes:
        out += wrapped(note, bullet="note: ")
    return tuple(out)
