"""Mutated files and flags: every command must give its answer or one clear error, soon and in little memory.

    python benchmarks/mutations.py                    # 5,000 mutations, 10 CPU-minutes; -o writes the page
    python benchmarks/mutations.py --count 36         # each file once, as CI does
    python benchmarks/mutations.py --flags            # the same of what is written on command lines
    python benchmarks/mutations.py --only 1234        # one of them again: prints its file, its command and its answer

Each seed file is valid to begin with: its commands must accept it first. A mutation is one to three small changes
(bytes flipped or cut, lines lost, doubled or swapped, numbers that are too large, negative or none, words in each
other's place, deep nesting), drawn from the number of the mutation alone. Each runs in a process of its own, forked
from one in which all modules are loaded. What counts as found: an exit status other than 0, 1 and 2; a traceback; more
than 2 GiB; more than 20 s of processor time. `gnomon run` is asked for GPUs that this machine lacks, so that it reads
and trains nothing. Perfetto traces are only written by Gnomon: what it reads of steps are Timelines.

With `--flags` files stay as they are and words change: options of the command that are not there are added with values
of every kind, those that are there are dropped, doubled, cut, given another's value or none.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from pkgutil import iter_modules
from platform import python_version

from gnomon import cli, formats, schema
from gnomon.cli import main
from gnomon.cli.options import COMMANDS, Actions
from gnomon.cli.options.flags import flags
from gnomon.errors import GnomonError
from gnomon.hardware import Axis, Measured, Table, measured_cluster, parse_cluster
from gnomon.lowering import one_f_one_b, with_messages, with_optimizer
from gnomon.plans import Mesh, Plan, PlanFile, Saved, SavedRule, Schedule, Workload
from gnomon.program import parse_program, print_program, validate

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from fleet.test_traces import PLAIN, SACCT  # noqa: E402  (small traces, which the tests read)
from formats.test_trainers import CASES  # noqa: E402  (a file of each trainer)

FIXTURES = ROOT / "tests/formats"
TOLD_S = 30.0
"""Seconds between lines of progress."""
CPU_S, MEMORY_BYTES, WALL_S = 20, 2 * 2**30, 1800
# The wall counts for what sleeps; on cores that others have, the processor's time says what is slow.
FINE = (0, 1, 2)
H100 = "1x8xh100-sxm"
PLANNED = ("gpt2", "llama-3.2-1b", "qwen3-8b")
"""Configs that are planned for too: searches of larger ones take their seconds whatever the file says."""
LARGE = {
    "deepseek-v3": "64x8xh100-sxm --ep 8 --recompute full",
    "llama-3.1-405b": "64x8xh100-sxm --recompute full",
    "mixtral-8x7b-v0.1": "16x8xh100-sxm",
}
"""Configs of models that one node does not hold, and what does: advice on a plan that does not fit takes seconds."""
QUICK = "--tp 1 --cp 1 --pp 1 --recompute none --no-refine --equal-stages --budget 10s"
"""Of a search: what leaves few plans."""
PROGRAM = "program"
"""In place of a command: the text form of a Program, which no command reads from a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """A valid file, and the commands that read it."""

    name: str
    """Of the file."""
    text: str
    commands: tuple[str, ...]
    """`{}` is the file, `{whole}` the same file as it was."""


def plan_seeds() -> Iterator[Seed]:
    """Plans, and plan files with what they are for."""
    saved = Saved(preset="selective", rules=(SavedRule(calls="layers[0:2]", tensors=("*",), action="recompute"),))
    full = Plan(
        mesh=Mesh(pp=2, dp_shard=2, tp=2),
        schedule=Schedule(name="interleaved_one_f_one_b", virtual_stages=2, micro_batch_size=1),
        saved=saved,
    )
    yield Seed(name="plan.toml", text=schema.dump(full), commands=(f"predict llama-tiny --on {H100} --plan {{}}",))
    plain = Plan(mesh=Mesh(dp_shard=4, tp=2), schedule=Schedule(micro_batch_size=1))
    work = Workload(global_batch_size=16, seq_len=128)
    for name, plan in (("full.toml", full), ("plain.toml", plain)):
        text = schema.dump(PlanFile(model="llama-tiny", on=H100, stack="megatron-lm", workload=work, plan=plan))
        exports = (f"export {{}} --to {to}" for to in ("megatron", "torchtitan", "deepspeed", "accelerate", "nanotron"))
        fleet = ("fleet forecast {} --devices 8..16", "fleet submit {} --via slurm --dry-run")
        more = ("predict --plan {}", "explain {}", "run {} --device cuda --checkpoints saved", *fleet, *exports)
        yield Seed(name=name, text=text, commands=more if plan is plain else more[:3])


