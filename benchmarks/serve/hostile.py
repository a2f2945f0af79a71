"""Requests that a server should survive: `python benchmarks/serve/hostile.py [--requests 10000] [--no-file]`.

A tiny model's server of two workers, in processes of its own. First each shape of `tests/serve/hostile.py` once, and
requests behind and within one another on a connection, while a client beside it asks again and again for one token:
how long it waited at most. Then clients that hold connections and say nothing, streams that nobody reads, heads that
come letter by letter, and one that asks for thousands of answers while another asks for one at a time. Then, of a
server with few blocks, streams that are dropped at some token while others are preempted. Then more streams at once
than may wait, while one of the workers is killed (kill -9): each is told all of it, or that its process is gone, or 429
or 503 with Retry-After. Then so many drawn ones, 96 at a time. Afterwards the server must answer as before, hold no
block, have grown by less than 64 MiB, and have no more files open than before. Prints what came back, and writes
benchmarks/results/serve_hostile.md; exits with 1 where something of it does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from serve.hostile import COMPLETIONS, RAW, SEVERAL, SHAPES, all_of, bytes_of, exchanged, head, statuses  # noqa: E402
from serve.served import Server, serving, workers, write_model  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "serve_hostile.md"
GREW, WAITED_S, TIMES = 64 << 20, 2.0, 30.0
"""Bytes that it may grow by; seconds that one token may take beside any shape; the same, in times of a quiet server's,
beside one that asks for thousands of answers."""


class Beside:
    """A client that asks for one token again and again: the longest that one took."""

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        self.address = str(where.hostname), int(where.port or 0)
        self.longest_s, self.wrong, self.ends = 0.0, 0, False
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.thread.start()

    async def _run(self) -> None:
        body = b'{"prompt": "y", "max_tokens": 1}'
        while not self.ends:
            since = time.perf_counter()
            answer = await exchanged(*self.address, head(COMPLETIONS, len(body)) + body)
            self.longest_s = max(self.longest_s, time.perf_counter() - since)
            self.wrong += not answer.startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.02)

    def since(self) -> tuple[float, int]:
        """(longest seconds, answers that were not 200) since the last call."""
        time.sleep(0.1)
        made = self.longest_s, self.wrong
        self.longest_s, self.wrong = 0.0, 0
        return made


def shapes(server: Server, beside: Beside, problems: list[str]) -> list[str]:
    """Each once: a row of the table."""
    made = []
    every = [(name, head(path, len(bytes_of(body))) + bytes_of(body), wanted) for name, path, body, wanted in SHAPES]
    for name, sent, wanted in (*every, *RAW):
        began = time.perf_counter()
        answer = asyncio.run(exchanged(*beside.address, sent, 60))
        took, (waited, wrong) = time.perf_counter() - began, beside.since()
        found = re.match(rb"HTTP/1.1 (\d+)", answer)
        status = found[1].decode() if found else "closed"
        if status not in wanted.split() and status != "closed":
            problems.append(f"{name}: {status}, not {wanted}")
        if waited > WAITED_S or wrong:
            problems.append(f"{name}: another waited {waited:.1f} s for a token, {wrong} got none")
        made.append(f"| {name} | {status} | {took:.2f} | {waited:.2f} |")
    return made


def behind(beside: Beside, problems: list[str]) -> list[str]:
    """Several requests of one connection: a row of the table each."""
    made = []
    for name, sent, wanted in SEVERAL:
        began = time.perf_counter()
        found = statuses(asyncio.run(exchanged(*beside.address, sent, 60)))
        took, (waited, wrong) = time.perf_counter() - began, beside.since()
        if found != wanted:
            problems.append(f"{name}: {' '.join(found) or 'closed'}, not {' '.join(wanted)}")
        if waited > WAITED_S or wrong:
            problems.append(f"{name}: another waited {waited:.1f} s for a token, {wrong} got none")
        told = f"{len(found)} times {found[0]}" if len(set(found)) == 1 and len(found) > 2 else " ".join(found)
        made.append(f"| {name} | {told or 'closed'} | {took:.2f} | {waited:.2f} |")
    return made


DRIPPING_S = 45.0
"""In which a head that comes letter by letter is to be given up."""


def dripping(beside: Beside, problems: list[str]) -> str:
    """Heads that come letter by letter, and never end."""

    async def one() -> float:
        reader, writer = await asyncio.open_connection(*beside.address)
        began = time.perf_counter()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nX: ")
        closed = asyncio.ensure_future(reader.read())
        while not closed.done() and time.perf_counter() - began < DRIPPING_S:
            await asyncio.wait([closed], timeout=1.0)
            writer.write(b"a")
        closed.cancel()
        writer.close()
        return time.perf_counter() - began

    async def every() -> list[float]:
        return await asyncio.gather(*(one() for _ in range(100)))

    beside.since()
    longest = max(asyncio.run(every()))
    waited, wrong = beside.since()
    if longest >= DRIPPING_S or wrong or waited > WAITED_S:
        problems.append(
            f"beside heads that drip {wrong} got no answer, one waited {waited:.1f} s; open {longest:.0f} s"
        )
    return (
        f"100 heads that come a letter a second were closed after {longest:.0f} s; another waited {waited:.2f} s at "
        f"most."
    )


def metric(server: Server, name: str) -> float:
    """Reads a metric from /metrics: the sum over its labels."""
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


def dropped(folder: Path, seed: int, problems: list[str]) -> str:
    """Streams that are closed at a token drawn for each, with so few blocks that others are preempted meanwhile: a
    worker hears of the one between two iterations in which it does the other."""
    count, rng = 600, random.Random(seed)
    with serving(folder, "--name", "tiny", "--max-num-seqs", "8", "--kv-memory", FEW_BLOCKS, "--max-waiting", "700",
                 "--max-model-len", "128") as server:  # fmt: skip
        where = urlsplit(server.url)
        places = asyncio.Semaphore(24)

        async def one(at: int) -> int:
            body = json.dumps({"prompt": "x" * (5 + at % 60), "max_tokens": 60, "stream": True, "ignore_eos": True,
                               "n": 1 + at % 3}).encode()  # fmt: skip
            async with places:
                reader, writer = await asyncio.open_connection(where.hostname, where.port)
                writer.write(head(COMPLETIONS, len(body)) + body)
                seen = 0
                for _ in range(leaves[at]):
                    if not (line := await reader.readline()):
                        break
                    seen += line.startswith(b"data: {")
                writer.close()
                return seen

        leaves = [rng.choice((1, 12, 30, 60, 100, 400)) for _ in range(count)]

        async def every() -> list[int]:
            return await asyncio.gather(*map(one, range(count)))

        seen = asyncio.run(every())
        for _ in range(300):
            held = metric(server, "vllm:kv_cache_usage_perc") + metric(server, "vllm:num_requests_running")
            if not held:
                break
            time.sleep(0.1)
        preempted, died = metric(server, "vllm:num_preemptions_total"), metric(server, "gnomon:worker_deaths_total")
        if held or died or not preempted:
            problems.append(f"of dropped streams {held} blocks are held; {preempted:.0f} preempted, {died:.0f} died")
    return (
        f"{count} prompts of streams of up to three answers, each closed at a token drawn for it, beside "
        f"{preempted:.0f} preemptions: {sum(seen):,} tokens were read, and no block is held."
    )


FEW_BLOCKS = "64 KiB"
"""Of keys and values: three of the requests of `dropped`."""


UNREAD = 40
"""Streams that nobody reads: fewer than may wait (`--max-waiting 48`), or who asks meanwhile is told 429."""


def silent(server: Server, beside: Beside, problems: list[str]) -> str:
    """Connections that say nothing, and streams that nobody reads."""

    async def held() -> None:
        idle = [await asyncio.open_connection(*beside.address) for _ in range(200)]
        body = json.dumps({"prompt": "x", "max_tokens": 200, "stream": True}).encode()
        for _ in range(UNREAD):
            _, writer = await asyncio.open_connection(*beside.address)
            writer.write(head(COMPLETIONS, len(body)) + body)
            idle.append((_, writer))
        await asyncio.sleep(10)
        for _, writer in idle:
            writer.close()

    beside.since()
    asyncio.run(held())
    waited, wrong = beside.since()
    if wrong:
        problems.append(f"beside 200 silent connections and {UNREAD} unread streams {wrong} got no answer")
    others = f"200 connections that say nothing and {UNREAD} streams that nobody reads"
    return f"{others}: another waited {waited:.2f} s at most."


def fair(server: Server, beside: Beside, problems: list[str]) -> str:
    """One that asks for thousands of answers, while another asks for one at a time."""
    time.sleep(1)
    beside.since()
    time.sleep(2)
    quiet, _ = beside.since()
    body = json.dumps({"prompt": ["x" * 40] * 16, "n": 128, "max_tokens": 8}).encode()

    async def greedy() -> None:
        await asyncio.gather(*(exchanged(*beside.address, head(COMPLETIONS, len(body)) + body) for _ in range(2)))

    began = time.perf_counter()
    asyncio.run(greedy())
    took, (waited, wrong) = time.perf_counter() - began, beside.since()
    if wrong or waited > max(TIMES * quiet, 0.1 * took):
        problems.append(f"beside one with 4,096 answers another waited {waited:.2f} s for a token, {wrong} got none")
    return (
        f"4,096 answers that one client asks for took {took:.0f} s; another waited {waited:.2f} s for a token at most "
        f"(alone {quiet:.2f})."
    )


def resident(pid: int) -> int:
    """Bytes of a process and its children."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return sum(map(resident, children(pid))) + (int(found[1]) << 10 if found else 0)


