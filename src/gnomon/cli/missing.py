"""What people ask of a command that another one does, said in a line where it is asked: inference.

`not_there(words)` is for what no parser knows, `refuse_servers(options)` for names of programs that serve. Leaves out
spelling mistakes, which are the parser's.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from gnomon.errors import InputError

INFERENCE = (
    "inference servers are predicted by `gnomon predict MODEL --on CLUSTER --serve` (--engine vllm and others); "
    "all else here is about training steps"
)

_ASKED = re.compile(r"(serv(e|er|ing)|infer(ence)?|decod(e|ing)|prefill|kv-?cache|ttft|tpot)s?", re.IGNORECASE)
"""Words of options and commands that ask for it."""

_SERVERS = re.compile(
    r"vllm|sglang|tgi|tensorrt(-llm)?|trt-?llm|lmdeploy|llama\.?cpp|ollama|triton-?server", re.IGNORECASE
)
"""Programs that only serve."""

COMMANDS_READ = ("vllm", "sglang", "tensorrt-llm")
"""Those whose command lines `gnomon predict --from` reads (`formats.engines.BEGINS`)."""


def asks_to_serve(options: argparse.Namespace) -> bool:
    """Whether a prediction is that of a server: --serve, or the command line of one behind --from."""
    source = getattr(options, "source", None)
    return bool(options.serve) or source is not None and source[0] in COMMANDS_READ


def not_there(words: Sequence[str]) -> str | None:
    """The sentence for arguments that no parser knows; None where they do not ask for inference."""
    names = [part for word in words for part in word.lstrip("-").split("=")]
    return INFERENCE if any(_ASKED.fullmatch(name) or _SERVERS.fullmatch(name) for name in names) else None


def refuse_servers(options: argparse.Namespace) -> None:
    """InputError where a program that serves is to run the job, or its file is to be read, without --serve."""
    if getattr(options, "serve", False) or options.command == "predict" and asks_to_serve(options):
        return
    source = getattr(options, "source", None)
    for option, name in (("--stack", getattr(options, "stack", None)), ("--from", source[0] if source else None)):
        if name is not None and _SERVERS.fullmatch(name):
            raise InputError(f"{option} {name}: {INFERENCE}")