def _tables() -> Iterator[Table]:
    """What a calibration measures, at two sizes each."""
    rows, elements = (("rows", (64, 1024)), ("width", (256,))), (("elements", (1000, 10**6)),)
    square = (("heads", (8,)), ("seq", (64, 1024)), ("head_dim", (32,)))
    of_bytes = (("ranks", (2,)), ("bytes", (8, 10**6)))
    for role in ("forward", "input_grad", "weight_grad"):
        yield _table("matmul", role, ("m", (64, 1024)), ("n", (64,)), ("k", (64,)))
    for way in ("forward", "backward"):
        yield _table("attention", way, *square)
        for what in ("norm", "rotary", "embedding", "cross_entropy"):
            yield _table(what, way, *rows)
        for what in ("activation", "mul", "add"):
            yield _table(what, way, *elements)
    for what in ("adamw", "squares", "accumulate", "fill"):
        yield _table(what, "", *elements)
    for what in ("all_reduce", "all_gather", "reduce_scatter"):
        yield _table(what, "", *of_bytes, dtype="")
    yield _table("send_recv", "", of_bytes[1], dtype="")


def _table(what: str, direction: str, *axes: tuple[str, tuple[int, ...]], dtype: str = "fp32") -> Table:
    """Seconds over the one axis that has two sizes."""
    return Table(
        what=what,
        dtype=dtype,
        direction=direction,
        axes=tuple(Axis(name=name, sizes=sizes) for name, sizes in axes),
        seconds=(1e-5, 1e-3),
        alone_s=(),
        spread=(0.1, 0.1),
    )


def machine_seeds() -> Iterator[Seed]:
    """Clusters, also a measured one, and stacks."""
    measured = Measured(
        host="here",
        date="2026-11-21T07:00:00Z",
        software="torch 2.13.0, gloo",
        processes=2,
        threads=1,
        tables=tuple(_tables()),
    )
    asked = "--global-batch 8 --seq-len 64"
    for name, cluster in (
        ("nodes.toml", parse_cluster("2x4xa100-sxm-80gb")),
        ("mixed.toml", parse_cluster("1x4xh100-sxm+1x4xa100-sxm-80gb")),
        ("local.toml", measured_cluster(measured, 16 * 2**30)),
    ):
        how = " --precision fp32" if name == "local.toml" else ""
        plan = f"plan llama-tiny --on {{}} {asked}{how} {QUICK}"
        yield Seed(name=name, text=schema.dump(cluster), commands=(f"predict llama-tiny --on {{}} {asked}{how}", plan))
    for name in ("megatron-lm", "gnomon"):
        text = files("gnomon.software").joinpath("stacks", f"{name}.toml").read_text(encoding="utf-8")
        yield Seed(name=f"{name}.toml", text=text, commands=(f"predict llama-tiny --on {H100} --stack ./{{}} {asked}",))


def model_seeds() -> Iterator[Seed]:
    """Configs of Hugging Face and counts of a router."""
    for path in sorted((FIXTURES / "configs").glob("*.json")):
        if "t5" in path.stem:
            continue
        on = LARGE.get(path.stem, H100)
        commands = [f"predict {{}} --on {on} --zero 3 --micro-batch-size 1"] * 3
        if path.stem in PLANNED:
            commands.append(f"plan {{}} --on {H100} --global-batch 8 --seq-len 128 {QUICK}")
        yield Seed(name=path.name, text=path.read_text(encoding="utf-8"), commands=tuple(commands))
    counts = ", ".join(str(100 + 7 * i) for i in range(128))
    yield Seed(
        name="router.json",
        text=f"[{counts}]",
        commands=(f"predict qwen3-30b-a3b --on {H100} --ep 8 --seq-len 512 --router {{}}",),
    )


