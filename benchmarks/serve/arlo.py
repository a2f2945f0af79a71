"""Texts of a real trace's lengths on two workers of an encoder: own lengths, one padded runtime, and Arlo's buckets.

`python benchmarks/serve/arlo.py TRACE.csv [--layers 4] [--load 0.7] [--write]`: runtimes are measured, in CPU-seconds
of one thread, on an encoder of BERT-base's width with random weights, and the trace's arrivals are played through the
dispatcher of the server with them: two cores that others use too give no percentiles of their own. Texts longer than
512 tokens are cut. The load is the share of two workers' time that one padded runtime would take. *Dynamic shapes*:
each text at its own length with matrices as they lie; *packed*: with matrices packed once, as `gnomon serve` has
them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import transformers

from gnomon.serve import bound
from gnomon.serve.encoder import Encoder
from gnomon.serving.buckets import best_lengths
from gnomon.serving.dispatch import Policy, play
from gnomon.serving.requests import Load, at_rate, from_csv

RESULT = Path(__file__).parents[1] / "results" / "serve_arlo.md"
LONGEST, AT, ROUNDS = 512, (16, 32, 64, 96, 128, 192, 256, 384, 448, 512), 5
WORKERS = 2


def encoders(layers: int) -> tuple[Encoder, Encoder]:
    """(packed, as they lie) of the same weights."""
    folder = Path(tempfile.mkdtemp())
    config = transformers.BertConfig(num_hidden_layers=layers)
    transformers.BertModel(config).float().eval().save_pretrained(folder)
    packed = Encoder.open(folder, "fp32", None)
    packs, bound.PACKS = bound.PACKS, ()  # type: ignore[assignment]
    plain = Encoder.open(folder, "fp32", None)
    bound.PACKS = packs
    return packed, plain


def measured(which: list[Callable[[int], object]]) -> list[list[float]]:
    """Of each, at each of AT: the median of ROUNDS in CPU-seconds, interleaved."""
    times = np.zeros((len(which), len(AT), ROUNDS))
    for round_ in range(ROUNDS + 1):
        for j, length in enumerate(AT):
            for i, run in enumerate(which):
                begin = time.process_time()
                run(length)
                times[i, j, max(0, round_ - 1)] = time.process_time() - begin
    return [[float(np.median(row)) for row in one] for one in times]


def line(made: list[float]) -> Callable[[int], float]:
    rising = np.maximum.accumulate(made)
    return lambda tokens: float(np.interp(tokens, AT, rising))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--load", type=float, nargs="+", default=[0.5, 0.7, 0.85])
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    packed, plain = encoders(given.layers)
    own_packed, own_plain, padded = (
        line(one)
        for one in measured([
            lambda n: packed.embed([7] * n), lambda n: plain.embed([7] * n),
            lambda n: packed.embed([7] * max(1, n * 3 // 4), n),
        ])
    )  # fmt: skip
    lines = [f"| {n} | {own_plain(n) * 1e3:.1f} | {own_packed(n) * 1e3:.1f} | {padded(n) * 1e3:.1f} |" for n in AT]
    runtimes = "\n".join(("| tokens | dynamic shapes | packed | padded from 3/4 |", "|---:|---:|---:|---:|", *lines))
    print(runtimes, flush=True)
    load = from_csv(given.trace.read_text(), source=given.trace.name)
    cut = Load(requests=tuple(replace(r, input_len=min(r.input_len, LONGEST), output_len=1) for r in load.requests))
    counts = Counter(r.input_len for r in cut.requests)
    rows = []
    for share in given.load:
        asked = at_rate(cut, share * WORKERS / padded(LONGEST))
        tried = [
            ("one padded runtime", Policy(workers=WORKERS, longest=LONGEST, lengths=(LONGEST,)), padded),
            ("dynamic shapes", Policy(workers=WORKERS, longest=LONGEST), own_plain),
            ("own length, packed", Policy(workers=WORKERS, longest=LONGEST), own_packed),
        ]
        for most in (2, 4, 8):
            lengths = (*(one for one in best_lengths(counts, padded, most, 8) if one < LONGEST), LONGEST)
            one, each = (
                Policy(workers=WORKERS, longest=LONGEST, lengths=lengths, every=flag) for flag in (False, True)
            )
            tried += [("Arlo: " + one.name, one, padded), ("buckets: " + each.name, each, padded)]
        base = 0.0
        for name, policy, seconds in tried:
            played = play(asked, policy, seconds, known=True)
            base = base or played.percentile(98)
            rows.append(
                f"| {share:.0%} | {name} | {played.percentile(50) * 1e3:.0f} | {played.percentile(98) * 1e3:.0f} | "
                f"{played.percentile(98) / base:.2f} | {played.busy_s / WORKERS / played.end_s.max():.0%} | "
                f"{played.padding:.0%} | {played.demoted} |"
            )
            print(rows[-1], flush=True)
    if given.write:
        texts = np.array([r.input_len for r in cut.requests])
        quartiles = json.dumps(np.percentile(texts, [10, 50, 90]).astype(int).tolist())
        how = (
            f"`python benchmarks/serve/arlo.py {given.trace.name} --write`, {time.strftime('%Y-%m-%d')}, torch "
            f"{torch.__version__}. {len(texts):,} texts, 10th, 50th, 90th percentile of tokens {quartiles}, cut at "
            f"{LONGEST}. An encoder of {given.layers} layers of BERT-base, float32. Runtimes are measured in CPU-"
            f"milliseconds of one thread of a machine that others used, medians of {ROUNDS}; latencies are "
            "those of the trace's arrivals played through the server's dispatcher with them, on two workers."
        )
        columns = "load|policy|p50 ms|p98 ms|p98 of padded|busy|padding|demoted"
        table = "\n".join((f"| {' | '.join(columns.split('|'))} |", f"|---:|---|{'---:|' * 6}", *rows))
        title = "# An encoder's texts of several lengths on two workers (Arlo)"
        RESULT.write_text("\n\n".join((title, how, runtimes, table)) + "\n")


if __name__ == "__main__":
    main()
