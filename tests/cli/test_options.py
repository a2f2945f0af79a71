"""Options of every command: none is short for another, none silently takes the place of what was given before it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

import pytest

from gnomon.cli import main
from gnomon.cli.options import COMMANDS, Actions, parse, parser
from gnomon.cli.options.flags import Options, changed_options

Found = tuple[tuple[str, ...], argparse.Action]
"""(words of the command, one of its options)."""


def options(of: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[Found]:
    """Every option of a command and of those in it."""
    for action in of._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield from options(command, (*words, name))
        elif action.option_strings and not isinstance(action, argparse._HelpAction | argparse._VersionAction):
            yield words, action


COMMAND = parser()
ALL = list(options(COMMAND))


def values(action: argparse.Action) -> list[str]:
    """Words that an option takes."""
    if action.nargs == 0:
        return []
    count = action.nargs if isinstance(action.nargs, int) else 1
    tried = [str(choice) for choice in action.choices or ("1", "x=1", "x")]
    for text in tried:
        try:
            if callable(action.type):
                action.type(text)
        except (argparse.ArgumentTypeError, ValueError):
            continue
        return [text] * count
    raise AssertionError(f"{action.option_strings}: none of {tried}")


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of a command that ends with status 2."""
    status = main(words)
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1), (words, err)
    return err


def test_an_option_given_twice_is_an_error_or_adds_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(ALL) > 250
    for words, action in ALL:
        option = action.option_strings[-1]
        if isinstance(action, argparse._AppendAction):
            continue
        given = (option, *values(action))
        with pytest.raises(SystemExit) as ended:
            COMMAND.parse_args([*words, *given, *given])
        err = capsys.readouterr().err
        assert ended.value.code == 2 and err.count("\n") == 1
        assert f"gnomon {' '.join(words)}: argument " in err and "it is given twice" in err and "keep one" in err


def test_what_adds_up_says_so() -> None:
    adding = {action.dest for _, action in ALL if isinstance(action, argparse._AppendAction)}
    assert adding == {"settings", "sizes", "forbid", "fix", "allow", "vary", "price", "lora", "replays"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("predict", "gpt2", "--on", "h100", "--on", "8xa100"), "(h100, then 8xa100); keep one, or join machines by +"),
        (("predict", "gpt2", "--on", "h100", "--set", "a=1", "--set", "a=2"), "--set gives 'a' twice"),
        (("predict", "gpt2", "--on", "h100", "--size", "a=1", "--size", "a=2"), "--size gives 'a' twice"),
    ],
)
def test_what_was_given_before_is_named(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *words)


def test_what_plan_adds_up_is_given_once_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("plan", "gpt2", "--on", "8xh100", "--global-batch", "8")
    for option, first, second, message in (
        ("--vary", "seq_len=1k", "seq_len=2k", "cannot vary seq_len and seq_len together"),
        ("--fix", "bucket_bytes=25MiB", "bucket_bytes=50MiB", "twice"),
        ("--price", "h100=2", "h100-sxm=3", "--price gives that of h100-sxm-80gb twice"),
        ("--price", "2", "3", "--price gives that of all devices twice"),
    ):
        goal = ("--max-devices", "8", "--best", "cost") if option == "--price" else ()
        assert message in refused(capsys, *asked, *goal, option, first, option, second)


def test_no_option_is_short_for_another(capsys: pytest.CaptureFixture[str]) -> None:
    by_command: dict[tuple[str, ...], set[str]] = {}
    for words, action in ALL:
        by_command.setdefault(words, set()).update(action.option_strings)
    for words, action in ALL:
        short = action.option_strings[-1][:-1]
        if len(short) > 3 and short not in by_command[words]:
            with pytest.raises(SystemExit):
                COMMAND.parse_args([*words, short, *values(action)])
    capsys.readouterr()
    assert "'--global-batch'" in refused(capsys, "predict", "gpt2", "--global", "8")


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "gpt2"),
        ("inference", "gpt2"),
        ("predict", "gpt2", "--on", "h100", "--mode", "serve"),
        ("predict", "gpt2", "--on", "h100", "--mode=inference"),
        ("predict", "gpt2", "--on", "h100", "--decode"),
        ("predict", "gpt2", "--on", "h100", "--stack", "vllm"),
        ("plan", "gpt2", "--on", "h100", "--stack", "sglang", "--global-batch", "8"),
        ("predict", "--on", "h100", "--from", "tgi", "x"),
    ],
)
def test_inference_is_pointed_to(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert "inference servers are predicted by `gnomon predict MODEL --on CLUSTER --serve`" in refused(capsys, *words)


def test_a_price_of_other_devices_is_not_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("plan", "gpt2", "--on", "8xh100-pcie", "--global-batch", "8", "--price", "h100-sxm=2")
    assert "--price gives that of h100-sxm-80gb, and the machines are h100-pcie-80gb" in refused(capsys, *asked)


def test_no_name_of_the_package_is_that_of_a_commands_module() -> None:
    """A module that is loaded later would take its place."""
    package = import_module("gnomon.cli")
    modules = {module.name for module in iter_modules(package.__path__)}
    for name in modules & set(vars(package)):
        assert isinstance(vars(package)[name], ModuleType), name


def option_classes() -> Iterator[tuple[str, type[Options]]]:
    """Every command and action, and its class."""
    for name, command in COMMANDS.items():
        actions = command.actions.items() if isinstance(command, Actions) else [("", command)]
        for word, action in actions:
            module, _, of = action.options.partition(":")
            yield f"{name} {word}".strip(), getattr(import_module(f"gnomon.cli.options.{module}"), of)


def test_no_group_of_options_takes_the_place_of_one_in_another() -> None:
    """Two bases with a field of one name would leave one of the two, in silence."""
    for command, of in option_classes():
        owners: dict[str, type] = {}
        for base in reversed(of.__mro__):
            for name in vars(base).get("__annotations__", {}):
                if name != "about" and base is not of:
                    assert name not in owners or issubclass(base, owners[name]), (command, name, base, owners[name])
                    owners[name] = base


def test_options_are_frozen_values() -> None:
    _, options = parse(["predict", "gpt2", "--on", "h100", "--set", "a=1"])
    assert changed_options(options) == {"model": "gpt2", "on": "h100", "settings": ("a=1",)}
    with pytest.raises(FrozenInstanceError):
        options.model = "other"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("predict gpt2 --on h100 --vocab-size 5", "--vocab-size is for what a file leaves open, and 'gpt2' is a name"),
        ("predict gpt2 --on h100 --strict", "--strict is for what a file leaves open, and 'gpt2' is a name"),
        ("predict llama-mini --on 8xh100 --context ring", "--context ring says how cp ranks share a sequence"),
        ("fit gpt2 --on h100 --memory -3GiB", "one that begins with - is written as OPTION=-VALUE"),
        ("predict gpt2 --on h100 --serve --input-len 8 --output-len 8 --ttft 5parsecs", "--ttft: Expected seconds"),
    ],
)
def test_nothing_that_was_written_is_dropped(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, *words.split())


def test_adapters_are_of_training_and_of_serving(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "llama-mini", "--on", "h100", "--lora-rank", "8"]) == 0
    assert "parameters of adapters" in " ".join(capsys.readouterr().out.split())
