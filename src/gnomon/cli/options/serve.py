"""Options of serving: what `gnomon predict --serve` and `gnomon plan --serve` take besides.

Leaves out what they mean (`cli.predict_serve`).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from gnomon.cli.options.flags import Group, Options, option, switch
from gnomon.cli.values import buckets, count, some

SERVING = Group("serving (with --serve)")


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


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ServeOptions(Options):
    """What is served, how and to whom."""

    serve: bool = switch("--serve", help="predict an inference server, not training", group=SERVING)
    engine: str | None = option(
        "--engine", read=some, metavar="NAME", help="vllm, sglang, tensorrt-llm, llama.cpp, openvino", group=SERVING
    )
    input_len: int | None = option("--input-len", read=count, metavar="N", help="tokens of a prompt", group=SERVING)
    output_len: int | None = option("--output-len", read=count, metavar="N", help="tokens of an answer", group=SERVING)
    concurrency: int | None = option(
        "--concurrency", read=_clients, metavar="N", help="requests at the same time", group=SERVING
    )
    rate: float | None = option(
        "--rate", read=_rate, metavar="R", help="requests a second, in place of --concurrency", group=SERVING
    )
    requests: str | None = option(
        "--requests",
        metavar="FILE",
        group=SERVING,
        help="a trace: arrival_s,input_len,output_len; or what bench-serve -o wrote, shown for comparison",
    )
    num_requests: int | None = option(
        "--num-requests", read=count, metavar="N", help="how many are played; default by concurrency", group=SERVING
    )
    burst: int | None = option(
        "--burst", read=count, metavar="N", help="requests that come at once, with --rate", group=SERVING
    )
    spread: float | None = option(
        "--spread", read=_share, metavar="X", help="lengths lie from (1 - X) of these; default 0", group=SERVING
    )
    max_model_len: int | None = option(
        "--max-model-len", read=count, metavar="N", help="longest prompt with its answer", group=SERVING
    )
    weights: str | None = option(
        "--weights", read=some, metavar="FORMAT", help="bf16, fp8, int8, int4-wo, nvfp4, mxfp4, q4_k …", group=SERVING
    )
    kv: str | None = option("--kv-dtype", read=some, metavar="FORMAT", help="of cached keys: bf16, fp8", group=SERVING)
    stream_weights: str | None = option(
        "--stream-weights", read=some, metavar="SIZE", group=SERVING,
        help="layers in memory, others read from disk; of gnomon",
    )  # fmt: skip
    max_num_seqs: int | None = option(
        "--max-num-seqs", read=count, metavar="N", help="requests that run at the same time", group=SERVING
    )
    max_num_batched_tokens: int | None = option(
        "--max-num-batched-tokens", read=count, metavar="N", help="token budget of an iteration", group=SERVING
    )
    memory_fraction: float | None = option(
        "--memory-fraction", read=_share, metavar="X", help="share of memory that the engine takes", group=SERVING
    )
    dp: int | None = option(
        "--attention-dp", read=count, metavar="N", help="attention groups that share experts", group=SERVING
    )
    replicas: int | None = option(
        "--replicas", read=count, metavar="N", help="copies; default: all devices are used", group=SERVING
    )
    ttft: str | None = option(
        "--ttft", read=some, metavar="TIME", help="target of the first token, as in 500ms", group=SERVING
    )
    tpot: str | None = option(
        "--tpot", read=some, metavar="TIME", help="target of each further token, as in 30ms", group=SERVING
    )
    page: str | None = option(
        "--page", metavar="FILE", help="predict: the replay as a page: queue, batch, keys, first tokens", group=SERVING
    )
    fewest: bool = switch("--fewest", help="plan: as few devices as meet the targets", group=SERVING)
    draft: str | None = option(
        "--draft",
        read=some,
        metavar="WHO",
        help="who guesses tokens ahead: mtp, ngram, or a small model's name",
        group=SERVING,
    )
    draft_tokens: int | None = option(
        "--draft-tokens", read=count, metavar="N", help="guesses before each check", group=SERVING
    )
    acceptance: float | None = option(
        "--acceptance", read=_share, metavar="X", help="chance that a guess holds, with --draft", group=SERVING
    )
    lora_slots: int | None = option(
        "--lora-slots", read=count, metavar="N", help="adapters held at the same time", group=SERVING
    )
    pools: str | None = option(
        "--pools",
        read=some,
        metavar="P:D",
        help="disaggregated: P engines compute prompts, D answer, each laid out as --tp says",
        group=SERVING,
    )
    vision: str | None = option(
        "--vision", read=some, metavar="MODEL", help="encoder of an image that each prompt begins with", group=SERVING
    )
    image_tokens: int | None = option(
        "--image-tokens", read=count, metavar="N", help="patches of that image, with --vision", group=SERVING
    )
    beside: str | None = option(
        "--beside", read=some, metavar="DEVICE", group=SERVING,
        help="plan: a second kind of device, which branches run on at the same time (DUET)",
    )  # fmt: skip
    redundant_experts: int | None = option(
        "--redundant-experts", read=count, metavar="N", group=SERVING,
        help="copies of a layer's experts beyond one of each, placed by the load of --router",
    )  # fmt: skip
    expert_copies: int | None = option(
        "--expert-copies", read=count, metavar="N", group=SERVING,
        help="of a device, of experts that the next layer is foreseen to want (Lina)",
    )  # fmt: skip
    pad_to: tuple[int, ...] = option(
        "--pad-to", default=(), read=buckets, metavar="LIST", group=SERVING,
        help="predict: lengths that texts of an encoder are padded to, as in 64,128,512",
    )  # fmt: skip
    every_bucket: bool = switch("--every-bucket", help="each worker has all buckets, not one each", group=SERVING)
    chunked_prefill: str | None = option(
        "--chunked-prefill", choices=("on", "off"), help="whether prompts are cut at the budget", group=SERVING
    )
