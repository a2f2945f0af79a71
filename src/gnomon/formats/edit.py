"""Settings changed in the text of somebody's own job file, everything else left as it stands.

`edited(text, suffix, settings)` returns the file with the settings in place: in a script the values of flags (or of the
variables that they take), in YAML, TOML and JSON the keys. Comments, order and indentation stay, so that a diff shows
what changed and nothing else. Nothing here knows a program: whether the changed file means what it should is for its
reader to say. Leaves out which settings to change (`request.like`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from shlex import quote
from typing import Literal, TypeAlias

from gnomon.errors import InputError
from gnomon.search.fit.terms import REMOVED, Setting

Places: TypeAlias = Literal["last", "first", "all"]
"""Which of several places of a script that give one flag."""


def edited(
    text: str,
    suffix: str,
    settings: Sequence[Setting],
    *,
    variables: bool = True,
    places: Places = "last",
    near: Sequence[str] = (),
) -> str:
    """The text with every setting in place.

    suffix: end of the file's name, as in `.yaml`; files of other kinds are taken for scripts. settings: (key, value),
    `a.b` for a key in a table; the value is a switch (True, False), a word, a number, a sequence of several, or
    `REMOVED`. variables: a flag whose value is a variable gets its value where that is assigned; otherwise where the
    flag stands. places: which of several flags of a name is meant; the last counts within one command, but a script
    may hold several commands. near: flags near which a new one may be put, the first that the script has. Lines end
    as they did. InputError for a setting that has no place in the text.
    """
    # Patterns below know one end of lines.
    if "\r\n" in text:
        plain = text.replace("\r\n", "\n")
        changed = edited(plain, suffix, settings, variables=variables, places=places, near=near)
        return changed.replace("\n", "\r\n")
    change = {".yaml": _yaml, ".yml": _yaml, ".toml": _toml, ".json": _json}.get(suffix.lower())
    # One after the other on the changed text: a setting may stand in a table that the one before has added.
    for key, value in settings:
        # Structured files have one place for a key; a script may have many, or none.
        if change is not None:
            text = change(text, key, value)
            continue
        text = _script(text, key, value, variables, places, near)
        near = (key, *near)
    return text


def has(text: str, suffix: str, key: str) -> bool:
    """Whether the file sets the key."""
    text, suffix = text.replace("\r\n", "\n"), suffix.lower()
    if suffix == ".json":
        return _inside(_loaded(text), key.split("."))[1]
    if suffix in (".yaml", ".yml"):
        return any(line.path == tuple(key.split(".")) for line in _yaml_lines(text.split("\n")))
    if suffix == ".toml":
        return any(line.path == tuple(key.split(".")) for line in _toml_lines(text.split("\n")))
    return next(_flags(text, key), None) is not None


# Scripts


_COMMAND = r"(?:[^()]|\([^()]*\))*"
_VALUE = (
    rf"(?:\$\(\({_COMMAND}\)\)|\$\({_COMMAND}\)|\$\{{[^{{}}]*\}}|`[^`\n]*`"
    r"|\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|\\[^\n]|[^\s\\()\"'`;|&<>])+"
)
"""A word of a shell command, as far as it is written on one line."""
_NEXT = re.compile(rf"(?:[ \t]|\\\n)+(?!-[-\w]*[A-Za-z]|`?#|\d*[<>]|[|&;])(?=({_VALUE}))")
"""What stands before a further value of a flag, and that value."""
_VARIABLE = re.compile(r"\"?\$(?:(?P<bare>\w+)|\{(?P<braced>\w+)(?::?-[^{}]*)?\})\"?")
_ARGUMENTS = re.compile(
    r"\"?\$(?:[@*]|\{[@*]|\{\w+\[[@*]\]|\{?\w*(?:ARG|OPT|FLAG|PARAM|EXTRA)\w*)\S*\"?", re.IGNORECASE
)
"""Variables that stand for further arguments, by their names, and those that certainly do."""


@dataclass(frozen=True, slots=True)
class _Span:
    """A part of a script that is no plain text of a command."""

    start: int
    end: int
    """Behind its last character."""
    kind: Literal["#", "'", '"']
    """A comment, or in quotes."""


@lru_cache(maxsize=16)
def _spans(text: str) -> tuple[_Span, ...]:
    """Comments and quotes of a script. Within a here-document quotes mean nothing, and lines that begin with # are
    comments of what it holds."""
    spans, at, ends = list[_Span](), 0, list[str]()
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 2
            continue
        if char == "\n" and ends:
            # Here-documents begin with the next line, in the order in which they were opened.
            for word in ends:
                end = re.compile(rf"^\t*{re.escape(word)}$", re.MULTILINE).search(text, at + 1)
                stop = len(text) if end is None else end.start()
                spans.extend(
                    _Span(line.start(), line.end(), "#")
                    for line in re.compile(r"^[ \t]*#.*$", re.MULTILINE).finditer(text, at + 1, stop)
                )
                at = stop
            ends = []
            continue
        if char == "#" and (at == 0 or text[at - 1] in " \t\n;(&|`"):
            end_at = text.find("`" if text[at - 1 : at] == "`" else "\n", at)
            end_at = len(text) if end_at < 0 else end_at
            spans.append(_Span(at, end_at, "#"))
            at = end_at
            continue
        if char in ("'", '"'):
            closed = re.compile(r"'[^']*'" if char == "'" else r"\"(?:[^\"\\]|\\.)*\"", re.DOTALL).match(text, at)
            if closed is not None:
                spans.append(_Span(at, closed.end(), "'" if char == "'" else '"'))
                at = closed.end()
                continue
        if (here := _HERE.match(text, at)) is not None:
            ends.append(here["word"])
            at = here.end()
            continue
        at += 1
    return tuple(spans)


_HERE = re.compile(r"(?<!<)<<-?[ \t]*(?P<quote>['\"]?)(?P<word>[A-Za-z_]\w*)(?P=quote)")


def _around(text: str, at: int) -> _Span | None:
    """The comment or quotes around a place."""
    return next((span for span in _spans(text) if span.start < at < span.end), None)


@dataclass(frozen=True, slots=True)
class _Flag:
    """One place of a script that gives a flag."""

    start: int
    """Of its first dash."""
    name_end: int
    """Behind its name."""
    end: int
    """Behind its values."""
    values: tuple[tuple[int, int], ...]
    """(start, end) of each."""
    quoted: bool
    """Whether it stands within quotes, where a value cannot have quotes of its own."""


def _flags(text: str, key: str) -> Iterator[_Flag]:
    """Places of a flag outside of comments. `-` and `_` in its name are one, as they are to argparse's users."""
    name = re.sub("[-_]", "[-_]", re.escape(key).replace("\\-", "-"))
    for found in re.finditer(rf"(?<![\w$-])--{name}(?![\w-])", text):
        around = _around(text, found.start())
        if around is not None and around.kind == "#":
            continue
        # Values do not run out of the string that the flag stands in.
        stop = len(text) if around is None else around.end - 1
        at, values = found.end(), list[tuple[int, int]]()
        if text[at : at + 1] == "=":
            word = re.compile(_VALUE).match(text, at + 1, stop)
            values = [] if word is None else [word.span()]
        else:
            while word := _NEXT.match(text, at, stop):
                variable = _VARIABLE.fullmatch(word[1]) is not None
                # A further variable behind a plain value is more arguments, not a second value.
                if _ARGUMENTS.fullmatch(word[1]) or variable and values and "$" not in text[slice(*values[0])]:
                    break
                values.append(word.span(1))
                at = word.end(1)
        end = values[-1][1] if values else found.end()
        yield _Flag(found.start(), found.end(), end, tuple(values), around is not None)


