"""A command's options as a typed, frozen value, and its parser made from that value's fields.

    @dataclass(frozen=True, kw_only=True)
    class ScaleOptions(Options):
        job: str = positional(metavar="JOB", help="folder of checkpoints")
        to: int | None = option("--to", read=count, metavar="N", help="processes")

`read(ScaleOptions, words)` returns one. A field says all that is known of its option: its names,
how its text is read, its default, its help; so nothing else lists options. `given(options)` says which differ from
their defaults. Bases are shared groups of options, and stand in help in the order in which a class names them. Only
the standard library.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, NoReturn, TypeVar

from gnomon.cli.missing import not_there
from gnomon.cli.terminal import broken
from gnomon.errors import nearest

FLAG = "flag"
"""Key of a field's metadata under which its `Flag` lies."""


@dataclass(frozen=True, repr=False, eq=False)
class Group:
    """A heading of help."""

    title: str
    text: str = ""


@dataclass(frozen=True, repr=False, eq=False)
class Flag:
    """How an option is written: arguments of `add_argument`."""

    names: tuple[str, ...]
    settings: dict[str, Any]
    group: Group | None

    @property
    def help(self) -> str:
        """What it means, in a line; of a list that may grow while the program runs, as it is now."""
        text = self.settings["help"]
        return str(text() if callable(text) else text)

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value."""
        return self.settings.get("action") == "store_true"


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Options:
    """What a command was asked. Its docstring is no help text: that is `about`."""

    about: ClassVar[str] = ""
    """Long help: what arguments mean, examples, exit status."""


O = TypeVar("O", bound=Options)  # noqa: E741


def option(
    *names: str,
    help: str | Callable[[], str],
    read: Callable[[str], Any] = str,
    default: Any = None,
    required: bool = False,
    group: Group | None = None,
    **settings: Any,
) -> Any:
    """An option with a value. read: its text to the value, or argparse.ArgumentTypeError. settings: of add_argument."""
    settings |= {"required": required, "help": help, "type": read, "default": default}
    return field(default=MISSING if required else default, metadata={FLAG: Flag(names, settings, group)})


def repeated(*names: str, help: str, metavar: str, read: Callable[[str], Any] = str, group: Group | None = None) -> Any:
    """An option that may be given again, each time with a value more: a tuple."""
    settings = {"action": "append", "metavar": metavar, "help": help, "type": read, "default": []}
    return field(default=(), metadata={FLAG: Flag(names, settings, group)})


def switch(*names: str, help: str, default: bool | None = False, group: Group | None = None) -> Any:
    """True where it is given. default: None where leaving it out differs from no."""
    settings = {"action": "store_true", "help": help, "default": default}
    return field(default=default, metadata={FLAG: Flag(names, settings, group)})


def either(name: str, *, help: str, group: Group | None = None) -> Any:
    """`--name` is True, `--no-name` False, and neither of them None."""
    settings = {"action": argparse.BooleanOptionalAction, "help": help, "default": None}
    return field(default=None, metadata={FLAG: Flag((name,), settings, group)})


def positional(
    *,
    metavar: str,
    help: str,
    optional: bool = False,
    default: str | None = None,
    choices: Sequence[str] | None = None,
) -> Any:
    """A word without a name. optional: `default` where it is left out."""
    settings = {"metavar": metavar, "help": help, "choices": choices}
    settings |= {"nargs": "?", "default": default} if optional else {}
    return field(default=default if optional else MISSING, metadata={FLAG: Flag((), settings, None)})


def several(*, metavar: str, help: str, optional: bool = False) -> Any:
    """Words without a name: a tuple; at least one, unless optional."""
    settings = {"metavar": metavar, "help": help, "nargs": "*" if optional else "+"}
    return field(metadata={FLAG: Flag((), settings, None)})


def flags(of: type[Options]) -> dict[str, Flag]:
    """Field -> its flag: of the bases first, in the order in which the class names them."""
    ordered: dict[str, Flag] = {}
    for base in of.__bases__:
        if issubclass(base, Options):
            ordered |= flags(base)
    every = {f.name: f.metadata[FLAG] for f in fields(of) if FLAG in f.metadata}
    return {name: every[name] for name in [*ordered, *(own for own in every if own not in ordered)]}


def changed_options(options: Options) -> dict[str, object]:
    """Field -> value, of the options whose values are not their defaults."""
    values = {f.name: getattr(options, f.name) for f in fields(options)}
    return {f.name: values[f.name] for f in fields(options) if values[f.name] != f.default}


def words_of(options: Options) -> tuple[str, ...]:
    """The words that `read` makes these options of: positional ones, and what differs from its default. Of options
    whose values are read from what `str` writes of them."""
    changed, every = changed_options(options), flags(type(options))
    words = [str(changed[name]) for name, flag in every.items() if not flag.names and name in changed]
    for name, flag in every.items():
        if not flag.names or name not in changed:
            continue
        value = str(changed[name])
        if flag.is_switch:
            words.append(flag.names[-1])
        elif value.startswith("-"):  # as an option's value it would be taken for an option
            words.append(f"{flag.names[-1]}={value}")
        else:
            words += [flag.names[-1], value]
    return tuple(words)


def add_flags(parser: argparse.ArgumentParser, of: type[Options]) -> None:
    """The options of a class, added to a parser."""
    groups: dict[Group, argparse._ArgumentGroup] = {}
    for name, flag in flags(of).items():
        group: argparse._ActionsContainer = parser
        if flag.group is not None:
            if flag.group not in groups:
                groups[flag.group] = parser.add_argument_group(flag.group.title, flag.group.text or None)
            group = groups[flag.group]
        if flag.names:
            group.add_argument(*flag.names, dest=name, **flag.settings | {"help": flag.help})
        else:
            group.add_argument(name, **flag.settings)


def from_namespace(of: type[O], parsed: argparse.Namespace) -> O:
    """The value of what was parsed; lists become tuples. What the parser does not have keeps its default."""
    values = {name: getattr(parsed, name) for name in flags(of) if hasattr(parsed, name)}
    return of(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def parse_options(of: type[O], words: Sequence[str], prog: str = "gnomon", text: str = "") -> O:
    """The options that the words give. SystemExit, as argparse's, for help or for what is wrong. text: what the command
    is for, in a line."""
    parser = Parser(prog=prog, description=text, epilog=of.about)
    add_flags(parser, of)
    return from_namespace(of, parser.parse_args(words))


class Parser(argparse.ArgumentParser):
    """One line for a mistake, in place of all options. No name is short for another, and an option that would silently
    replace what it was given before is an error. Parsers of commands are of this class too."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **settings}, allow_abbrev=False)
        self._values_given: dict[argparse.Action, list[str]] = {}

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """Parses as argparse does; what a command does not know is that command's mistake, not that of `gnomon`."""
        self._values_given = {}
        parsed, remaining = super().parse_known_args(args, namespace)
        if remaining:
            if (missing := not_there(remaining)) is not None:
                self.exit(2, broken(f"{self.prog}: {missing}", sys.stderr) + "\n")
            near = (
                nearest(remaining[0].partition("=")[0], self._option_string_actions)
                if remaining[0].startswith("-")
                else ""
            )
            self.error(f"unrecognized arguments: {' '.join(remaining)}{near}")
        return parsed, remaining

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Converts as argparse does, which calls this once for each time that an option is given, and refuses the
        second."""
        if action.option_strings and not isinstance(action, argparse._AppendAction):
            before = self._values_given.setdefault(action, arg_strings)
            if before is not arg_strings:
                values = f" ({' '.join(before)}, then {' '.join(arg_strings)})" if before else ""
                raise argparse.ArgumentError(
                    action, f"it is given twice{values[:200]}; keep one{_TOGETHER.get(action.dest, '')}"
                )
        return super()._get_values(action, arg_strings)

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """Checks a choice as argparse does; its error names the nearest one."""
        if action.choices is not None and value not in action.choices:
            if isinstance(action, argparse._SubParsersAction) and (missing := not_there([str(value)])) is not None:
                self.exit(2, broken(f"{self.prog}: {missing}", sys.stderr) + "\n")
            choices = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action, f"{str(value)!r} is none of {', '.join(choices)}{nearest(str(value), choices)}"
            )

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):  # as argparse says of `--memory -3GiB` and of a missing value
            message += " (one that begins with - is written as OPTION=-VALUE)"
        self.exit(2, broken(f"{self.prog}: {message}; see {self.prog} --help", sys.stderr) + "\n")


_TOGETHER = {"on": ", or join machines by +, as in 2x8xh100-sxm+1x8xa100-sxm"}
"""Option -> what to write in place of it twice, where there is something."""
