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
from shlex import quote

from gnomon.errors import InputError
from gnomon.search.fit.terms import REMOVED, Setting


def edited(
    text: str, suffix: str, settings: Sequence[Setting], *, variables: bool = True, beside: Sequence[str] = ()
) -> str:
    """The text with every setting in place.

    suffix: end of the file's name, as in `.yaml`; files of other kinds are taken for scripts. settings: (key, value),
    `a.b` for a key in a table; the value is a switch (True, False), a word, a number, a sequence of several, or
    `REMOVED`. variables: a flag whose value is a variable gets its value where that is assigned; otherwise where the
    flag stands. beside: flags near which a new one may be put, the first that the script has. InputError for a setting
    that has no place in the text.
    """
    change = {".yaml": _yaml, ".yml": _yaml, ".toml": _toml, ".json": _json}.get(suffix.lower())
    for key, value in settings:
        if change is not None:
            text = change(text, key, value)
            continue
        text = _script(text, key, value, variables, beside)
        beside = (key, *beside)
    return text


def has(text: str, suffix: str, key: str) -> bool:
    """Whether the file sets the key."""
    suffix = suffix.lower()
    if suffix == ".json":
        return _inside(_loaded(text), key.split("."))[1]
    if suffix in (".yaml", ".yml"):
        return any(line.path == tuple(key.split(".")) for line in _yaml_lines(text.split("\n")))
    if suffix == ".toml":
        return _toml_line(text.split("\n"), key)[0] is not None
    return next(_flags(text, key), None) is not None


# Scripts


_VALUE = r"(?:\$\([^()]*\)|\$\{[^{}]*\}|\"[^\"\n]*\"|'[^'\n]*'|[^\s\\()\"'])+"
"""A word of a shell command, as far as it is written on one line."""


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


def _flags(text: str, key: str) -> Iterator[_Flag]:
    """Places of a flag outside of comments. `-` and `_` in its name are one, as they are to argparse's users."""
    name = re.sub("[-_]", "[-_]", re.escape(key).replace("\\-", "-"))
    for found in re.finditer(rf"(?<![\w$-])--{name}(?![\w-])", text):
        if _in_comment(text, found.start()):
            continue
        at, values = found.end(), list[tuple[int, int]]()
        if text[at : at + 1] == "=":
            word = re.compile(_VALUE).match(text, at + 1)
            values = [] if word is None else [word.span()]
        else:
            while word := re.compile(rf"[ \t]+(?!-[-\w]*[A-Za-z]|#)(?=({_VALUE}))").match(text, at):
                if _ends_command(word.group(1)):
                    break
                values.append(word.span(1))
                at = word.end(1)
        yield _Flag(found.start(), found.end(), values[-1][1] if values else found.end(), tuple(values))


def _ends_command(word: str) -> bool:
    return word[0] in "|&;<>" or re.match(r"\d>", word) is not None or word.startswith("${@") or word in ("$@", '"$@"')


def _in_comment(text: str, at: int) -> bool:
    start = text.rfind("\n", 0, at) + 1
    return re.search(r"(^|\s)#", text[start:at]) is not None


def _script(text: str, key: str, value: object, variables: bool, beside: Sequence[str]) -> str:
    places = list(_flags(text, key))
    if value is REMOVED or value is False:
        for place in reversed(places):
            text = _without(text, place)
        return text
    words = [] if value is True else [quote(str(one)) for one in _several(value)]
    if not places:
        return _with_flag(text, " ".join([f"--{key}", *words]), beside)
    for place in reversed(places):
        text = _with_values(text, place, words, variables)
    return text


def _several(value: object) -> Sequence[object]:
    return value if isinstance(value, (list, tuple)) else (value,)


def _without(text: str, place: _Flag) -> str:
    """The text less a flag, and less its line where nothing else is on it."""
    start, end = text.rfind("\n", 0, place.start) + 1, text.find("\n", place.end)
    end = len(text) if end < 0 else end
    before, after = text[start : place.start], text[place.end : end]
    if not before.strip() and after.strip() in ("", "\\"):
        return text[:start] + text[end + 1 :]
    return text[: place.start].rstrip(" \t") + text[place.end :]


def _with_values(text: str, place: _Flag, words: Sequence[str], variables: bool) -> str:
    if variables and len(words) == 1 and len(place.values) == 1:
        written = text[slice(*place.values[0])].strip("\"'")
        variable = re.fullmatch(r"\$(\w+)|\$\{(\w+)(:?-[^{}]*)?\}", written)
        if variable is not None:
            changed = _assigned(text, variable[1] or variable[2], words[0])
            if changed is not None:
                return changed
    start = place.values[0][0] if place.values else place.name_end
    gap = "" if place.values or not words else " "
    return text[:start] + gap + " ".join(words) + text[place.end if place.values else start :]