def job_seeds() -> Iterator[Seed]:
    """Jobs of other programs."""
    devices = {
        "llama3_8b.sh": "2x8xh100-sxm", "gpt3_175b.sh": "128x8xa100-sxm-80gb", "llama3_405b.toml": "64x8xh100-sxm",
    }  # fmt: skip
    for path in sorted((FIXTURES / "fixtures").glob("*/*.*")):
        program = path.parent.name
        on = f"{devices[path.name]}" if path.name in devices else H100
        model = {"megatron-bridge": "llama-3.1-70b ", "deepspeed": "llama-3.2-1b ", "accelerate": "llama-3.2-1b "}
        more = " --micro-batch-size 1" if program in ("deepspeed", "accelerate") else ""
        more += " --precision bf16" if program == "deepspeed" else ""
        on = "8x8xh100-sxm" if program == "megatron-bridge" else on
        command = f"predict {model.get(program, '')}--on {on} --from {program} {{}}{more}"
        yield Seed(name=path.name, text=path.read_text(encoding="utf-8"), commands=(command,))
    for program, case in CASES.items():
        command = f"predict --on 1x{case.devices}xh200-sxm --from {program} {{}}"
        yield Seed(name=f"{program}{Path(case.name).suffix}", text=case.text, commands=(command,))


def fleet_seeds() -> Iterator[Seed]:
    """Traces of jobs."""
    for name, text in (("jobs.csv", PLAIN), ("sacct.txt", SACCT.replace(":a100=", ":a100-sxm-80gb="))):
        on = "2x8xa100-sxm-80gb+1x8xh100-sxm"
        replay = f"fleet replay {{}} --on {on} --policy sjf --compare fifo"
        yield Seed(name=name, text=text, commands=(replay, f"{replay} --skip-bad"))


def measured_seeds(folder: Path) -> Iterator[Seed]:
    """Tables of runs, Timelines and Programs. folder: where a timeline can be made."""
    table = (
        "id,model,on,seq_len,global_batch,micro_batch_size,tp,zero,recompute,stack,step_s,peak_gib\n"
        "a,gpt2,1x8xa100-sxm-80gb,1024,64,8,1,1,none,megatron-lm,0.25,20\n"
        "b,gpt2,1x8xa100-sxm-80gb,1k,64,8,2,1,none,megatron-lm,0.25,\n"
        "c,gpt2,1x8xa100-sxm-80gb,1024,64,1,1,3,full,megatron-lm,0.5,\n"
    )
    yield Seed(name="runs.csv", text=table, commands=("validate {}", "calibrate --from {} -o fitted.toml"))
    step = folder / "step.timeline"
    words = f"predict llama-tiny --on {H100} --pp 4 --global-batch 16 --seq-len 64 --timeline {step}"
    assert main(words.split()) == 0
    text = step.read_text(encoding="utf-8")
    step.unlink()
    yield Seed(name="step.timeline", text=text, commands=("compare {} {whole}", "report {} -o page.html"))
    program = with_messages(with_optimizer(one_f_one_b(4, 6))).program()
    yield Seed(name="program.txt", text=print_program(program), commands=(PROGRAM,))


def seeds(folder: Path) -> list[Seed]:
    """All of them."""
    return [*plan_seeds(), *machine_seeds(), *model_seeds(), *job_seeds(), *fleet_seeds(), *measured_seeds(folder)]


