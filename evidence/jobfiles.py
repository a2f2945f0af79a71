"""`python -m evidence.jobfiles FILES`: how many of other people's public job files Gnomon reads, by format and reason.

`jobfiles.tsv` lists repository, path, commit and format of each; FILES is a folder that holds them as
`REPOSITORY/COMMIT[:12]/PATH` (`git show COMMIT:PATH`), which is no part of this repository. Each is read by `gnomon
predict FILE`, on as many devices as it says or as its parallel sizes need; where the refusal names something to give,
once more with that one thing. A third of the files, by a hash of the path, is kept aside: readers are not written
against them. Leaves out whether what was read is right (`tests/formats`).
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from gnomon.cli import main as gnomon
from gnomon.cli.options.flags import parse_options
from gnomon.cli.options.predict import PredictOptions
from gnomon.cli.request import read_request
from gnomon.errors import GnomonError
from gnomon.report.tables import Column, table

INDEX = Path(__file__).with_name("jobfiles.tsv")

STAND_IN = {"vocab_size": "50304", "vocab-size": "50304", "seq_len": "4096", "seq-len": "4096"}
"""What is given where a refusal asks for it; 1 for names that are not here."""

MODELS = ("llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3")
"""Networks given, one after the other, where a file does not say its own: of one kind, and with experts."""

TRUE_REASONS = (
    r"whose sizes are not known here|network, .* is not known|does not name a network|does not say its network",
    r"which the script does not set|is missing: --set|missing key|to be filled in|\?\?\?",
    r"does not say (the|how many|which)|is not in a checkout|which is not here|restores a network",
    r"has no reader|is not described|is not read|only decoders .* are read|no text decoder",
    r"is not (divisible|a multiple)|nearest (legal|number)|refuses it|leaves a stage without|refused with",
    r"starts \d+ different trainings|trains a \w+ model|mcore_adapter|give --vocab-size|is not JSON|multiply to",
)
"""A refusal is for a true reason where its first message says one of these: what the file does not hold (a network, a
value, a size), what has no description here, or what its own program refuses. Every other counts as refused wrongly."""

OUTCOMES = ("as it stands", "with one", "refused", "mistake")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A public job file."""

    repository: str
    path: str
    commit: str
    format: str

    @property
    def aside(self) -> bool:
        """Whether it is kept aside."""
        digest = hashlib.sha256(f"{self.repository}/{self.path}".encode()).digest()
        return digest[0] % 3 == 0

    def below(self, files: Path) -> Path:
        """Where it lies."""
        return files / self.repository / self.commit[:12] / self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one file came out."""

    listed: Listed
    outcome: str
    """One of OUTCOMES."""
    given: tuple[str, ...]
    """Options beside the file."""
    message: str
    """Why it was refused, at first."""


def index() -> tuple[Listed, ...]:
    """The files that are listed."""
    with INDEX.open(newline="", encoding="utf-8") as file:
        return tuple(Listed(**row) for row in csv.DictReader(file, delimiter="\t"))


def tried(listed: Listed, files: Path, *, whole: bool) -> Outcome:
    """One file, read (whole: and predicted) as it stands, then with one thing given."""
    path = str(listed.below(files))
    given, message = on_its_devices(path, (), whole=whole)
    if message is None or message.startswith("mistake"):
        outcome = "mistake" if message else "as it stands"
        return Outcome(listed=listed, outcome=outcome, given=tuple(given), message=message or "")
    first = message
    for one in asked_for(message, listed.below(files)):
        given, message = on_its_devices(path, one, whole=whole)
        if message is None:
            return Outcome(listed=listed, outcome="with one", given=tuple(given), message=first)
    outcome = "mistake" if (message or "").startswith("mistake") else "refused"
    return Outcome(listed=listed, outcome=outcome, given=tuple(given), message=first)


def on_its_devices(path: str, one: Sequence[str], *, whole: bool) -> tuple[Sequence[str], str | None]:
    """(options, what was wrong or None): on 8 devices, or on the number that the file or the refusal names."""
    devices = 8
    for _ in range(4):
        given = (*one, "--on", on(devices))
        message, text = attempt(("predict", path, *given), whole=whole)
        wanted = text or nearest_devices(message, devices)
        if wanted is None or wanted == devices:
            return given, message
        devices = wanted
    return given, message


def on(devices: int) -> str:
    """So many devices, in nodes of eight."""
    nodes, rest = divmod(devices, 8)
    return (
        f"{nodes}x8xh100-sxm"
        if nodes and not rest
        else f"{devices}x1xh100-sxm"
        if rest and nodes
        else f"1x{devices}xh100-sxm"
    )


def nearest_devices(message: str | None, devices: int) -> int | None:
    """The number of devices that a refusal asks for, or that gives each data-parallel rank its part of the batch."""
    batch = re.search(r" = (\d+) is not a multiple of [\w ]+ x data-parallel ranks = (\d+) x (\d+)", message or "")
    if batch is not None:
        total, micro, ranks = map(int, batch.groups())
        return devices * (total // micro) // ranks or None
    match = re.search(r"nearest number of devices is (\d+)|takes (\d+) devices", message or "")
    return int(match[1] or match[2]) if match else None


def attempt(argv: Sequence[str], *, whole: bool) -> tuple[str | None, int | None]:
    """(what was wrong or None, devices that the file says if they are others)."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            asked = read_request(parse_options(PredictOptions, argv[1:]))
            other = next(
                (n for note in asked.assumed for n in re.findall(r"the file is for (\d+) devices", note)), None
            )
            if other is None and whole:
                status = gnomon([*argv, "--json"])
                return (None if status < 2 else err.getvalue().strip().removeprefix("gnomon: ")), None
        return None, None if other is None else int(other)
    except GnomonError as error:
        return str(error), None
    except SystemExit:
        return err.getvalue().strip(), None
    except Exception as error:
        return f"mistake: {type(error).__name__}: {error}", None


