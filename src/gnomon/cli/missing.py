"""What is not there, said in a line where it is asked: inference of commands that are about training, and torch.

`not_there(words)` is for what no parser knows; `need_torch(what)` for commands that run something. Leaves out spelling
mistakes, which are the parser's, and options that do not go together (`cli.serving`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec

from gnomon.errors import InputError

INFERENCE = (
    "inference servers are predicted by `gnomon predict MODEL --on CLUSTER --serve` (--engine vllm and others), "
    "and `gnomon serve FOLDER` serves weights on this machine; all else here is about training steps"
)

_ASKED = re.compile(r"(serv(e|er|ing)|infer(ence)?|decod(e|ing)|prefill|kv-?cache|ttft|tpot)s?", re.IGNORECASE)
"""Words of options and commands that ask for it."""

SERVERS = re.compile(
    r"vllm|sglang|tgi|tensorrt(-llm)?|trt-?llm|lmdeploy|llama\.?cpp|ollama|triton-?server", re.IGNORECASE
)
"""Programs that only serve."""


def not_there(words: Sequence[str]) -> str | None:
    """The sentence for arguments that no parser knows; None where they do not ask for inference."""
    names = [part for word in words for part in word.lstrip("-").split("=")]
    return INFERENCE if any(_ASKED.fullmatch(name) or SERVERS.fullmatch(name) for name in names) else None


def need_torch(what: str) -> None:
    """InputError where torch is not installed."""
    if find_spec("torch") is None:
        raise InputError(f"{what} needs torch, which is not installed: pip install gnomon[torch]")
