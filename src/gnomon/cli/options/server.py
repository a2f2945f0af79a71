"""Options of commands that serve for real: `gnomon serve`, `generate` and `bench-serve`.

Leaves out predictions of servers (`options.serve`).
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.cli.options.flags import Group, Options, option, positional, repeated, switch
from gnomon.cli.values import at_most, buckets, count, new_file, not_negative, number_from, some

DTYPES = ("fp32", "bf16", "fp64")
HEADS = ("exact", "graph")
ENGINE = Group("engine")


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Options):
    """How a folder of weights is served."""

    tokenizer: str | None = option(
        "--tokenizer", read=some, metavar="FILE", group=ENGINE, help="default the folder's own, or bytes"
    )
    dtype: str = option("--dtype", default="bf16", choices=DTYPES, group=ENGINE, help="computed in; bf16")
    weights: str = option(
        "--weights", default="stored", read=some, metavar="FORM", group=ENGINE,
        help="matrices kept as the folder has them (stored), or rounded: int8, int4-g64, int4-g32",
    )  # fmt: skip
    head: str = option(
        "--head", default="exact", choices=HEADS, group=ENGINE,
        help="graph: the likeliest tokens by a search (FGD), where faster; exact",
    )  # fmt: skip
    kv_memory: str = option(
        "--kv-memory", default="1 GiB", read=some, metavar="SIZE", group=ENGINE, help="of keys, of a process; 1 GiB"
    )
    stream_weights: str | None = option(
        "--stream-weights", read=some, metavar="SIZE", group=ENGINE,
        help="layers' weights in memory; others are read from disk as they run",
    )  # fmt: skip
    max_model_len: int | None = option(
        "--max-model-len", read=count, metavar="N", group=ENGINE, help="longest prompt with its answer"
    )
    max_num_seqs: int | None = option(
        "--max-num-seqs", read=count, metavar="N", group=ENGINE, help="requests that run at the same time"
    )
    max_num_batched_tokens: int | None = option(
        "--max-num-batched-tokens", read=count, metavar="N", group=ENGINE, help="token budget of an iteration"
    )
    threads: int | None = option(
        "--threads", read=at_most(1024), metavar="N", group=ENGINE, help="of a process; default all cores, shared"
    )
    tensor_parallel_size: int | None = option(
        "--tensor-parallel-size", "-tp", read=at_most(64), metavar="N", group=ENGINE,
        help="processes that share every matrix; 1",
    )  # fmt: skip
    pipeline_parallel_size: int | None = option(
        "--pipeline-parallel-size", "-pp", read=at_most(64), metavar="N", group=ENGINE,
        help="stages of layers, each of other processes; 1",
    )  # fmt: skip
    expert_parallel_size: int | None = option(
        "--expert-parallel-size", "-ep", read=at_most(64), metavar="N", group=ENGINE,
        help="parts of a stage's processes with experts of their own; 1",
    )  # fmt: skip
    expert_copies: int | None = option(
        "--expert-copies", read=count, metavar="N", group=ENGINE,
        help="of a process, of experts that the next layer is foreseen to want",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ServerOptions(EngineOptions):
    """A folder, and where it is served."""

    about = """\
An OpenAI-compatible server of a folder of weights on this machine's CPUs, on
127.0.0.1. Requests are batched as `gnomon predict --serve --engine gnomon` has
them: one scheduler decides for both. --plan takes a file of
gnomon plan --serve.
Ends on SIGTERM, after the requests that run. Needs torch and gnomon[serve].

examples:
  gnomon serve path/to/hf_folder --port 8000
  gnomon serve path/to/hf_folder --dtype fp32 --kv-memory "2 GiB" --replicas 2
  gnomon serve path/to/hf_folder --tensor-parallel-size 2
  gnomon serve model.gguf --port 8000"""

    folder: str = positional(metavar="FOLDER", help="config.json and *.safetensors, or one GGUF file")
    plan: str | None = option("--plan", metavar="FILE", help="layout and limits of gnomon plan --serve")
    host: str = option(
        "--host", default="127.0.0.1", read=some, help="address; another than this machine's own wants a key"
    )
    port: int = option(
        "--port", default=8000, read=at_most(65535, least=0), metavar="N", help="8000; 0 takes a free one"
    )
    name: str | None = option("--name", read=some, help="that clients ask for; default the folder's")
    api_key: str | None = option(
        "--api-key", read=some, metavar="KEY", help="that requests must bear; default GNOMON_API_KEY"
    )
    lora: tuple[str, ...] = repeated(
        "--lora", metavar="NAME=FOLDER", read=some, help="an adapter in PEFT's layout that clients may ask for; again"
    )
    replicas: int | None = option(
        "--replicas", read=at_most(256), metavar="N", help="copies of the model, with a router before them; 1"
    )
    record_experts: str | None = option(
        "--record-experts", read=new_file, metavar="FILE",
        help="what routers choose, written at the end, for --router of predict and plan",
    )  # fmt: skip
    pad_to: tuple[int, ...] = option(
        "--pad-to", default=(), read=buckets, metavar="LIST",
        help="of an encoder: lengths that texts are padded to, 64,128,512; default each its own",
    )  # fmt: skip
    every_bucket: bool = switch("--every-bucket", help="each worker has all buckets, in place of one each (Arlo)")
    max_waiting: int = option(
        "--max-waiting", default=512, read=count, metavar="N", help="most requests that wait; others get 429"
    )
    max_body: str = option("--max-body", default="4 MiB", read=some, metavar="SIZE", help="of a request; 4 MiB")
    drain: str = option(
        "--drain", default="60 s", read=some, metavar="TIME", help="for running requests at the end; 60 s"
    )


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(Options):
    """Weights and a prompt."""

    about = """\