def _script(text: str, key: str, value: object, variables: bool, places: Places, equivalents: Sequence[str]) -> str:
    found = _chosen(_flags(text, key), places)
    # argparse's switches have no word for off: leaving them out is it.
    if value is REMOVED or value is False:
        for place in reversed(found):
            text = _without(text, place)
        return text
    words = [] if value is True else [quote(str(one)) for one in _several(value)]
    if not found:
        return _with_flag(text, key, words, places, equivalents)
    # From the end, so that earlier places keep their positions.
    for place in reversed(found):
        text = _with_values(text, key, place, words, variables)
    return text


def _chosen(found: Iterator[_Flag], places: Places) -> list[_Flag]:
    every = list(found)
    return {"all": every, "first": every[:1], "last": every[-1:]}[places]


def _several(value: object) -> Sequence[object]:
    return value if isinstance(value, (list, tuple)) else (value,)


def _without(text: str, place: _Flag) -> str:
    """The text less a flag, and less its line where nothing else is on it; the line before the last of a command then
    ends that."""
    start, end = text.rfind("\n", 0, place.start) + 1, text.find("\n", place.end)
    end = len(text) if end < 0 else end
    before, after = text[start : place.start], text[place.end : end]
    if before.strip() or after.strip() not in ("", "\\"):
        return text[: place.start].rstrip(" \t") + text[place.end :]
    line_start = text[:start] if after.strip() else re.sub(r"[ \t]*\\\n$", "\n", text[:start])
    return line_start + text[end + 1 :]


