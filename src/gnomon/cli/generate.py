"""`gnomon generate`: a few words from a folder of weights, to look at what a run has learnt.

`run(options)` prints the prompt and what the model adds, and returns 0. There is no cache of keys and values, so it is
for words, not for serving.
"""

from __future__ import annotations

from pathlib import Path

from gnomon.cli.options.run import GenerateOptions
from gnomon.cli.run import need_torch
from gnomon.cli.terminal import print_json
from gnomon.errors import InputError
from gnomon.late import load_late


def run(options: GenerateOptions) -> int:
    """Read the weights and the tokenizer, generate, print."""
    need_torch("generating")
    folder = Path(options.folder).expanduser()
    tokenizer = Path(options.tokenizer).expanduser() if options.tokenizer else folder
    beside = (tokenizer / "tokenizer.json").is_file() or tokenizer.is_file()
    if options.tokenizer and not beside:
        raise InputError(f"{tokenizer} has no tokenizer.json; name the file or its folder")
    encoder = load_late("gnomon.runtime.data.encode:Encoder").open(tokenizer if beside else None)
    model = load_late("gnomon.runtime.checkpoint.pretrained:load")(folder, logits=True)
    ids = encoder.prompt(options.prompt)
    if not ids:
        raise InputError("the prompt has no token; give some text")
    new = load_late("gnomon.runtime.module.generate:generate")(
        model,
        ids,
        count=options.count,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
        stop=() if encoder.end is None else (encoder.end,),
    )
    text = encoder.decode(new)
    if options.json:
        print_json({"schema": "gnomon.generate/1", "prompt": options.prompt, "text": text, "ids": new})
    else:
        print(f"{options.prompt}{text}")
    return 0