Generates text from a folder of weights, token by token, by the engine of gnomon
serve. Needs torch.

example:
  gnomon generate path/to/hf_folder --prompt "Once upon a time" --count 40"""

    folder: str = positional(metavar="FOLDER", help="config.json and safetensors, or one GGUF file")
    prompt: str = option("--prompt", required=True, read=some, metavar="TEXT", help="what comes before")
    tokenizer: str | None = option("--tokenizer", read=some, metavar="FILE", help="default the folder's own, or bytes")
    dtype: str = option("--dtype", default="fp32", choices=DTYPES, help="computed in; fp32")
    weights: str = option(
        "--weights", default="stored", read=some, metavar="FORM", help="as gnomon serve has it; stored"
    )
    stream_weights: str | None = option(
        "--stream-weights", read=some, metavar="SIZE", help="as gnomon serve has it; all layers in memory"
    )
    head: str = option("--head", default="exact", choices=HEADS, help="as gnomon serve has it; exact")
    temperature: float = option(
        "--temperature", default=0.0, read=not_negative, metavar="T", help="0, the default, takes the likeliest"
    )
    top_k: int = option("--top-k", default=0, read=count, metavar="K", help="draw among the K likeliest; all")
    top_p: float = option(
        "--top-p", default=1.0, read=number_from(0, 1), metavar="P", help="among the likeliest with this share; 1"
    )
    seed: int = option("--seed", default=0, read=at_most(2**32 - 1, least=0), metavar="N", help="of what is drawn; 0")
    json: bool = switch("--json", help="for programs")
    count: int = option("--count", "--max-tokens", default=32, read=count, metavar="N", help="new tokens at most; 32")


@dataclass(frozen=True, kw_only=True)
class BenchOptions(EngineOptions):
    """Whom to ask, and for what."""

    about = """\
Sends a trace's requests to a server at their times and says how long they took.
TARGET is the address of any server that speaks OpenAI's API, or a folder, which
is served meanwhile. Prompts are made up, as long as the trace says. -o writes
the arrival, first and last token of each request.

examples:
  gnomon bench-serve http://127.0.0.1:8000 --requests trace.csv -o measured.json
  gnomon bench-serve path/to/hf_folder --rate 2 --input-len 100 --output-len 50"""

    target: str = positional(metavar="TARGET", help="http://… or a folder of weights")
    requests: str | None = option("--requests", metavar="FILE", help="a trace: arrival_s,input_len,output_len")
    rate: float | None = option(
        "--rate", read=number_from(1e-6), metavar="R", help="requests a second; of a trace: it is stretched"
    )
    concurrency: int | None = option(
        "--concurrency", read=count, metavar="N", help="requests at the same time, in place of times"
    )
    num_requests: int | None = option("--num-requests", read=count, metavar="N", help="how many; 32 without a trace")
    input_len: int | None = option("--input-len", read=count, metavar="N", help="tokens of a prompt; 128")
    output_len: int | None = option("--output-len", read=count, metavar="N", help="tokens of an answer; 32")
    embeddings: bool = switch("--embeddings", help="ask an encoder for vectors, in place of words")
    model: str | None = option("--model", read=some, metavar="NAME", help="that is asked for; default the first it has")
    api_key: str | None = option("--api-key", read=some, metavar="KEY", help="default GNOMON_API_KEY")
    seed: int = option(
        "--seed", default=0, read=at_most(2**32 - 1, least=0), metavar="N", help="of prompts and times; 0"
    )
    output: str | None = option("-o", "--output", read=new_file, metavar="FILE", help="what was measured, as JSON")
    json: bool = switch("--json", help="for programs")