def _with_values(text: str, key: str, place: _Flag, words: Sequence[str], variables: bool) -> str:
    if variables and len(words) == 1 and len(place.values) == 1:
        variable = _VARIABLE.fullmatch(text[slice(*place.values[0])])
        if variable is not None:
            changed = _assigned(text, variable["bare"] or variable["braced"], words[0], key)
            if changed is not None:
                return changed
    # `--bf16 true` of HfArgumentParser; `--bf16 train.py` of a plain switch.
    if not words and not (place.values and text[slice(*place.values[0])].lower() in ("true", "false")):
        return text  # a switch that is there; what follows is no value of it
    _refuse_quotes(place, key, words)
    start = place.values[0][0] if place.values else place.name_end
    gap = "" if place.values or not words else " "
    # `--flag=a b` would leave b to nobody.
    if len(words) > 1 and text[place.name_end : place.name_end + 1] == "=":
        start, gap = place.name_end, " "
    return text[:start] + gap + " ".join(words) + text[place.end if place.values else start :]


def _refuse_quotes(place: _Flag, key: str, words: Sequence[str]) -> None:
    """InputError for words that need quotes within a string, where the shell would not take them for quotes."""
    if place.quoted and any("'" in word for word in words):
        raise InputError(
            f"--{key} {' '.join(words)} needs quotes, and the script's flags are in a quoted string, which has none "
            f'inside; make that an array, NAME=(…) and "${{NAME[@]}}", or add the flag by hand'
        )


def _assigned(text: str, name: str, word: str, key: str) -> str | None:
    """The text with another value where a variable gets its only one; None where it has none or several, or where
    another flag takes it too. A default, `${NAME:-4}`, is what is changed of one that the environment may set."""
    flag = re.sub("[-_]", "[-_]", re.escape(key).replace("\\-", "-"))
    others = rf"--(?!{flag}[ =])[\w.-]+[ =]+\"?\$(?:{name}\b|\{{{name}(?:\}}|:?-))"
    if any(
        (around := _around(text, other.start())) is None or around.kind != "#" for other in re.finditer(others, text)
    ):
        return None
    lines = re.compile(rf"^[ \t]*(?:export[ \t]+|declare[ \t]+|local[ \t]+)*{name}=(?P<value>{_VALUE})?", re.MULTILINE)
    found = [one for one in lines.finditer(text) if one["value"]]
    # Assigned twice: which one counts depends on branches.
    if len(found) != 1:
        return None
    start, end = found[0].span("value")
    # NAME=${NAME:-4}: who sets it outside still may.
    default = re.fullmatch(r"(\"?\$\{\w+:?-)[^{}]*(\}\"?)", found[0]["value"])
    if default is not None:
        word = f"{default[1]}{word}{default[2]}"
    elif "$" in found[0]["value"] or "`" in found[0]["value"]:
        return None  # computed of others
    return text[:start] + word + text[end:]


def _with_flag(text: str, key: str, words: Sequence[str], places: Places, equivalents: Sequence[str]) -> str:
    """The text with a further flag, on a line of its own where flags have theirs."""
    flag = " ".join([f"--{key}", *words])
    found = next((every for name in equivalents if (every := list(_flags(text, name)))), None)
    if found is None:
        raise InputError(f"the script has no flag near which {flag} could be put; add it by hand")
    place = found[-1 if places == "last" else 0]
    _refuse_quotes(place, key, words)
    start, end = text.rfind("\n", 0, place.start) + 1, text.find("\n", place.end)
    end = len(text) if end < 0 else end
    before, after = text[start : place.start], text[place.end : end]
    if before.strip() or after.strip() not in ("", "\\"):
        return f"{text[: place.end]} {flag}{text[place.end :]}"
    continued = " \\" if after.strip() else ""
    # It ends without a backslash, so it gets one and the flag becomes the last line.
    if not continued and text[:start].rstrip(" \t\n").endswith("\\"):  # the last line of a command
        return f"{text[: place.end]} \\\n{before}{flag}{text[place.end :]}"
    return f"{text[:end]}\n{before}{flag}{continued}{text[end:]}"


