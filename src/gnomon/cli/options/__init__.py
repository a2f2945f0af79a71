"""What can be written on the command line. Nothing here knows a model or a machine.

`parse(words)` returns the command's name and its options, typed and frozen. Only the module with the options of the
command that is called is loaded, and only its parser is made; `gnomon --help`, and words that are no command, need all
names, which are here. `parser()` is all of it at once, for tests and for shells.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gnomon.cli.options.flags import Options, Parser, add_flags, from_namespace, parse_options
from gnomon.late import load_late

_EPILOG = """\
examples, all of which run on a laptop:
  gnomon predict llama-3.1-8b --on 4x8xh100-sxm --zero 3 --global-batch 128
  gnomon predict gpt2 --on a100-sxm-40gb --micro-batch-size 8
  gnomon catalogue clusters

exit status: 0 done; 1 predicted, but does not fit in memory or is not as fast
as asked; 2 the request is wrong; 3 a mistake in Gnomon. GNOMON_DEBUG=1 shows
tracebacks."""


@dataclass(frozen=True, slots=True)
class Action:
    """Something that can be asked for by a word."""

    text: str
    """What it does, in a line of help."""
    options: str
    """Its `Options`, as `module:Name` in this package."""


@dataclass(frozen=True, slots=True)
class Actions:
    """A word that another one follows."""

    text: str
    about: str
    """Its long help, as `module:Name` in this package."""
    actions: Mapping[str, Action]


COMMANDS: Mapping[str, Action | Actions] = {
    "predict": Action("time and memory of a training step", "predict:PredictOptions"),
    "plan": Action("the fastest plan that fits, for a model on machines", "plan:PlanOptions"),
    "fit": Action("what would make a job fit in memory, and at what price", "fit:FitOptions"),
    "explain": Action("why a plan is as fast and as large as it is", "plan:ExplainOptions"),
    "explore": Action("a page on which a prediction follows every change", "explore:ExploreOptions"),
    "validate": Action("your measured runs and their predictions", "tools:ValidateOptions"),
    "compare": Action("where a prediction and a measured run differ", "tools:CompareOptions"),
    "diff": Action("what a change of a job does to speed and memory, for CI", "diff:DiffOptions"),
    "run": Action("train by a plan file, and compare with its prediction", "run:RunOptions"),
    "launch": Action("a plan by torchrun, Slurm, Kubernetes or Ray", "run:LaunchOptions"),
    "check": Action("whether every rank has what a plan needs; slow ranks and links", "run:CheckOptions"),
    "parity": Action("a plan against the plain model, in small", "run:ParityOptions"),
    "serve": Action("an OpenAI-compatible server of a folder of weights", "server:ServerOptions"),
    "generate": Action("a few words from a folder of weights", "server:GenerateOptions"),
    "bench-serve": Action("a server under a load, measured", "server:BenchOptions"),
    "scale": Action("another number of processes for a job that runs", "run:ScaleOptions"),
    "checkpoint": Actions(
        "look at checkpoints, check, convert and export them",
        "checkpoint:ABOUT",
        {
            "inspect": Action("step, plan, contents, and what it goes on from", "checkpoint:InspectOptions"),
            "verify": Action("every checksum of one, or of all in a folder", "checkpoint:VerifyOptions"),
            "convert": Action(
                "the same for another plan; quantised weights in another form", "checkpoint:ConvertOptions"
            ),
            "export-hf": Action("its weights as safetensors with config.json", "checkpoint:ExportHfOptions"),
        },
    ),
    "compress": Action("a folder of weights in 4 or 8 bits, or sparse", "compress:CompressOptions"),
    "data": Action("what a corpus holds as tokens; writes Megatron's format", "run:DataOptions"),
    "report": Action("a page that shows timelines, predicted and measured", "tools:ReportOptions"),
    "calibrate": Action("measure this machine, for --on local", "tools:CalibrateOptions"),
    "compile": Action("what the compiler makes of a PyTorch model", "tools:CompileOptions"),
    "export": Action("a plan file as another program's job file", "tools:ExportOptions"),
    "fleet": Actions(
        "many jobs on one cluster: replay a trace under a policy",
        "fleet:ABOUT",
        {
            "replay": Action("play a trace under one policy or several", "fleet:ReplayOptions"),
            "what-if": Action("the same jobs with more machines, or another policy", "fleet:WhatIfOptions"),
            "forecast": Action("rate, memory and cost of a plan on numbers of devices", "fleet:ForecastOptions"),
            "service": Action("machines that an inference service needs over the day", "fleet:ServiceOptions"),
            "slices": Action("MIG slices and batches for prompts of many lengths", "fleet:SlicesOptions"),
            "submit": Action("a plan as a job of Slurm, Kueue or Ray", "fleet:SubmitOptions"),
            "spot": Action("what losses of machines cost a plan, with and without copies", "fleet:SpotOptions"),
            "decisions": Action("a recorded trace of gnomon run --decisions, played again", "fleet:DecisionsOptions"),
            "run": Action("jobs on this machine, scheduled by a policy", "fleet:FleetRunOptions"),
            "policies": Action("the policies that are known", "fleet:PoliciesOptions"),
        },
    ),
    "catalogue": Action("devices, clusters, models, stacks, schedules and methods", "tools:CatalogueOptions"),
}


def parse(words: Sequence[str]) -> tuple[str, Options]:
    """(name of the command, its options). SystemExit, as argparse's, for help, the version, or what is wrong."""
    command = COMMANDS.get(words[0]) if words else None
    if command is None or isinstance(command, Actions):
        parsed = parser(*words[:1]).parse_args(words)
        command = COMMANDS[parsed.command]
        of = command.actions[parsed.action] if isinstance(command, Actions) else command
        return parsed.command, from_namespace(_options(of), parsed)
    # What is usual needs no tree of parsers: the command's own flags are read alone, and no other command's are
    # imported.
    return words[0], parse_options(_options(command), words[1:], f"gnomon {words[0]}", command.text)


def parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of `gnomon`; its result holds `command`, for some `action`, and the values of its options. only: the
    one command that is filled in, if there is one of that name."""
    top = Parser(
        prog="gnomon",
        description="Predict how a deep-learning job will run, plan it, run it, and compare.",
        epilog=_EPILOG,
    )
    top.add_argument("--version", action="version", version=f"gnomon {load_late('gnomon:__version__')}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        left_out = only in COMMANDS and only != name
        if isinstance(command, Action):
            _add(commands, name, command, left_out)
            continue
        about = None if left_out else load_late(f"gnomon.cli.options.{command.about}")
        own = commands.add_parser(name, help=command.text, description=command.text, epilog=about)
        if not left_out:
            actions = own.add_subparsers(dest="action", required=True, metavar="ACTION")
            for word, action in command.actions.items():
                _add(actions, word, action, False)
    return top


def _add(commands: argparse._SubParsersAction[Parser], name: str, action: Action, empty: bool) -> None:
    """An action among the others. empty: its name and help only."""
    if empty:
        commands.add_parser(name, help=action.text)
        return
    of = _options(action)
    add_flags(commands.add_parser(name, help=action.text, description=action.text, epilog=of.about), of)


def _options(action: Action) -> type[Options]:
    loaded: type[Options] = load_late(f"gnomon.cli.options.{action.options}")
    return loaded