def asked_for(message: str, path: Path) -> Iterator[tuple[str, ...]]:
    """Options, one at a time, that a refusal says to give. The arguments of a script are those of its own usage."""
    if "--set args=" in message:
        yield from (("--set", f"args={words}") for words in usages(path))
    if "--model" in message:
        yield from (("--model", model) for model in MODELS)
    for option in ("vocab-size", "seq-len", "micro-batch-size"):
        if f"--{option}" in message:
            yield (f"--{option}", STAND_IN.get(option, "1"))
    named = message.replace("--set args=", "")
    for name, value in dict(re.findall(r"--set ([\w.-]+)=([\w.,-]*)", named)).items():
        yield ("--set", f"{name}={value.rstrip(',.') or STAND_IN.get(name.rpartition('.')[2], '1')}")


def usages(path: Path) -> Iterator[str]:
    """The arguments with which READMEs around a script, or its own comments, start it."""
    near = [path, *sorted(path.parent.glob("*.md")), *sorted(path.parent.parent.glob("*.md"))]
    call = re.compile(rf"(?:sh|bash|\./)\s*\S*{re.escape(path.name)}((?:\s*\\\s*\n|[^\n`;|])+)")
    seen = set()
    for candidate in near:
        for match in call.finditer(candidate.read_text(encoding="utf-8", errors="replace")):
            words = re.sub(r"\\\s*\n", " ", match[1]).replace("\\", " ").split()
            if len(words) > 2 and tuple(words) not in seen:
                seen.add(tuple(words))
                yield " ".join(shlex.quote(word) for word in words)


def reason(message: str) -> str:
    """A refusal without its names and numbers, to be counted."""
    short = re.sub(r"(/[\w.+-]+)+/?", "", message.split("\n")[0])
    short = re.sub(r"'[^']*'|\d+", "…", short)
    return short[:110]


def is_true(outcome: Outcome) -> bool:
    """Whether a file was refused, and for a true reason."""
    return outcome.outcome == "refused" and any(re.search(rule, outcome.message) for rule in TRUE_REASONS)


def outcomes(listed: Iterable[Listed], files: Path, *, whole: bool, workers: int) -> Iterator[Outcome]:
    """Of all, over processes."""
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        waiting = [pool.submit(tried, one, files, whole=whole) for one in listed]
        for entry in waiting:
            yield entry.result()


def report(result: Sequence[Outcome], reasons: int) -> Iterator[str]:
    """Tables of both parts, and the commonest reasons of the files that are not aside."""
    for title, part in (
        ("developed against", [o for o in result if not o.listed.aside]),
        ("kept aside", [o for o in result if o.listed.aside]),
    ):
        if not part:
            continue
        yield f"{title}: {len(part)} files"
        rows = []
        for name in (*sorted({o.listed.format for o in part}), "all"):
            mine = [o for o in part if name in (o.listed.format, "all")]
            counted = Counter(o.outcome for o in mine)
            true = sum(is_true(o) for o in mine)
            good = counted["as it stands"] + counted["with one"]
            numbers = (
                counted["as it stands"],
                counted["with one"],
                true,
                counted["refused"] - true,
                counted["mistake"],
            )
            rows.append((name, str(len(mine)), *map(str, numbers), f"{100 * good / len(mine):.0f} %"))
        heads = ("tried", "as it stands", "with one", "true reason", "wrongly", "mistake", "read")
        yield from table((Column(name="format", align="left"), *(Column(name=head) for head in heads)), rows)
        yield ""
    refused = Counter(
        (o.listed.format, "true" if is_true(o) else "wrong", reason(o.message))
        for o in result
        if o.outcome == "refused" and not o.listed.aside
    )
    for (name, how, why), times in refused.most_common(reasons):
        yield f"{times:4}  {name} ({how}): {why}"


def main() -> int:
    """Read all, print the tables, and with --rows write every file's outcome."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("files", type=Path, metavar="FILES", help="folder with the files")
    options.add_argument("--format", help="only of one format")
    options.add_argument("--whole", action="store_true", help="predict each, not only read it")
    options.add_argument("--rows", type=Path, metavar="OUT.tsv", help="write every file's outcome")
    options.add_argument("--reasons", type=int, default=30, metavar="N", help="reasons shown; 30")
    options.add_argument("--workers", type=int, default=2, metavar="N", help="processes; 2")
    asked = options.parse_args()
    listed = [one for one in index() if asked.format in (None, one.format)]
    missing = [one for one in listed if not one.below(asked.files).is_file()]
    if missing:
        print(
            f"{len(missing)} files are not below {asked.files}, first {missing[0].below(asked.files)}", file=sys.stderr
        )
    there = [one for one in listed if one not in set(missing)]
    collected = list(outcomes(there, asked.files, whole=asked.whole, workers=asked.workers))
    for line in report(collected, asked.reasons):
        print(line)
    if asked.rows:
        with asked.rows.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, delimiter="\t")
            writer.writerow(("part", "format", "outcome", "repository", "path", "given", "message"))
            for o in collected:
                part = "aside" if o.listed.aside else "open"
                place = (o.listed.repository, o.listed.path)
                writer.writerow((part, o.listed.format, o.outcome, *place, shlex.join(o.given), o.message))
    return 0


if __name__ == "__main__":
    sys.exit(main())