# YAML


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of YAML that gives a key of nested mappings."""

    number: int
    indent: int
    path: tuple[str, ...]
    key_end: int
    """Behind the colon."""
    value: str
    """What follows the colon, less a comment; empty where a block follows."""
    value_at: tuple[int, int]
    """Where that is in the line."""
    closed: bool
    """Whether the value ends on this line."""


_KEY = re.compile(r"(?P<indent> *)(?P<key>[\w./-]+|\"[^\"]*\"|'[^']*'):(?=\s|$)")
_PLAIN = re.compile(r"(?:[^\s#]|\s(?!\s*#|\s*$)|(?<=\S)#)*")
_QUOTED = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^']|'')*'")


def _value_end(line: str, at: int) -> int | None:
    """Finds where a value ends that begins there; None for one that goes on in further lines."""
    opens = line[at : at + 1]
    # Block scalars go on for as long as lines are indented.
    if opens in ("|", ">"):
        return None
    if opens in ("'", '"') and opens:
        found = _QUOTED.match(line, at)
        return None if found is None else found.end()
    if opens not in ("[", "{"):
        plain = _PLAIN.match(line, at)
        assert plain is not None
        return plain.end()
    depth = 0
    while at < len(line):
        if line[at] in "'\"" and (found := _QUOTED.match(line, at)) is not None:
            at = found.end()
            continue
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(line[at], 0)
        at += 1
        if depth == 0:
            return at
    return None


def _yaml_lines(lines: Sequence[str]) -> Iterator[_Line]:
    """Lines that give keys of mappings; those inside of lists, and of values of several lines, are left out."""
    # (column, key) of the mappings that a line stands in, outermost first.
    above: list[tuple[int, str]] = []
    hidden = -1
    for number, line in enumerate(lines):
        bare = line.strip()
        indent = len(line) - len(line.lstrip(" "))
        if not bare or 0 <= hidden < indent or bare.startswith("#"):
            continue
        # Keys inside of a list's items have no path of words; a setting there is left to the person.
        if bare.startswith("- "):
            hidden = indent
            continue
        hidden = -1
        found = _KEY.match(line)
        if found is None:
            continue
        # A key no deeper than the one before closes the tables at and below its column.
        while above and above[-1][0] >= indent:
            above.pop()
        above.append((indent, found["key"].strip("\"'")))
        start = found.end() + len(line[found.end() :]) - len(line[found.end() :].lstrip())
        end = _value_end(line, start)
        closed = end is not None
        end = len(line) if end is None else end
        if not closed:
            hidden = indent
        yield _Line(number, indent, tuple(key for _, key in above), found.end(), line[start:end], (start, end), closed)


def _yaml(text: str, key: str, value: object) -> str:
    lines, path = text.split("\n"), tuple(key.split("."))
    # Lines are changed and not a parsed document, so that comments, order and quotes stay the user's.
    known = list(_yaml_lines(lines))
    if not known and any(line.strip() and not line.lstrip().startswith(("#", "---", "%")) for line in lines):
        raise InputError("the file is no list of keys, one a line; change it by hand")
    here = _line_of(known, path)
    if here is None:
        above = [table for n in range(1, len(path)) if (table := _line_of(known, path[:n])) is not None]
        if above and above[-1].closed and above[-1].value.startswith("{"):
            return "\n".join(_yaml_inline(lines, above[-1], path, value))
        return text if value is REMOVED else "\n".join(_yaml_added(lines, known, path, value))
    last = _last_of(lines, known, path)
    # An anchor: an alias elsewhere in the file repeats the value.
    if here.value.startswith("&"):
        raise InputError(f"{key} is {here.value} in the file, which other lines may take; change it by hand")
    if value is REMOVED:
        return "\n".join([*lines[: here.number], *lines[last + 1 :]])
    if not here.value and last != here.number:
        raise InputError(f"{key} is a table in the file, and {value} is a value; change it by hand")
    if not here.closed or last != here.number:
        raise InputError(f"{key} has its value on several lines; change it by hand")
    line, (start, end) = lines[here.number], here.value_at
    if not here.value:
        start = end = here.key_end
    gap = "" if line[:start].endswith((" ", "\t")) else " "
    lines[here.number] = f"{line[:start]}{gap}{_scalar(value)}{line[end:]}"
    return "\n".join(lines)


def _yaml_inline(lines: list[str], here: _Line, path: tuple[str, ...], value: object) -> list[str]:
    """The lines with a key of a table in braces, if those are JSON."""
    try:
        if isinstance(value, str) and value[:1] == "{":
            value = _loaded(value)  # a table in one line, as `_scalar` takes it
        inner = _json(here.value, ".".join(path[len(here.path) :]), value)
    except InputError:
        shown = ".".join(here.path)
        raise InputError(f"{shown} is {here.value} in the file, which is no JSON; change it by hand") from None
    (start, end), line = here.value_at, lines[here.number]
    return [*lines[: here.number], line[:start] + inner + line[end:], *lines[here.number + 1 :]]


def _line_of(known: Sequence[_Line], path: tuple[str, ...]) -> _Line | None:
    """The line of a key; of a key that is given twice the last, which counts."""
    return next((line for line in reversed(known) if line.path == path), None)


def _last_of(lines: Sequence[str], known: Sequence[_Line], path: tuple[str, ...]) -> int:
    """Number of the last line that belongs to a key."""
    first = _line_of(known, path)
    assert first is not None
    last = first.number
    for number in range(first.number + 1, len(lines)):
        bare = lines[number].strip()
        indent = len(lines[number]) - len(lines[number].lstrip(" "))
        if not bare or bare.startswith("#") and (first.closed or indent <= first.indent):
            continue
        # A list may stand at its key's own column.
        if indent < first.indent or indent == first.indent and not bare.startswith("- "):
            break
        last = number
    return last


def _yaml_added(lines: Sequence[str], known: Sequence[_Line], path: tuple[str, ...], value: object) -> list[str]:
    """The lines with a further key, behind the last of the table that it is in."""
    # The longest beginning of the path that the file has as a key: what is missing behind it is added below it.
    depth = next(n for n in range(len(path) - 1, -1, -1) if n == 0 or any(line.path == path[:n] for line in known))
    # The file's own width of a level, read off its first nested key.
    step = next((line.indent for line in known if len(line.path) == 2), 2)
    if depth == 0:
        last = max((number for number, line in enumerate(lines) if line.strip() and line.strip() != "..."), default=-1)
        indent = 0
    else:
        parent = _line_of(known, path[:depth])
        assert parent is not None
        if parent.value:
            raise InputError(f"{'.'.join(path[:depth])} is {parent.value} in the file, and no table; change it by hand")
        last = _last_of(lines, known, path[:depth])
        inner = [line.indent for line in known if line.path[:-1] == path[:depth]]
        # As its siblings stand, or as the file indents elsewhere.
        indent = inner[0] if inner else parent.indent + step
    added = [f"{' ' * (indent + step * i)}{name}:" for i, name in enumerate(path[depth:])]
    added[-1] += f" {_scalar(value)}"
    return [*lines[: last + 1], *added, *lines[last + 1 :]]


def _scalar(value: object) -> str:
    """A value as YAML has it, in one line."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_/][\w./ +-]*", value) and value.lower() not in _YAML_WORDS:
        return value
    if isinstance(value, str) and re.fullmatch(r"\[.*\]|\{.*\}", value):
        return value  # a list or table in one line, as YAML has them
    return json.dumps(list(value) if isinstance(value, tuple) else value)