def flag_seeds() -> Iterator[Seed]:
    """Commands whose words change and that need no file, or one that others have."""
    served = "--serve --input-len 128 --output-len 16 --num-requests 8"
    asked = "--global-batch 8 --seq-len 64"
    yield Seed(
        name="none.txt",
        text="",
        commands=(
            "catalogue devices",
            "catalogue stacks megatron-lm --json",
            f"predict gpt2 --on {H100} --zero 1 --tp 2",
            f"predict llama-3.1-8b --on {H100} {served}",
            f"plan llama-tiny --on {H100} {asked} {QUICK}",
            f"plan llama-tiny --on {H100} {asked} --vary seq_len=64,128 {QUICK}",
            f"fit llama-tiny --on {H100} {asked} --budget 5s",
            "checkpoint verify saved",
            "checkpoint convert saved --plan p.toml -o there --dry-run",
            "scale saved",
            "fleet policies",
            "data nothing --seq-len 64",
            "generate nothing --prompt x",
            "report step.timeline",
        ),
    )
    plain = PlanFile(
        model="llama-tiny",
        on=H100,
        stack="gnomon",
        workload=Workload(global_batch_size=16, seq_len=128),
        plan=Plan(mesh=Mesh(dp_shard=4, tp=2), schedule=Schedule(micro_batch_size=1)),
    )
    yield Seed(
        name="asked.toml",
        text=schema.dump(plain),
        commands=(
            "explain {}",
            "launch {} --via slurm --dry-run",
            "launch {} --via ray --dry-run --name a",
            "fleet submit {} --via kueue --dry-run",
            "fleet spot {} --mtbf 10 --hours 1 --lists 1",
            "fleet forecast {} --devices 8..16 --price 2",
            "export {} --to megatron --strict",
            "run {} --device cuda --steps 2 --processes 2",
        ),
    )


NUMBERS = (
    "0", "-1", "1", "2", "3", "7", "1.5", "-0.0", "1e9", "1e-9", "1e308", "1e400", "nan", "inf", "true", "null", '""',
    "100000000", "4000000", "2147483648", "9223372036854775807", "9223372036854775808", "1" + "0" * 400, "0x10",
    "1_000", "[]", "{}", "1 GiB", '"8"',
)  # fmt: skip
MARKS = (
    "\0", "\ufeff", "\u00e9", "\U0001f600", "\\", '"', "'", "#", "$(x)", "${X}", "{", "}", "[", "]", "\t", "\r\n", "&&",
    ":", "=",
)  # fmt: skip


def _places(text: str, *, numbers: bool) -> list[tuple[int, int]]:
    """Start and end of all numbers, or of all words."""
    hit = re.finditer(r"\d[\d._e]*" if numbers else r"[\w-]+", text)
    return [match.span() for match in hit]


def change(text: str, draw: random.Random) -> str:
    """The text with one change."""
    if not text:
        return draw.choice(MARKS)
    at = draw.randrange(len(text))
    lines = text.split("\n")
    i, j = draw.randrange(len(lines)), draw.randrange(len(lines))
    kind = draw.choices(range(12), weights=(16, 8, 4, 3, 3, 2, 1, 1, 1, 1, 1, 1))[0]
    if kind == 0 and (result := _places(text, numbers=True)):
        start, end = draw.choice(result)
        return text[:start] + draw.choice(NUMBERS) + text[end:]
    if kind == 1 and (result := _places(text, numbers=False)):
        (start, end), (a, b) = draw.choice(result), draw.choice(result)
        return text[:start] + text[a:b] + text[end:]
    if kind == 2:  # a line is lost
        return "\n".join(lines[:i] + lines[i + 1 :])
    if kind == 3:  # a line comes twice
        return "\n".join([*lines[: i + 1], *lines[i:]])
    if kind == 4:  # lines in each other's place
        lines[i], lines[j] = lines[j], lines[i]
        return "\n".join(lines)
    if kind == 5:  # letters are lost
        return text[:at] + text[at + draw.randrange(1, 8) :]
    if kind == 6:  # a letter of another kind
        return text[:at] + draw.choice(MARKS) + text[at:]
    if kind == 7:  # the end is lost
        return text[:at]
    if kind == 8:  # a part comes twice
        return text[:at] + text[at : at + 40] + text[at:]
    if kind == 9:
        return text[:at] + chr(ord(text[at]) ^ (1 << draw.randrange(7))) + text[at + 1 :]
    if kind == 10:  # a part comes a thousand times
        return text[:at] + text[at : at + 8] * 1000 + text[at + 8 :]
    return text[:at] + draw.choice("[{(") * 5000 + text[at:]