def _assigned(text: str, name: str, word: str) -> str | None:
    """The text with another value where a variable gets its only one; None where it has none or several. A default,
    `${NAME:-4}`, is what is changed of one that the environment may set."""
    lines = re.compile(rf"^[ \t]*(?:export[ \t]+|declare[ \t]+|local[ \t]+)*{name}=(?P<value>{_VALUE})?", re.MULTILINE)
    found = [one for one in lines.finditer(text) if one["value"]]
    if len(found) != 1:
        return None
    start, end = found[0].span("value")
    default = re.fullmatch(r"(\"?\$\{\w+:?-)[^{}]*(\}\"?)", found[0]["value"])
    if default is not None:
        word = f"{default[1]}{word}{default[2]}"
    elif "$" in found[0]["value"]:
        return None  # computed of others
    return text[:start] + word + text[end:]


def _with_flag(text: str, flag: str, beside: Sequence[str]) -> str:
    """The text with a further flag, on a line of its own where flags have theirs."""
    place = next((place for name in beside if (place := next(_flags(text, name), None)) is not None), None)
    if place is None:
        raise InputError(f"the script has no flag near which {flag} could be put; add it by hand")
    start, end = text.rfind("\n", 0, place.start) + 1, text.find("\n", place.end)
    end = len(text) if end < 0 else end
    before, after = text[start : place.start], text[place.end : end]
    if before.strip() or after.strip() not in ("", "\\"):
        return f"{text[: place.end]} {flag}{text[place.end :]}"
    continued = " \\" if after.strip() else ""
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
    value: str
    """What follows the colon, less a comment; empty where a block follows."""
    value_at: tuple[int, int]
    """Where that is in the line."""


_KEY = re.compile(r"(?P<indent> *)(?P<key>[\w./-]+|\"[^\"]*\"|'[^']*'):(?=\s|$)")
_SCALAR = re.compile(r"\s*(?P<value>\"[^\"]*\"|'[^']*'|\[[^\]]*\]|\{[^}]*\}|(?:[^\s#]|\s(?!\s*#|\s*$)|(?<=\S)#)*)")


def _yaml_lines(lines: Sequence[str]) -> Iterator[_Line]:
    """Lines that give keys of mappings, those inside of lists left out."""
    above: list[tuple[int, str]] = []
    hidden = -1
    for number, line in enumerate(lines):
        bare = line.strip()
        if not bare or bare.startswith("#"):
            continue
        indent = len(line) - len(line.lstrip(" "))
        if bare.startswith("- "):
            hidden = indent
            continue
        if 0 <= hidden < indent:
            continue
        hidden = -1
        found = _KEY.match(line)
        if found is None:
            continue
        while above and above[-1][0] >= indent:
            above.pop()
        above.append((indent, found["key"].strip("\"'")))
        scalar = _SCALAR.match(line, found.end())
        assert scalar is not None
        yield _Line(number, indent, tuple(key for _, key in above), scalar["value"], scalar.span("value"))


def _yaml(text: str, key: str, value: object) -> str:
    lines, path = text.split("\n"), tuple(key.split("."))
    known = list(_yaml_lines(lines))
    here = next((line for line in known if line.path == path), None)
    if here is None:
        return text if value is REMOVED else "\n".join(_yaml_added(lines, known, path, value))
    if value is REMOVED:
        last = _last_of(lines, known, path)
        return "\n".join([*lines[: here.number], *lines[last + 1 :]])
    if not here.value and _last_of(lines, known, path) != here.number:
        raise InputError(f"{key} is a table in the file, and {value} is a value; change it by hand")
    start, end = here.value_at
    line = lines[here.number]
    gap = "" if line[:start].endswith(" ") else " "
    lines[here.number] = f"{line[:start]}{gap}{_scalar(value)}{line[end:]}"
    return "\n".join(lines)


def _last_of(lines: Sequence[str], known: Sequence[_Line], path: tuple[str, ...]) -> int:
    """Number of the last line that belongs to a key."""
    first = next(line for line in known if line.path == path)
    last = first.number
    for number in range(first.number + 1, len(lines)):
        bare = lines[number].strip()
        if not bare or bare.startswith("#"):
            continue
        indent = len(lines[number]) - len(lines[number].lstrip(" "))
        # A list may stand at its key's own column.
        if indent < first.indent or indent == first.indent and not bare.startswith("- "):
            break
        last = number
    return last