_YAML_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "none", "y", "n"}
"""Words that are no text without quotes."""


# TOML


@dataclass(frozen=True, slots=True)
class _Entry:
    """A line of TOML that gives a key, or opens a table."""

    number: int
    table: tuple[str, ...]
    """The table that it stands in."""
    key: tuple[str, ...]
    """Within that table; empty for the line that opens it."""
    value_at: int
    """Where the value begins in the line."""

    @property
    def path(self) -> tuple[str, ...]:
        return (*self.table, *self.key)


_TOML_NAME = r"(?:[\w-]+|\"[^\"]*\"|'[^']*')"
_DOTTED = rf"{_TOML_NAME}(?:\s*\.\s*{_TOML_NAME})*"
_SECTION = re.compile(rf"\s*(?P<open>\[\[?)\s*(?P<name>{_DOTTED})\s*\]")
_TOML_KEY = re.compile(rf"\s*(?P<name>{_DOTTED})\s*=\s*")
_TOML_VALUE = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s#\[{]+")


ARRAY = "[]"
"""What stands behind the name of a table of an array, `[[name]]`."""


def _parts(name: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in re.findall(_TOML_NAME, name))


def _toml_lines(lines: Sequence[str]) -> Iterator[_Entry]:
    """Lines that give keys and open tables. Those of a value that goes on in further lines are left out; tables of an
    array stand under a name that no key has."""
    table: tuple[str, ...] = ()
    until = ""
    for number, line in enumerate(lines):
        if until:
            until = "" if until in line else until
            continue
        if (section := _SECTION.match(line)) is not None:
            # [[name]] may come again, so its keys have no one place.
            table = (*_parts(section["name"]), *((ARRAY,) if section["open"] == "[[" else ()))
            yield _Entry(number, table, (), 0)
            continue
        found = _TOML_KEY.match(line)
        if found is None:
            continue
        yield _Entry(number, table, _parts(found["name"]), found.end())
        # Texts over several lines may hold lines that look like keys.
        mark = line[found.end() : found.end() + 3]
        if mark in ('"""', "'''") and mark not in line[found.end() + 3 :]:
            until = mark