VALUES = (
    *NUMBERS, "", " ", "-", "--", "x", "8", "64", "4096", "8k", "1M", "0.5", "-3", "2x", "10GiB", "10 parsecs", "GiB",
    "7d", "-1s", "bf16", "fp8", "full", "none", "nodes=1..4", "seq_len=1k,2k", "tp>2", "pp<", "tp=2", "a=1", "a=", "=1",
    "bucket_bytes=25MiB", "1,2,3", "9,8,8,7", "zipf:1", "zipf:", "h100", "1x8xh100-sxm", "0x8xh100-sxm", "8xh100-sxm+",
    "local",
    "gpt2", "llama-tiny", "nope", "/", "/dev/null", "/nope/x", "ring", "one_f_one_b", "gpipe", "megatron-lm", "vllm",
    "mario", "all", "step", "cost", "layers", "\u00e9", "x" * 500, "[1]", "%s", "*", "$(x)",
)  # fmt: skip
"""Of options: those of every kind, and of none."""

WRITTEN = frozenset(("output", "html", "trace", "timeline", "try_", "try_dir", "checkpoints", "folder"))
"""Fields that write files, or run plans: left out."""


def options_of(command: str) -> list[tuple[str, bool]]:
    """(option, whether it takes a value) of a command, but for those that write."""
    words = command.split()
    entry = COMMANDS[words[0]]
    action = entry.actions[words[1]] if isinstance(entry, Actions) else entry
    of = import_module(f"gnomon.cli.options.{action.options.partition(':')[0]}")
    known = flags(getattr(of, action.options.partition(":")[2]))
    return [(flag.names[-1], not flag.is_switch) for name, flag in known.items() if flag.names and name not in WRITTEN]


def reworded(words: list[str], draw: random.Random) -> list[str]:
    """A command's words with one change; the command itself, the first word or two, stays."""
    first = 2 if words[0] in ("fleet", "checkpoint") else 1
    known = options_of(" ".join(words))
    at = draw.randrange(first, len(words)) if len(words) > first else first
    kind = draw.choices(range(7), weights=(10, 3, 3, 2, 2, 1, 1))[0]
    if kind == 0 and known:  # an option more
        name, takes = draw.choice(known)
        return [*words, name, *([draw.choice(VALUES)] if takes else [])]
    if kind == 1:  # a word becomes another
        return [*words[:at], draw.choice(VALUES), *words[at + 1 :]]
    if kind == 2:  # a word is lost
        return words[:at] + words[at + 1 :]
    if kind == 3:  # a word comes twice
        return [*words[:at], *words[at : at + 1], *words[at:]]
    if kind == 4:  # words in each other's place
        other = draw.randrange(first, len(words)) if len(words) > first else at
        changed = list(words)
        if changed[at:] and changed[other:]:
            changed[at], changed[other] = changed[other], changed[at]
        return changed
    if kind == 5:  # letters change
        return [*words[:at], change(words[at], draw)[:2000], *words[at + 1 :]] if words[at:] else words
    name, takes = draw.choice(known)  # an option with `=`, or without its value
    return [*words, f"{name}={draw.choice(VALUES)}" if takes and draw.random() < 0.5 else name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A changed file and a command, or a changed command and a file as it is."""

    number: int
    seed: Seed
    command: str
    text: str
    words: tuple[str, ...] = ()
    """Of the changed command; empty where the file is what changed."""

    @staticmethod
    def of(number: int, known: list[Seed], *, of_flags: bool = False) -> Mutation:
        """The mutation of that number."""
        draw = random.Random(number)
        seed = known[number % len(known)]
        if of_flags:
            command = draw.choice(
                [command for command in seed.commands if command != PROGRAM] or [f"predict gpt2 --on {H100}"]
            )
            words = command.split()
            for _ in range(draw.choice((1, 1, 1, 2, 3))):
                words = reworded(words, draw)
            return Mutation(number=number, seed=seed, command=command, text=seed.text, words=tuple(words))
        text = seed.text
        for _ in range(draw.choice((1, 1, 1, 1, 2, 3))):
            text = change(text, draw)
        return Mutation(number=number, seed=seed, command=draw.choice(seed.commands), text=text)


def named(words: Iterable[str], name: str) -> list[str]:
    """A command's words with the names of its files."""
    return [word.replace("{}", name).replace("{whole}", f"whole-{name}") for word in words]


def answer(command: str, folder: Path, name: str, words: Sequence[str] = ()) -> int:
    """The exit status of a command on a file in a folder, which holds the same file as it was too."""
    os.chdir(folder)
    if words or command != PROGRAM:
        return main(named(words or command.split(), name))
    try:
        validate(parse_program(Path(name).read_text(encoding="utf-8", errors="replace"), name))
    except GnomonError as error:
        print(f"gnomon: {error}", file=sys.stderr)
        return 2
    return 0


def begin(folder: Path, mutation: Mutation) -> int:
    """A process that answers; its id."""
    seed, text = mutation.seed, mutation.text
    (folder / seed.name).write_bytes(text.encode("utf-8", "surrogatepass"))
    (folder / f"whole-{seed.name}").write_text(seed.text, encoding="utf-8")
    pid = os.fork()
    if pid:
        return pid
    status = 99
    try:
        with open(os.devnull, "w") as out, open(folder / "stderr", "w") as err:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES, held + MEMORY_BYTES))
        signal.alarm(WALL_S)
        status = answer(mutation.command, folder, seed.name, mutation.words)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def wrong(state: int, used: resource.struct_rusage, message: str) -> str:
    """What is wrong with an answer; empty if nothing is."""
    if os.WIFSIGNALED(state):
        ended = signal.Signals(os.WTERMSIG(state)).name
        return f"over {CPU_S} s of processor time" if ended == "SIGXCPU" else f"ended by {ended}"
    if (status := os.WEXITSTATUS(state)) not in FINE:
        return f"exit {status}"
    if "Traceback" in message:
        return "traceback"
    if status == 2 and "gnomon" not in message:
        return "exit 2 without a word"
    if used.ru_maxrss * 1024 > MEMORY_BYTES:
        return f"{used.ru_maxrss / 2**20:.1f} GiB"
    return f"{used.ru_utime:.0f} s" if used.ru_utime + used.ru_stime > CPU_S else ""