def _yaml_added(lines: Sequence[str], known: Sequence[_Line], path: tuple[str, ...], value: object) -> list[str]:
    """The lines with a further key, behind the last of the table that it is in."""
    depth = next(n for n in range(len(path) - 1, -1, -1) if n == 0 or any(line.path == path[:n] for line in known))
    step = next((line.indent for line in known if len(line.path) == 2), 2)
    if depth == 0:
        last = max((number for number, line in enumerate(lines) if line.strip() and line.strip() != "..."), default=-1)
        indent = 0
    else:
        parent = next(line for line in known if line.path == path[:depth])
        if parent.value:
            raise InputError(f"{'.'.join(path[:depth])} is {parent.value} in the file, and no table; change it by hand")
        last = _last_of(lines, known, path[:depth])
        inner = [line.indent for line in known if line.path[:-1] == path[:depth]]
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


_SECTION = re.compile(r"\s*\[\s*([\w.\"' -]+?)\s*\]\s*(#.*)?$")
_TOML_KEY = re.compile(r"\s*([\w.-]+|\"[^\"]*\")\s*=\s*")


def _sections(lines: Sequence[str]) -> Iterator[str]:
    """Names of the tables."""
    for line in lines:
        if (section := _SECTION.match(line)) is not None:
            yield section[1].replace(" ", "").replace('"', "")


def _toml_line(lines: Sequence[str], key: str) -> tuple[int | None, int | None, int | None]:
    """(number of the line with the key, of the line that opens its table, of the last line of that table)."""
    table, _, name = key.rpartition(".")
    current, opened, last, at = "", -1 if not table else None, -1 if not table else None, None
    for number, line in enumerate(lines):
        if (section := _SECTION.match(line)) is not None:
            current = section[1].replace(" ", "").replace('"', "")
            if current == table:
                opened = last = number
            continue
        if current != table or not line.strip():
            continue
        if not line.lstrip().startswith("#"):
            last = number
        found = _TOML_KEY.match(line)
        if found is not None and found[1].strip('"') == name:
            at = number
    return at, opened, last


def _toml(text: str, key: str, value: object) -> str:
    lines = text.split("\n")
    at, opened, last = _toml_line(lines, key)
    table, _, name = key.rpartition(".")
    parts = table.split(".") if table else []
    above = next((n for n in range(1, len(parts) + 1) if _toml_line(lines, ".".join(parts[:n]))[0] is not None), None)
    if above is not None:
        raise InputError(f"{'.'.join(parts[:above])} is a value in the file, and no table; change it by hand")
    if any(f"{section}.".startswith(f"{key}.") for section in _sections(lines)):
        raise InputError(f"{key} is a table in the file, and no value; change it by hand")
    if value is REMOVED:
        return text if at is None else "\n".join([*lines[:at], *lines[at + 1 :]])
    written = json.dumps(list(value) if isinstance(value, tuple) else value)
    if at is not None:
        found = _TOML_KEY.match(lines[at])
        assert found is not None
        rest = lines[at][found.end() :]
        old = re.match(r"\"(?:[^\"\\]|\\.)*\"|'[^']*'|\[[^\]]*\]|[^\s#]+", rest)
        if old is None or rest.startswith(("[", "{", '"""', "'''")) and old.group() == rest[:1]:
            raise InputError(f"{key} has its value on several lines; change it by hand")
        lines[at] = lines[at][: found.end()] + written + rest[old.end() :]
        return "\n".join(lines)
    if opened is None or last is None:
        space = [] if not text.strip() else [""]
        while lines and not lines[-1].strip():
            lines.pop()
        return "\n".join([*lines, *space, f"[{table}]", f"{name} = {written}", ""])
    return "\n".join([*lines[: last + 1], f"{name} = {written}", *lines[last + 1 :]])


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


def _json(text: str, key: str, value: object) -> str:
    """The file with its own indentation; JSON has no comments that could be lost."""
    values, path = _loaded(text), key.split(".")
    table = values
    for part in path[:-1]:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise InputError(f"{part} is {json.dumps(inner)} in the file, and no table; change it by hand")
        table = inner
    if value is REMOVED:
        table.pop(path[-1], None)
    else:
        table[path[-1]] = list(value) if isinstance(value, tuple) else value
    indent = re.search(r"\n([ \t]+)\S", text)
    end = "\n" if text.endswith("\n") else ""
    return json.dumps(values, indent=indent[1] if indent else None, ensure_ascii=False) + end