def _toml(text: str, key: str, value: object) -> str:
    lines, path = text.split("\n"), tuple(key.split("."))
    known = list(_toml_lines(lines))
    here = next((line for line in known if line.key and line.path == path), None)
    if here is None:
        for n in range(1, len(path)):
            above = path[:n]
            if any(line.key and line.path == above or line.table[: n + 1] == (*above, ARRAY) for line in known):
                raise InputError(f"{'.'.join(above)} is a value in the file, and no table; change it by hand")
        if any(line.path[: len(path)] == path for line in known):
            raise InputError(f"{key} is a table in the file, and no value; change it by hand")
        return text if value is REMOVED else _toml_added(lines, known, path, value)
    start = here.value_at
    end = _toml_end(lines[here.number], start)
    if end is None:
        raise InputError(f"{key} has its value on several lines; change it by hand")
    if value is REMOVED:
        return "\n".join([*lines[: here.number], *lines[here.number + 1 :]])
    line = lines[here.number]
    lines[here.number] = line[:start] + _toml_value(value) + line[end:]
    return "\n".join(lines)


def _toml_end(line: str, at: int) -> int | None:
    """Finds where a value ends that begins there; None for one that goes on in further lines."""
    if line.startswith(('"""', "'''"), at):
        closed = line.find(line[at : at + 3], at + 3)
        return None if closed < 0 else closed + 3
    if line[at : at + 1] in ("[", "{"):
        return _value_end(line, at)
    found = _TOML_VALUE.match(line, at)
    return None if found is None else found.end()


def _toml_value(value: object) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _toml_added(lines: list[str], known: Sequence[_Entry], path: tuple[str, ...], value: object) -> str:
    """The text with a further key, behind the last of the table that it is in."""
    table, name, written = path[:-1], path[-1], _toml_value(value)
    inside = [line for line in known if line.table == table]
    dotted = [line for line in known if line.key[:-1] and line.path[: len(table)] == table and line.table != table]
    if inside or not table:
        number = _toml_last(lines, known, inside)
        above = lines[inside[-1].number] if inside and inside[-1].key else ""
        indent = above[: len(above) - len(above.lstrip())]
        return "\n".join([*lines[: number + 1], f"{indent}{name} = {written}", *lines[number + 1 :]])
    if dotted:  # its table is not opened, but named by its keys
        number, shown = _toml_last(lines, known, dotted), ".".join(path[len(dotted[-1].table) :])
        return "\n".join([*lines[: number + 1], f"{shown} = {written}", *lines[number + 1 :]])
    space = [""] if any(line.strip() for line in lines) else []
    while lines and not lines[-1].strip():
        lines.pop()
    return "\n".join([*lines, *space, f"[{'.'.join(table)}]", f"{name} = {written}", ""])