@dataclass(slots=True)
class Tally:
    """What came out."""

    statuses: Counter[int] = field(default_factory=Counter)
    commands: Counter[str] = field(default_factory=Counter)
    """Mutations of each command."""
    seconds: float = 0.0
    """Of processor time, all of them."""
    slowest: tuple[float, int] = (0.0, -1)
    largest: tuple[int, int] = (0, -1)
    failures: list[str] = field(default_factory=list)
    """What is wrong, a line each."""

    @property
    def count(self) -> int:
        """Answers so far."""
        return self.commands.total()

    def add(self, mutation: Mutation, state: int, used: resource.struct_rusage, message: str) -> None:
        """One answer; what is wrong with it is printed."""
        if not os.WIFSIGNALED(state):
            self.statuses[os.WEXITSTATUS(state)] += 1
        self.commands[mutation.command.partition(" ")[0]] += 1
        self.seconds += used.ru_utime + used.ru_stime
        self.slowest = max(self.slowest, (used.ru_utime + used.ru_stime, mutation.number))
        self.largest = max(self.largest, (used.ru_maxrss, mutation.number))
        if problem := wrong(state, used, message):
            line = (message.strip().splitlines() or [""])[-1][:200]
            self.failures.append(f"{mutation.number} {mutation.seed.name}: {problem}: {shown(mutation)}: {line}")
            print(self.failures[-1], flush=True)


def shown(mutation: Mutation) -> str:
    """The mutated command line as a shell reads it, each word cut at 60 letters."""
    return mutation.command if not mutation.words else " ".join(shlex.quote(word[:60]) for word in mutation.words)


def run(mutations: Sequence[Mutation], folder: Path, processes: int) -> Tally:
    """All mutations, so many at a time."""
    tally, places = Tally(), [folder / f"place-{i}" for i in range(processes)]
    for place in places:
        place.mkdir(exist_ok=True)
    busy: dict[int, tuple[Path, Mutation]] = {}

    def end_one() -> None:
        pid, state, used = os.wait4(-1, 0)
        place, mutation = busy.pop(pid)
        message = (place / "stderr").read_text(encoding="utf-8", errors="replace")
        tally.add(mutation, state, used, message)
        places.append(place)

    told = time.monotonic()
    for mutation in mutations:
        if not places:
            end_one()
        if time.monotonic() - told > TOLD_S:
            told = time.monotonic()
            print(f"{tally.count:,} of {len(mutations):,}, found: {len(tally.failures)}", file=sys.stderr, flush=True)
        place = places.pop()
        busy[begin(place, mutation)] = place, mutation
    while busy:
        end_one()
    return tally


