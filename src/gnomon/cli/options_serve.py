"""Options of serving: what `gnomon predict --serve` and `gnomon plan --serve` add to their parsers.

Leaves out what they mean (`serve`).
"""

from __future__ import annotations

import argparse

from gnomon.cli.missing import asks_to_serve
from gnomon.cli.values import count, some
from gnomon.errors import InputError

OWN = (
    "engine input_len output_len concurrency rate requests num_requests burst spread max_model_len weights kv "
    "max_num_seqs max_num_batched_tokens memory_fraction dp replicas ttft tpot"
).split()
"""Destinations of options that only serving reads."""


SHARED = {"command", "model", "on", "output", "tp", "pp", "ep", "json", "serve", "settings", "strict", "source", *OWN}
"""Options that serving reads; any other that is given is refused."""


def serve_options(parser: argparse.ArgumentParser) -> None:
    """What is served, how and to whom."""
    group = parser.add_argument_group("serving (with --serve)")
    group.add_argument("--serve", action="store_true", help="predict an inference server, not training")
    group.add_argument("--engine", type=some, metavar="NAME", help="vllm, sglang, tensorrt-llm, llama.cpp, openvino")
    group.add_argument("--input-len", type=count, metavar="N", help="tokens of a prompt")
    group.add_argument("--output-len", type=count, metavar="N", help="tokens of an answer")
    group.add_argument("--concurrency", type=_clients, metavar="N", help="requests at the same time")
    group.add_argument("--rate", type=_rate, metavar="R", help="requests a second, in place of --concurrency")
    group.add_argument("--requests", metavar="FILE", help="a trace: arrival_s,input_len,output_len")
    group.add_argument("--num-requests", type=count, metavar="N", help="how many are played; default by concurrency")
    group.add_argument("--burst", type=count, metavar="N", help="requests that come at once, with --rate")
    group.add_argument("--spread", type=_share, metavar="X", help="lengths lie from (1 - X) of these; default 0")
    group.add_argument("--max-model-len", type=count, metavar="N", help="longest prompt with its answer")
    group.add_argument("--weights", type=some, metavar="FORMAT", help="bf16, fp8, int8, int4-wo, nvfp4, mxfp4, q4_k …")
    group.add_argument("--kv-dtype", dest="kv", type=some, metavar="FORMAT", help="of cached keys: bf16, fp8")
    group.add_argument("--max-num-seqs", type=count, metavar="N", help="requests that run at the same time")
    group.add_argument("--max-num-batched-tokens", type=count, metavar="N", help="token budget of an iteration")
    group.add_argument("--memory-fraction", type=_share, metavar="X", help="share of memory that the engine takes")
    group.add_argument("--attention-dp", dest="dp", type=count, metavar="N", help="attention groups that share experts")
    group.add_argument("--replicas", type=count, metavar="N", help="copies; default: all devices are used")
    group.add_argument("--ttft", type=some, metavar="TIME", help="target of the first token, as in 500ms")
    group.add_argument("--tpot", type=some, metavar="TIME", help="target of each further token, as in 30ms")


def _clients(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no whole number of requests") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} serves nobody; give at least 1")
    return value


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number of requests a second") from None
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no rate; give requests a second, above 0")
    return value


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no share; write 0.9") from None
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no share; it is from 0 to 1")
    return value


def refuse_others(options: argparse.Namespace, defaults: argparse.Namespace) -> None:
    """InputError for an option of training beside --serve, or one of serving without it."""
    serves = asks_to_serve(options)
    for name, value in vars(options).items():
        if value == getattr(defaults, name, None) or name in ("command",):
            continue
        if serves and name not in SHARED:
            raise InputError(f"--{name.replace('_', '-')} is of training, and --serve predicts a server; leave one out")
        if not serves and name in OWN:
            raise InputError(f"--{name.replace('_', '-')} is of serving; add --serve")