def _toml_last(lines: Sequence[str], known: Sequence[_Entry], inside: Sequence[_Entry]) -> int:
    """Number of the last line of these keys, with the lines that their last value goes on in; -1 without any."""
    last = inside[-1].number if inside else -1
    after = next((line.number for line in known if line.number > last), len(lines))
    while after - 1 > last and (not lines[after - 1].strip() or lines[after - 1].lstrip().startswith("#")):
        after -= 1
    return after - 1 if inside else -1


# JSON


def _loaded(text: str) -> dict[str, object]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise InputError(f"the file is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise InputError("the file holds no JSON object")
    return values


def _inside(values: Mapping[str, object], path: Sequence[str]) -> tuple[object, bool]:
    """(value, whether there is one) of a path of keys."""
    value: object = values
    for part in path:
        if not isinstance(value, Mapping) or part not in value:
            return None, False
        value = value[part]
    return value, True


@dataclass(frozen=True, slots=True)
class _Member:
    """A key of a JSON object in the text."""

    key: str
    start: int
    """Of the key's first quote."""
    value: int
    """Where the value begins."""
    end: int
    """Behind the value."""


_SPACE = re.compile(r"[ \t\n\r]*")


def _members(text: str, at: int) -> tuple[list[_Member], int]:
    """(members of the object that begins there, where its closing brace is). The text is known to be JSON."""
    decode, found = json.JSONDecoder().raw_decode, list[_Member]()

    def skip(place: int) -> int:
        space = _SPACE.match(text, place)
        assert space is not None
        return space.end()

    at = skip(at + 1)
    while text[at] != "}":
        start = skip(at + 1) if text[at] == "," else at
        key, after = decode(text, start)
        value = skip(skip(after) + 1)  # behind the colon
        _, end = decode(text, value)
        found.append(_Member(key, start, value, end))
        at = skip(end)
    return found, at


def _json(text: str, key: str, value: object) -> str:
    """Only the value, or the line of the key, is touched; of a key that is given twice the last counts."""
    _loaded(text)
    path, at = key.split("."), text.index("{")
    unit = re.search(r"\n([ \t]+)\S", text)
    step = "" if unit is None else unit[1]
    for depth, part in enumerate(path):
        members, close = _members(text, at)
        here = next((one for one in reversed(members) if one.key == part), None)
        if here is None:
            if value is REMOVED:
                return text
            for outer in reversed(path[depth + 1 :]):
                value = {outer: value}
            return _json_added(text, members, at, close, part, value, step)
        if depth == len(path) - 1:
            if value is REMOVED:
                return _json_without(text, members, here)
            return text[: here.value] + _json_value(value, _indent(text, here.start), step) + text[here.end :]
        if text[here.value] != "{":
            raise InputError(f"{part} is {text[here.value : here.end]} in the file, and no table; change it by hand")
        at = here.value
    raise AssertionError("a path has a last part")


def _indent(text: str, at: int) -> str | None:
    """The space before a key that begins its line; None for another."""
    before = text[text.rfind("\n", 0, at) + 1 : at]
    return before if "\n" in text[:at] and not before.strip() else None


def _json_value(value: object, indent: str | None, step: str) -> str:
    value = list(value) if isinstance(value, tuple) else value
    if indent is None or not step or not isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    return json.dumps(value, indent=step, ensure_ascii=False).replace("\n", f"\n{indent}")


def _json_added(text: str, members: Sequence[_Member], at: int, close: int, key: str, value: object, step: str) -> str:
    if not members:
        return f"{text[: at + 1]}{json.dumps(key)}: {_json_value(value, None, step)}{text[close:]}"
    indent, last = _indent(text, members[-1].start), members[-1].end
    gap = " " if indent is None else f"\n{indent}"
    return f"{text[:last]},{gap}{json.dumps(key)}: {_json_value(value, indent, step)}{text[last:]}"


def _json_without(text: str, members: Sequence[_Member], here: _Member) -> str:
    number = members.index(here)
    if number > 0:
        return text[: members[number - 1].end] + text[here.end :]
    after = members[1].start if len(members) > 1 else here.end
    return text[: here.start] + text[after:]