def load_everything(mutations: Sequence[Mutation]) -> None:
    """Modules that commands load late, so that forked processes have them."""
    for package in (cli, formats):
        for module in iter_modules(package.__path__, f"{package.__name__}."):
            import_module(module.name)
    if sum(mutation.command.startswith("run ") for mutation in mutations) > 9:
        import_module("torch")


def check_accepted(mutations: Sequence[Mutation], folder: Path) -> None:
    """AssertionError unless every command takes its file as it is, but for `run`, which has no GPUs. Fills caches."""
    home = Path.cwd()
    for seed, command in {
        (mutation.seed.name, mutation.command): (mutation.seed, mutation.command) for mutation in mutations
    }.values():
        (folder / seed.name).write_text(seed.text, encoding="utf-8")
        (folder / f"whole-{seed.name}").write_text(seed.text, encoding="utf-8")
        status = answer(command, folder, seed.name)
        assert status in (0, 1) or command.startswith("run "), (seed.name, command, status)
    os.chdir(home)


def quiet(work: Callable[[], None]) -> None:
    """Does it without a word."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        work()


def report() -> int:
    """Run, print; the exit status."""
    parser = argparse.ArgumentParser(description="mutated files: one clear answer to each")
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0, help="number of the first mutation")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--flags", action="store_true", help="change command lines in place of files")
    parser.add_argument("--only", type=int, help="show this one")
    parser.add_argument("-o", "--output", type=Path, help="file of the page, as in benchmarks/results/mutations.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        os.environ |= {"GNOMON_HOME": name, "BATCH": "1536"}  # a script of Megatron leaves its batch to the caller
        folder, known = Path(name), list[Seed]()
        quiet(lambda: known.extend(seeds(folder)))
        if options.flags:
            known = [seed for seed in known if seed.name != "runs.csv"] + [*flag_seeds()] * (len(known) // 3)
        if options.only is not None:
            mutation = Mutation.of(options.only, known, of_flags=options.flags)
            print(mutation.text, f"\n-- {shown(mutation)}", flush=True)
            (folder / mutation.seed.name).write_bytes(mutation.text.encode("utf-8", "surrogatepass"))
            (folder / f"whole-{mutation.seed.name}").write_text(mutation.seed.text, encoding="utf-8")
            return answer(mutation.command, folder, mutation.seed.name, mutation.words)
        mutations = [
            Mutation.of(i, known, of_flags=options.flags) for i in range(options.first, options.first + options.count)
        ]
        load_everything(mutations)
        if not options.flags:
            quiet(lambda: check_accepted(mutations, folder))
        began = time.monotonic()
        tally = run(mutations, folder, options.processes)
    lines = page(tally, len(known), time.monotonic() - began, " --flags" if options.flags else "")
    print("\n".join(lines))
    if options.output is not None:
        options.output.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return 1 if tally.failures else 0


def page(tally: Tally, known: int, seconds: float, how: str) -> list[str]:
    """What came out, in lines."""
    words = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    statuses = ", ".join(f"{status}: {n:,}" for status, n in sorted(tally.statuses.items()))
    return [
        "# Mutated flags" if how else "# Mutated files",
        "",
        f"{datetime.now(UTC).date().isoformat()}, commit {commit or 'unknown'}, Python {python_version()}. "
        f"`python benchmarks/mutations.py{how} --count {tally.count}`: {seconds:.0f} s on busy cores, "
        f"{tally.seconds:.0f} CPU-seconds.",
        f"{known} valid {'commands and files' if how else 'files, each accepted first by its commands'}; "
        "every mutation in a process of its own.",
        "",
        f"- {tally.count:,} mutations: " + ", ".join(f"{name} {n:,}" for name, n in tally.commands.most_common()),
        f"- exit status {statuses}",
        f"- most processor time {tally.slowest[0]:.1f} s of {CPU_S} (mutation {tally.slowest[1]})",
        f"- most memory {tally.largest[0] / 1024:.0f} MiB of {MEMORY_BYTES // 2**20} (mutation {tally.largest[1]})",
        f"- found: {len(tally.failures)}",
        *(f"    - {line}" for line in tally.failures),
    ]


if __name__ == "__main__":
    sys.exit(report())
