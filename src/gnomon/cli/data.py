"""`gnomon data`: what a corpus holds as tokens, and the same tokens as a pair of files in Megatron-LM's format.

`run(options)` reads the text as `gnomon run` does, so that damaged files are found before a run, and returns 0. Leaves
out training.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from gnomon.cli.missing import need_torch
from gnomon.cli.options.run import DataOptions
from gnomon.cli.run import source_of
from gnomon.cli.terminal import print_json, print_lines
from gnomon.errors import InputError
from gnomon.late import load_late
from gnomon.report.tables import wrapped


def run(options: DataOptions) -> int:
    """Read, count, write where that was asked."""
    need_torch("reading a corpus")
    source = source_of(options)
    corpus = load_late("gnomon.runtime.data.corpus:Corpus").open(source, lambda line: print(line, file=sys.stderr))
    corpus.check(options.seq_len)
    rows = {name: corpus.rows(side, options.seq_len) for side, name in enumerate(("training", "validation"))}
    written = _write(source, Path(options.output).expanduser()) if options.output else ()
    if options.lengths:
        written += _write_lengths(corpus, options, Path(options.lengths).expanduser())
    summary = {
        "schema": "gnomon.data/1",
        "source": corpus.where,
        "packing": corpus.packing,
        "least_vocabulary": corpus.vocab_size,
        "identity": corpus.identity,
        "notes": list(corpus.notes),
        "seq_len": options.seq_len,
        **{name: _side(getattr(corpus, name), rows[name], options.seq_len) for name in rows},
    }
    if options.json:
        print_json(summary)
        return 0
    print_lines((*wrapped(source.describe(), indent=""), *_lines(summary), *written))
    return 0


def _side(side: Any, rows: Any, seq_len: int) -> dict[str, float]:
    """Numbers of one side. filled: share of the positions of its rows that hold a token."""
    positions = len(rows) * seq_len
    num_tokens = int(rows.lengths.sum()) - (len(rows.lengths) if len(rows) else 0)
    return {
        "documents": len(side.starts),
        "tokens": side.size,
        "longest": int(side.lengths.max()),
        "rows": len(rows),
        "filled": min(1.0, num_tokens / positions) if positions else 0.0,
    }


def _lines(summary: dict[str, Any]) -> tuple[str, ...]:
    out = []
    for name, label in (("training", "to train on"), ("validation", "held out")):
        side = summary[name]
        filled = "" if summary["packing"] == "stream" else f", {side['filled'] * 100:.1f} % filled"
        out.append(
            f"{label}: {side['documents']:,} documents of {side['tokens']:,} tokens, the longest {side['longest']:,}; "
            f"{side['rows']:,} rows of {summary['seq_len']:,}{filled}"
        )
    return tuple(line for text in (*out, *summary["notes"]) for line in wrapped(text, bullet="- "))


def _write_lengths(corpus: Any, options: DataOptions, path: Path) -> tuple[str, ...]:
    """Tokens of each document of a batch, spread evenly over all by length: shares are those of the corpus, and the
    longest is among them."""
    rows = corpus.one_a_row().rows(0, options.seq_len)
    every = sorted(int(length) - 1 for length in rows.lengths if length > 1)
    count = min(options.sequences, len(every))
    chosen = [every[(2 * place + 1) * len(every) // (2 * count)] for place in range(count - 1)] + [every[-1]]
    try:
        path.write_text("".join(f"{length}\n" for length in chosen), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; give another --lengths") from error
    total, half = sum(chosen), chosen[count // 2]
    return (
        f"wrote {path}: {count} sequences of {chosen[0]:,} to {chosen[-1]:,} tokens, half of at most {half:,}; "
        f"{total / (count * chosen[-1]):.0%} of what they are padded to the longest",
    )


def _write(source: Any, prefix: Path) -> tuple[str, ...]:
    """Copies the tokens to PREFIX.bin and PREFIX.idx."""
    if source.megatron is not None:
        raise InputError(f"{source.path} is in Megatron's format already")
    for end in (".bin", ".idx"):
        if prefix.with_name(prefix.name + end).exists():
            raise InputError(f"{prefix}{end} exists; give another -o, or remove it")
    folder = load_late("gnomon.runtime.data.store:store")(source)
    try:
        for end in (".bin", ".idx"):
            shutil.copyfile(folder / f"tokens{end}", prefix.with_name(prefix.name + end))
    except OSError as error:
        raise InputError(f"cannot write {prefix}.bin: {error.strerror}; give another -o") from error
    lost = "" if not (folder / "learn.idx").is_file() else ", without which tokens are to be learnt"
    return (f"wrote {prefix}.bin and {prefix}.idx: all documents in Megatron-LM's format{lost}",)
