"""Requests that a server should survive: `python benchmarks/serve/hostile.py [--requests 10000] [--no-file]`.

Malformed, oversized, cut off, slow, cancelled and good ones, 64 at a time, drawn by a seed, at a tiny model's server in
a process of its own. Afterwards the server must answer as before, hold no block, and have grown by less than 64 MiB.
Prints what came back, and writes benchmarks/results/serve_hostile.md; exits with 1 where something of it does not hold.
Leaves out killed workers (tests/serve/test_server.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from serve.served import serving, write_model  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "serve_hostile.md"
GREW = 64 << 20
PATHS = ("/v1/completions", "/v1/chat/completions")


def body(rng: random.Random) -> bytes:
    """The body of a request: a good one, or one of nine ways to be wrong."""
    good = {"prompt": "x" * rng.randint(1, 60), "max_tokens": rng.randint(1, 24), "temperature": rng.choice((0, 1))}
    match rng.randrange(10):
        case 0 | 1 | 2:
            return json.dumps(good).encode()
        case 3:
            return json.dumps({**good, "stream": True}).encode()
        case 4:
            return json.dumps(
                {**good, rng.choice(list(good)): rng.choice((None, [], {}, -1, 1e99, "x", True))}
            ).encode()
        case 5:
            return json.dumps(
                {"messages": rng.choice(([], [1], [{"role": "user"}], [{"role": "x", "content": 3}]))}
            ).encode()
        case 6:
            return rng.randbytes(rng.randint(0, 200))
        case 7:
            return b"[" * rng.choice((10, 100_000))
        case 8:
            return json.dumps({**good, "stop": ["\u0000"] * rng.randint(0, 20), "n": rng.randint(-1, 4)}).encode()
        case _:
            return json.dumps({**good, "prompt": [rng.randint(-5, 400) for _ in range(rng.randint(0, 300))]}).encode()


async def one(host: str, port: int, rng: random.Random) -> str:
    """What came back."""
    how, sent = rng.choice(("whole",) * 6 + ("cut", "gone", "slow", "long")), body(rng)
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return "no connection"
    try:
        length = len(sent) + (1 << 30) * (how == "long")
        lines = [
            f"POST {rng.choice(PATHS)} HTTP/1.1",
            f"Host: {host}",
            "Connection: close",
            f"Content-Length: {length}",
        ]
        writer.write(
            "\r\n".join([*lines, "", ""]).encode() + (sent[: len(sent) // 2] if how in ("cut", "long") else sent)
        )
        await writer.drain()
        if how in ("cut", "gone"):
            await asyncio.sleep(rng.random() * 0.05)
            return how
        if how == "slow":
            await asyncio.sleep(rng.random())
        if how == "long":
            await asyncio.sleep(0.2)
            return how
        answer = await asyncio.wait_for(reader.read(), 300)
        found = re.match(rb"HTTP/1.1 (\d+)", answer)
        return f"status {found[1].decode()}" if found else "no answer"
    except (OSError, TimeoutError) as error:
        return type(error).__name__
    finally:
        writer.close()


async def all_of(url: str, count: int, seed: int) -> Counter[str]:
    """So many of them."""
    where, places, rng = urlsplit(url), asyncio.Semaphore(64), random.Random(seed)
    assert where.hostname and where.port

    async def placed(own: random.Random) -> str:
        async with places:
            return await one(str(where.hostname), int(where.port or 0), own)

    return Counter(await asyncio.gather(*(placed(random.Random(rng.random())) for _ in range(count))))


def resident(pid: int) -> int:
    """Bytes of a process and its children."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += sum(resident(int(child)) for child in (task / "children").read_text().split())
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return total + (int(found[1]) << 10 if found else 0)


def main() -> int:
    """The counts, and the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-file", action="store_true", help="print only")
    options = parser.parse_args()
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        with serving(Path(folder), "--name", "tiny", "--max-num-seqs", "8") as server:
            client = server.client()
            asked = {"model": "tiny", "prompt": "hello", "max_tokens": 16, "temperature": 0}
            before = client.completions.create(**asked).choices[0].text
            asyncio.run(all_of(server.url, 300, options.seed + 1))  # until its memory is what it needs
            began = resident(server.process.pid)
            came = asyncio.run(all_of(server.url, options.requests, options.seed))
            time.sleep(2)
            if client.completions.create(**asked).choices[0].text != before:
                problems.append("the server answers otherwise than before")
            time.sleep(1)
            told = client._client.get(f"{server.url}/metrics").text
            if 'vllm:kv_cache_usage_perc{model_name="tiny"} 0.0' not in told:
                problems.append("blocks are held by nobody's requests")
            if 'gnomon:worker_deaths_total{model_name="tiny"} 0.0' not in told:
                problems.append("a worker died")
            grew = resident(server.process.pid) - began
            if grew > GREW:
                problems.append(f"it grew by {grew >> 20} MiB")
    if came["status 500"]:
        problems.append(f"{came['status 500']} requests were answered with 500")
    lines = [f"| {what} | {count} |" for what, count in sorted(came.items())]
    said = f"Memory grew by {grew / 2**20:.1f} MiB. " + ("; ".join(problems) or "Nothing of it failed.")
    print("\n".join([*lines, said]))
    if not options.no_file:
        head = [
            "# Hostile requests",
            "",
            f"`python benchmarks/serve/hostile.py --requests {options.requests}`, {datetime.now(UTC):%Y-%m-%d}: what "
            "came back.",
            "",
            "| what | requests |",
            "|---|---|",
        ]
        RESULTS.write_text("\n".join([*head, *lines, "", said]) + "\n", encoding="utf-8")
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
