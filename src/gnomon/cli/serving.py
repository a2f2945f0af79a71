"""Which options are of serving and which of training, and that no program is asked for the other.

`asks_to_serve(options)` says which is asked; `refuse_others(options)` and `refuse_servers(options)` raise InputError
for what does not go with it. Leaves out predicting a server (`cli.predict_serve`).
"""

from __future__ import annotations

from gnomon.cli.missing import INFERENCE, SERVERS
from gnomon.cli.options.flags import Options, changed_options, flags
from gnomon.cli.options.job import JobOptions, StackOption
from gnomon.cli.options.serve import ServeOptions
from gnomon.errors import InputError

COMMANDS_READ = ("vllm", "sglang", "tensorrt-llm", "llama.cpp", "openvino", "dynamo")
"""Programs whose command lines `gnomon predict --from` reads (`formats.engines.BEGINS`)."""

SHARED = ("model", "on", "output", "tp", "pp", "ep", "lora_rank", "json", "settings", "strict", "source", "router")
"""Further options, not of serving alone, that serving reads; any other that is given is refused."""


def asks_to_serve(options: ServeOptions) -> bool:
    """Whether a prediction is that of a server: --serve, or the command line of one behind --from."""
    source = options.source if isinstance(options, JobOptions) else None
    return options.serve or source is not None and source[0] in COMMANDS_READ


def refuse_others(options: ServeOptions) -> None:
    """InputError for an option of training with --serve, or one of serving without it."""
    serves, own = asks_to_serve(options), flags(ServeOptions)
    for name in changed_options(options):
        if serves and name not in own and name not in SHARED:
            raise InputError(f"--{name.replace('_', '-')} is of training, and --serve predicts a server; leave one out")
        if not serves and name in own:
            raise InputError(f"--{name.replace('_', '-')} is of serving; add --serve")


def refuse_servers(options: Options) -> None:
    """InputError where a program that serves is to run the job, or its file is to be read, without --serve."""
    if isinstance(options, ServeOptions) and asks_to_serve(options):
        return
    source = options.source if isinstance(options, JobOptions) else None
    stack = options.stack if isinstance(options, StackOption) else None
    for option, name in (("--stack", stack), ("--from", source[0] if source else None)):
        if name is not None and SERVERS.fullmatch(name):
            raise InputError(f"{option} {name}: {INFERENCE}")