def files(pid: int) -> int:
    """That a process and its children have open."""
    return len(os.listdir(f"/proc/{pid}/fd")) + sum(map(files, children(pid)))


def children(pid: int) -> list[int]:
    """Process ids of the children of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def overload(server: Server, address: tuple[str, int], problems: list[str]) -> str:
    """Streams of which some are refused, and some lose their worker."""
    body = json.dumps({"prompt": "x" * 100, "max_tokens": 120, "stream": True}).encode()
    killer = threading.Timer(1.0, os.kill, (workers(server.process.pid)[0], signal.SIGKILL))
    seconds: list[float] = []

    async def one() -> str:
        began = time.perf_counter()
        answer = await exchanged(*address, head(COMPLETIONS, len(body)) + body, 300)
        if b"429" in answer[:16] or b"503" in answer[:16]:
            again = b"retry-after" in answer.lower()
            return answer[9:12].decode() + ("" if again else " without Retry-After")
        if b"the process that was answering is gone" in answer:
            return "told that its worker is gone"
        seconds.append(time.perf_counter() - began)
        return "answered" if b"data: [DONE]" in answer else "cut off"

    async def every() -> Counter[str]:
        return Counter(await asyncio.gather(*(one() for _ in range(160))))

    killer.start()
    came = asyncio.run(every())
    killer.join()
    told = ", ".join(f"{count} {what}" for what, count in sorted(came.items()))
    if (
        set(came) - {"429", "503", "told that its worker is gone", "answered"}
        or not came["429"]
        or not came["answered"]
    ):
        problems.append(f"of 160 streams at once: {told}")
    seconds.sort()
    middle = seconds[len(seconds) // 2]
    return (
        f"160 streams of 120 tokens at once, at most 48 waiting, one of two workers killed after a second: {told}. "
        f"Those answered took {middle:.1f} s at the median, {seconds[-1]:.1f} s at most."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The counts, and the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-file", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        limits = ("--name", "tiny", "--max-num-seqs", "8", "--replicas", "2", "--max-waiting", "48")
        with serving(Path(folder), *limits) as server:
            client = server.client()
            asked = {"model": "tiny", "prompt": "hello", "max_tokens": 16, "temperature": 0}
            before = client.completions.create(**asked).choices[0].text
            beside = Beside(server.url)
            table = [*shapes(server, beside, problems), *behind(beside, problems)]
            told = [silent(server, beside, problems), dripping(beside, problems), fair(server, beside, problems)]
            told.append(dropped(Path(folder), options.seed, problems))
            killed = 1
            beside.ends = True
            beside.thread.join()
            told.append(overload(server, beside.address, problems))
            for _ in range(300):
                if len(workers(server.process.pid)) == 2:
                    break
                time.sleep(0.1)
            time.sleep(10)  # it reads its model
            asyncio.run(all_of(server.url, 300, options.seed + 2))  # until its memory is what it needs
            time.sleep(2)
            began, opened = resident(server.process.pid), files(server.process.pid)
            came = asyncio.run(all_of(server.url, options.requests, options.seed, at_once=96))
            time.sleep(35)  # what was left open is closed
            again = client.completions.create(**asked).choices[0].text
            if again != before:
                problems.append("the server answers otherwise than before")
            time.sleep(1)
            metrics = client._client.get(f"{server.url}/metrics").text
            if 'vllm:kv_cache_usage_perc{model_name="tiny"} 0.0' not in metrics:
                problems.append("blocks are held by nobody's requests")
            if f'gnomon:worker_deaths_total{{model_name="tiny"}} {killed}.0' not in metrics:
                problems.append("a worker died that was not killed")
            if len(workers(server.process.pid)) != 2:
                problems.append("a worker did not come back")
            grew, left = resident(server.process.pid) - began, files(server.process.pid) - opened
            if grew > GREW:
                problems.append(f"it grew by {grew >> 20} MiB")
            if left > 8:
                problems.append(f"it has {left} more files open than before")
    problems += [f"{count} times {what}" for what, count in came.items() if "500" in what or "without" in what]
    lines = [f"| {what} | {count} |" for what, count in sorted(came.items())]
    said = f"Memory grew by {grew / 2**20:.1f} MiB, open files by {left}. " + (
        "; ".join(problems) or "Nothing of it failed."
    )
    print("\n".join([*table, *told, *lines, said]))
    if not options.no_file:
        text = [
            "# Hostile requests",
            "",
            f"`python benchmarks/serve/hostile.py --requests {options.requests}`, {datetime.now(UTC):%Y-%m-%d}, a "
            f"2-core machine with others' work beside it, two workers of a tiny model.",
            "",
            "## Each shape once",
            "| what | came back | seconds | another waited for a token at most, s |",
            "|---|---|---|---|",
            *table,
            "",
            *(line for one in told for line in (one, "")),
            f"## {options.requests:,} drawn ones, 96 at a time",
            "| what | requests |",
            "|---|---|",
            *lines,
            "",
            said,
        ]
        RESULTS.write_text("\n".join(text) + "\n", encoding="utf-8")
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
