"""`gnomon generate`: a few words from a folder of weights, by the engine of `gnomon serve`.

`run(options)` prints the prompt and what the model adds, as it comes, and returns 0.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gnomon.cli.missing import need_torch
from gnomon.cli.options.server import GenerateOptions
from gnomon.cli.serve import resident_of, weights_at
from gnomon.cli.terminal import print_json
from gnomon.errors import InputError
from gnomon.late import load_late
from gnomon.software.engine import engine

ALL_BYTES = 1 << 62
"""Of keys and values: as many as one request needs."""


def run(options: GenerateOptions) -> int:
    """Read the weights and the tokenizer, generate, print."""
    need_torch("generating")
    folder = weights_at(options.folder, options.tokenizer)
    tokenizer = Path(options.tokenizer).expanduser() if options.tokenizer else None
    words = load_late("gnomon.serve.vocabulary:Vocabulary").open(folder, tokenizer)
    words.whole = load_late("gnomon.serve.load:is_seq2seq")(folder)
    ids = words.prompt(options.prompt)
    if not ids:
        raise InputError("the prompt has no token; give some text")
    model = load_late("gnomon.serve.load:open_model")(
        folder,
        replace(engine("gnomon"), max_seqs=1),
        dtype=options.dtype,
        weights=options.weights,
        kv_bytes=ALL_BYTES,
        longest_asked=len(ids) + options.count,
        head=options.head,
        resident_bytes=resident_of(options.stream_weights),
    )
    sampling = load_late("gnomon.serve.sampling:Sampling")(
        max_tokens=options.count,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop_ids=words.ends,
    )
    stream = load_late("gnomon.serve.text:TextStream")(words)
    model.add(ids, sampling, watch=[stream.push])
    new: list[int] = []
    if not options.json:
        print(options.prompt, end="", flush=True)
    while model.has_work:
        for token in model.step():
            if token.chosen.token not in words.ends:
                new.append(token.chosen.token)
        if not options.json:
            print(stream.take(), end="", flush=True)
    rest = stream.take(all=True)
    if options.json:
        print_json({"schema": "gnomon.generate/1", "prompt": options.prompt, "text": stream.text, "ids": new})
    else:
        print(rest)
    return 0
