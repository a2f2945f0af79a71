"""`gnomon bench-serve`: a server under a load, measured.

`run(options)` sends the requests, prints the same percentiles as a prediction, and returns 0; 1 if some failed. Leaves
out predictions (`predict_serve`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gnomon.cli.missing import need_torch
from gnomon.cli.options.server import BenchOptions
from gnomon.cli.serve import KEY
from gnomon.cli.terminal import print_json, print_lines
from gnomon.errors import InputError, RunError
from gnomon.formats.job import read_source
from gnomon.late import load_late
from gnomon.report.serving import measured_text
from gnomon.serving.measured import MeasuredLoad
from gnomon.serving.requests import Load, at_rate, closed, from_csv, poisson

REQUESTS, INPUT_LEN, OUTPUT_LEN = 32, 128, 32
"""Requests, and tokens of each, where neither a trace nor options say them."""
KNOWN = 0.02
"""Share of prompt tokens that a server may know from before without a word."""


def run(options: BenchOptions) -> int:
    """Sends the requests, prints the figures and writes the file. RunError where no request is answered."""
    need_torch("driving a server")
    load, key = load_of(options), options.api_key or os.environ.get(KEY, "")
    cache_hits = load_late("gnomon.serve.drive:cache_hits")
    with _server(options) as url:
        before = cache_hits(url, key)
        rows = load_late("gnomon.serve.drive:drive")(
            url, load, model=options.model, key=key, seed=options.seed, embeds=options.embeddings
        )
        after = cache_hits(url, key)
    failed = [row.error for row in rows if row.error]
    if len(failed) == len(rows):
        raise RunError(f"no request was answered: {_message(failed[0])[:300]}")
    hits = None if before is None or after is None else after - before
    measured = MeasuredLoad.of([row for row in rows if not row.error], concurrency=load.concurrency)
    if options.output is not None:
        Path(options.output).write_text(json.dumps(measured.to_mapping(), indent=1) + "\n", encoding="utf-8")
    if options.json:
        print_json({**measured.to_mapping(), "failed": len(failed), "prefix_cache_hits": hits})
    else:
        print_lines(measured_text(measured, options.target))
        if hits is not None:
            print_lines(_known_prompts(load, hits, options.seed))
        if failed:
            print_lines([f"{len(failed)} of {len(rows)} requests failed, the first: {failed[0][:200]}"])
    return 1 if failed else 0


def load_of(options: BenchOptions) -> Load:
    """The requests to send: a trace's, or alike ones. InputError for options that contradict each other.

    Requests come at the trace's times, at a rate (Poisson), or each when one of `concurrency` clients is free.
    """
    if options.concurrency is not None and options.rate is not None:
        raise InputError("--concurrency and --rate both say how requests come; use one of them")
    if options.requests is not None:
        if options.input_len is not None or options.output_len is not None:
            raise InputError("--requests says how long requests are; leave --input-len and --output-len out")
        text, _ = read_source(Path(options.requests))
        load = from_csv(text, source=options.requests, concurrency=options.concurrency)
        if options.num_requests is not None:
            load = replace(load, requests=load.requests[: options.num_requests])
        return load if options.rate is None else at_rate(load, options.rate)
    lengths: dict[str, Any] = {
        "input_len": options.input_len or INPUT_LEN,
        "output_len": options.output_len or OUTPUT_LEN,
    }
    count = options.num_requests or REQUESTS
    if options.rate is not None:
        return poisson(rate=options.rate, count=count, seed=options.seed, **lengths)
    return closed(concurrency=options.concurrency or 1, count=count, **lengths)


def _known_prompts(load: Load, hits: int, seed: int) -> list[str]:
    """A line where the server knew prompts from before: it computes less for them than a prediction says. hits: prompt
    tokens found in its prefix cache meanwhile, of which a trace with common beginnings (`prefix_len`) expects some."""
    known = hits - sum(request.prefix_len for request in load.requests)
    share = known / max(1, sum(request.input_len for request in load.requests))
    if share < KNOWN:
        return []
    return [
        f"{share:.0%} of the prompts' tokens were in the server's prefix cache from requests before this run: it was "
        f"sent the same ones; --seed {seed + 1} sends others"
    ]


def _message(answer: str) -> str:
    """The text of a server's error: the `error.message` of OpenAI's API, or the whole answer."""
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer


@contextlib.contextmanager
def _server(options: BenchOptions) -> Iterator[str]:
    """Yields the address of the target. A folder is served by a process of ours, which ends with the context.

    InputError for an address without http://, RunError where the folder's server does not come up.
    """
    if options.target.startswith(("http://", "https://")):
        yield options.target
        return
    if re.fullmatch(r"[\w.-]+:\d+(/.*)?", options.target) and not Path(options.target).exists():
        raise InputError(
            f"{options.target} is no folder; a server's address begins with http://: http://{options.target}"
        )
    arguments = {
        "--tokenizer": options.tokenizer,
        "--dtype": options.dtype,
        "--weights": options.weights,
        "--head": options.head,
        "--kv-memory": options.kv_memory,
        "--stream-weights": options.stream_weights,
        "--max-model-len": options.max_model_len,
        "--max-num-seqs": options.max_num_seqs,
        "--max-num-batched-tokens": options.max_num_batched_tokens,
        "--threads": options.threads,
        "--tensor-parallel-size": options.tensor_parallel_size,
        "--pipeline-parallel-size": options.pipeline_parallel_size,
        "--expert-parallel-size": options.expert_parallel_size,
        "--expert-copies": options.expert_copies,
    }
    command = [sys.executable, "-m", "gnomon", "serve", options.target, "--port", "0"]
    command += [word for name, value in arguments.items() if value is not None for word in (name, str(value))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines: list[str] = []
        try:
            for line in process.stderr:
                lines.append(line)
                if line.startswith("gnomon: serving ") and " on http" in line:
                    # What it says from here on is read and left: a full pipe would hold the server up.
                    threading.Thread(target=_drain, args=(process.stderr,), daemon=True).start()
                    yield line.partition(" on ")[2].split()[0]
                    return
            raise RunError(f"the folder is not served: {''.join(lines)[-300:].strip()}")
        finally:
            process.terminate()
            process.wait()


def _drain(pipe: Iterable[str]) -> None:
    """Reads lines until the pipe ends, or is closed meanwhile (ValueError)."""
    with contextlib.suppress(ValueError):
        for _ in pipe:
            pass
