"""Shell scripts, read and never run: which training command a launch script ends in, with its variables filled in.

`launches(text, env)` follows assignments, arrays, `if` and `case` on strings and numbers, functions, `$((…))`,
`${X:-default}`, quoting, and scripts beside it that it sources, and returns every command that starts a Python program,
with its options. No command is executed. The body of a loop is followed once, its variable not known unless it has one
value. Leaves out: what loops count, `$(commands)`; what they would have set is marked as not known and named when it is
used.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from gnomon.errors import FormatError
from gnomon.formats.shell_values import calculate, is_integer, is_true, program_of
from gnomon.formats.shell_words import DOCUMENT, OPERATORS, bracket_end, closing, command_line, double_quote_end, lex

UNKNOWN = "\ue000"
"""Opens and closes the name of a variable whose value the script does not give: `\\ue000TP\\ue000`."""

ARGUMENTS = "args"
"""Name under which the script's whole command line is given: `--set args="dsw 7B 1 8"`."""

MAX_SCRIPT = 2**18
"""Characters of a script; the longest launch scripts have some ten thousand."""

MAX_WORDS = 200_000
"""Words that a script may expand to; more is a mistake or an attack."""

PLAIN = re.compile(r"[^\\'\"$`]+")
"""What stands for itself outside quotes."""

Value = str | list[str]
Command = tuple[int, list[str]]
"""(line, raw words) of a simple command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command that starts a Python program."""

    launcher: tuple[str, ...]
    """Words before the program: `torchrun --nnodes 4`, `srun`, `python`."""
    program: str
    """The `.py` file or module."""
    options: tuple[str, ...]
    """Words after the program."""
    line: int
    """Where it stands."""


@dataclass(slots=True)
class Script:
    """State while a script is followed."""

    variables: dict[str, Value]
    launches: list[Launch] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """What was not followed, one phrase each."""
    words: int = 0
    """Expanded so far."""
    doubtful: set[tuple[int, int]] = field(default_factory=set)
    """(nesting, line) of each open `if` whose test is not known."""
    fixed: frozenset[str] = frozenset()
    """Variables that keep their value whatever the script assigns."""
    devices: int | None = None
    """Of the machine that it runs on, where somebody says."""
    folder: Path | None = None
    """Where the script lies; what it sources is looked for there."""
    functions: dict[str, list[Command]] = field(default_factory=dict)
    """Commands of each function, by name."""
    loops: int = 0
    """Loops open around the command that is followed."""
    read: set[str] = field(default_factory=set)
    """Names of the variables that the script uses."""
    fresh: set[str] = field(default_factory=set)
    """Variables that the body of the open loop has set anew."""
    shifted: int = 0
    """Positional parameters that `shift` has taken away."""


def launches(
    text: str,
    env: Mapping[str, str],
    fixed: Mapping[str, str] | None = None,
    folder: Path | None = None,
    devices: int | None = None,
) -> Script:
    """The script followed to its end. fixed: values that assignments do not change. folder: the script's, for what it
    sources. devices: of the machine that it runs on, for scripts that count them. FormatError with the line of a quote
    or bracket that is not closed."""
    fixed = dict(fixed or {})
    arguments = fixed.pop(ARGUMENTS, "")
    script = Script(variables={**env, **fixed}, fixed=frozenset(fixed), folder=folder, devices=devices)
    # The script's own arguments, where somebody gives them: `$1` and on.
    for number, word in enumerate(command_line(arguments, ARGUMENTS), 1):
        script.variables[str(number)] = word
    script.read.add(ARGUMENTS)
    if len(text) > MAX_SCRIPT:
        raise FormatError(f"a script of {len(text)} characters; the limit is {MAX_SCRIPT}", "line 1")
    try:
        run(text, script, depth=0)
    except RecursionError:
        raise FormatError(
            "quotes and brackets are nested too deeply; give the training command itself", "line 1"
        ) from None
    return script


COMPARED = re.compile(r"""\[\s*"?\$\{?\w+\}?"?\s*==?\s*["']?([\w.-]+)["']?\s*\]""")
"""A test of a variable against a word."""


def branches(text: str) -> tuple[str, ...]:
    """Words that a script's tests compare variables with, where its first argument is what chooses among them; none
    for a script that takes no argument."""
    return tuple(dict.fromkeys(COMPARED.findall(text)))[:8] if re.search(r"\$\{?1\b", text) else ()


def unknown(text: str) -> str | None:
    """Name of the first variable in `text` that the script does not give, or None."""
    variable = offered(text)
    return None if variable is None else variable[0]


def offered(text: str) -> tuple[str, str] | None:
    """(name of the first variable that the script does not give, a value that it may have or nothing)."""
    match = re.search(f"{UNKNOWN}([^{UNKNOWN}]*){UNKNOWN}", text)
    if match is None:
        return None
    pair = re.fullmatch(r"(\w+)=(.*)", match[1], re.DOTALL)
    return (pair[1], pair[2]) if pair else (match[1], "")


def run(text: str, script: Script, depth: int) -> None:
    """Follow the commands of `text`, one after the other."""
    follow(iter(commands(text)), script, depth)


def follow(stream: Iterator[Command], script: Script, depth: int) -> None:
    """Follow commands, one after the other."""
    # eval, sh -c, functions and source nest; a script that calls itself would never end.
    if depth > 8:
        raise FormatError("commands that contain commands more than 8 deep; give the training command itself", "line 1")
    # Tests nest: a command counts only where every open branch is followed.
    branches: list[bool | None] = []  # of each open `if`: is its branch followed; None once one has been
    for line, words in stream:
        head = words[0]
        if head in ("do", ";;"):
            words = words[1:]
        elif head == "done":
            script.loops = max(0, script.loops - 1)
            script.fresh = script.fresh if script.loops else set()
            continue
        # Within a branch that is not followed: what it would set is not known afterwards.
        elif not all(b is True for b in branches) and head in (*LOOPS, "case"):
            mark(body_of(stream, words, "esac" if head == "case" else "done"), script)
            continue
        elif head in LOOPS:
            open_loop(line, words, stream, script)
            continue
        elif head == "case":
            follow_case(line, words, stream, script, depth)
            continue
        elif head == "function" or is_function(words):
            name = words[1] if head == "function" else words[0]
            rest = words[words.index("{") + 1 :] if "{" in words else []
            body = body_of(stream, words, "}")
            first: list[Command] = [(line, rest)] if rest and rest != ["}"] else []
            # Followed where it is called, with the variables of that moment, as a shell does.
            script.functions[name.removesuffix("()")] = [*first, *body]
            continue
        if words:
            follow_command(line, words, script, branches, depth)


LOOPS = ("for", "while", "until", "select")


def body_of(stream: Iterator[Command], opened: list[str], end: str) -> list[Command]:
    """The commands up to the word that ends what `opened` began: `done`, `esac` or `}`."""
    openers = {"done": LOOPS, "esac": ("case",), "}": ("{",)}[end]
    body: list[Command] = []
    nested = 1
    if end in opened[1:]:
        return body
    for line, words in stream:
        nested += words[0] in openers or (end == "}" and words[-1] == "{" and len(words) > 1)
        nested -= words.count(end) if end == "}" else words[0] == end
        if nested <= 0:
            if len(words) > 1:
                body.append((line, [w for w in words if w != end]))
            break
        body.append((line, words))
    return body


def mark(body: list[Command], script: Script) -> None:
    """Count what a construct that is not followed would assign as not known."""
    for _, words in body:
        while words and words[0] in ("export", "local", "then", "else", "do", ")"):
            words = words[1:]
        words = words[words.index(")") + 1 :] if ")" in words[:4] else words
        if words and (match := re.match(r"([A-Za-z_]\w*)\+?=", words[0])) and match[1] not in script.fixed:
            script.variables[match[1]] = f"{UNKNOWN}{match[1]}{UNKNOWN}"


def open_loop(line: int, words: list[str], stream: Iterator[Command], script: Script) -> None:
    """The head of a loop: its body is followed once where its values are listed or it goes on for ever; one that is
    known not to start is left out, another is not followed."""
    kind = words[0]
    if kind == "for" and len(words) > 2 and words[2] == "in":
        values = [w for raw in words[3:] for w in expand(raw, script)]
        name = words[1]
        if name not in script.fixed:
            # The name carries the first value along, which a message can offer.
            offer = f"={values[0]}" if values and unknown(values[0]) is None and len(values[0]) < 60 else ""
            script.variables[name] = values[0] if len(values) == 1 else f"{UNKNOWN}{name}{offer}{UNKNOWN}"
        # One value: the body runs once, and what it counts is known.
        script.loops += 1 if len(values) != 1 else 0
        if values:
            return
    elif kind in ("while", "until"):
        # A loop that restarts the training until it succeeds starts the same one each time.
        if words[1:] in (["true"], [":"]):
            script.loops += 1
            return
        # Options of a script that nobody gave: the loop ends at once.
        if kind == "while" and (words[1:2] == ["getopts"] or condition(words[1:], script) is False):
            body_of(stream, words, "done")
            return
    script.skipped.append(f"{kind} on line {line}")
    mark(body_of(stream, words, "done"), script)


def follow_case(line: int, words: list[str], stream: Iterator[Command], script: Script, depth: int) -> None:
    """`case WORD in PATTERN) … ;; esac`: the commands of the first pattern that fits; none where WORD is not known."""
    body = body_of(stream, words, "esac")
    subject = word_value(words[1], script) if len(words) > 1 else ""
    first = words[3:]
    clauses: list[tuple[list[str], list[Command]]] = []
    patterns: list[str] | None = []
    for at, part in [(line, first), *body] if first else body:
        if part == [";;"]:
            patterns = []
        elif patterns is not None:
            ends = part.index(")") if ")" in part else len(part)
            patterns += [word_value(raw, script) for raw in part[:ends] if raw not in ("(", "esac")]
            if ends < len(part):
                clauses.append((patterns, [(at, part[ends + 1 :])] if part[ends + 1 :] else []))
                patterns = None
        elif clauses:
            clauses[-1][1].append((at, part))
    # All clauses count as not followed, so whatever any of them sets is unknown afterwards.
    if unknown(subject) is not None:
        script.skipped.append(f"case on line {line}: its word is not known from the script")
        mark([command for _, part in clauses for command in part], script)
        return
    # The first that fits ends it, as `;;` does.
    for spelled, commands_of in clauses:
        if any(fnmatchcase(subject, pattern) for pattern in spelled):
            follow(iter(commands_of), script, depth + 1)
            return


def is_function(words: list[str]) -> bool:
    """Whether a command opens a function: `name ( ) {`."""
    return (words[1:3] == ["(", ")"] or words[0].endswith("()")) and words[0].removesuffix("()").isidentifier()


def follow_command(line: int, words: list[str], script: Script, branches: list[bool | None], depth: int) -> None:
    """One simple command, or one of `if`, `elif`, `else`, `fi` with its condition."""
    head = words[0]
    if head in ("then", "else"):
        if head == "else" and branches:
            branches[-1] = True if branches[-1] is False else None
        words = words[1:]
    elif head in ("if", "elif"):
        outer = all(b is True for b in branches[: len(branches) - (head == "elif")])
        met = condition(words[1:], script) if outer else False
        # A test on files or commands: its branch is left out, and remembered, should it hold something that matters.
        if met is None:
            met, script.doubtful = False, script.doubtful | {(len(branches) + (head == "if"), line)}
        if head == "if":
            branches.append(met)
        elif branches:
            # None once one branch has been followed: no later elif or else of this `if` may be.
            branches[-1] = met if branches[-1] is False else None
        return
    elif head == "fi":
        script.doubtful = {(depth, line) for depth, line in script.doubtful if depth < len(branches)}
        if branches:
            branches.pop()
        return
    if not all(b is True for b in branches):
        # Left out: it matters only if it sets or starts something, and only if the test might have been true.
        if re.match(r"(export )?\w+\+?=|.*\.py\b|eval\b", " ".join(words)):
            phrases = (f"if on line {line}: its condition is not known from the script" for _, line in script.doubtful)
            script.skipped += [phrase for phrase in phrases if phrase not in script.skipped]
        return
    if words:
        simple_command(line, [w for w in words if w not in ("{", "}", "(", ")")], script, depth)


def commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """(line, raw words) of each simple command; operators that join commands part them."""
    words: list[str] = []
    first = 1
    double = False
    for line, token in lex(text):
        if token == "[[":
            double = True
        elif token == "]]":
            double = False
        testing = words[:1] in (["if"], ["elif"]) and token in ("&&", "||")  # joins tests, not commands
        if token in OPERATORS and token not in "()" and not double and not testing:
            if words:
                yield first, words
            if token == ";;":
                yield line, [token]
            words = []
            continue
        if token.startswith(DOCUMENT):  # what a command is fed matters where it reads it into a variable
            if "read" in words[:2] and words[-1].isidentifier():
                words.append(token)
            continue
        if not words:
            first = line
        words.append(token)
        if len(words) > MAX_WORDS:
            raise FormatError(
                f"a command has over {MAX_WORDS} words; give the training command itself", f"line {first}"
            )
        if token in ("then", "else", "do") and len(words) == 1:
            yield first, words
            words = []
    if words:
        yield first, words


def condition(words: list[str], script: Script) -> bool | None:
    """Value of a test on strings or numbers; None when it cannot be known from the script (files, commands)."""
    test = [w for raw in words for w in ([raw] if raw in ("[", "[[", "]", "]]", "!") else [word_value(raw, script)])]
    test = [w for w in test if w not in ("[", "[[", "]", "]]")]
    parts = re.split(r"\0(&&|\|\||-a|-o)\0", "\0".join(test))
    value: bool | None = None
    for index in range(0, len(parts), 2):
        # A variable that nobody gives is empty for the shell, too.
        one = is_true(["" if unknown(w) is not None else w for w in parts[index].split("\0")])
        if one is None:
            return None
        joiner = parts[index - 1] if index else ""
        # From left to right with equal precedence, as a shell joins tests.
        value = one if value is None else (value and one) if joiner in ("&&", "-a") else (value or one)
    return bool(value)


def simple_command(line: int, words: list[str], script: Script, depth: int) -> None:
    """Assignments change the variables; a command that starts Python is kept; `eval` and `sh -c` are followed."""
    while words and words[0] in ("export", "local", "readonly", "declare", "time", "exec", "-a", "-x", "-r"):
        words = words[1:]
    separator = ""
    while words and (match := re.match(r"([A-Za-z_]\w*)(\+?)=", words[0])):
        # In front of a command it holds for that command: `IFS=, read -r A B`.
        if match[1] == "IFS" and len(words) > 1:
            separator = word_value(words[0][4:], script)
        assign(match[1], words[0][match.end() :], bool(match[2]), script)
        words = words[1:]
    if words and words[-1].startswith(DOCUMENT):
        read_into(words, separator, script)
        return
    expanded = [w for raw in words for w in expand(raw, script)]
    script.words += len(expanded)
    if script.words > MAX_WORDS:
        raise FormatError(f"the script expands to over {MAX_WORDS} words; give the training command", f"line {line}")
    if not expanded:
        return
    if expanded[0] in script.functions:
        called = {str(i): word for i, word in enumerate(expanded[1:], 1)}
        # A function's arguments hide the script's, until it returns.
        outer = {name: script.variables.get(name) for name in called}
        script.variables.update(called)
        follow(iter(script.functions[expanded[0]]), script, depth + 1)
        for name, value in outer.items():
            script.variables.pop(name)
            if value is not None:
                script.variables[name] = value
        return
    if expanded[0] == "shift":
        shift(int(expanded[1]) if expanded[1:2] and is_integer(expanded[1]) else 1, script)
        return
    # What it reads is outside the script.
    if expanded[0] in ("read", "mapfile") or expanded[:2] == ["printf", "-v"]:
        for name in expanded[1:]:
            if name.isidentifier() and name not in script.fixed:
                script.variables[name] = f"{UNKNOWN}{name}{UNKNOWN}"
        return
    if expanded[0] in ("source", ".") and len(expanded) > 1:
        follow_source(line, expanded[1], script, depth)
        return
    if expanded[0] == "eval":
        run(" ".join(expanded[1:]), script, depth + 1)
        return
    for index, word in enumerate(expanded[:-1]):
        if word in ("-c", "-lc") and index and expanded[index - 1].rsplit("/", 1)[-1] in ("sh", "bash"):
            run(expanded[index + 1], script, depth + 1)
            return
    # Any launcher may stand in front: srun, torchrun, env, a container's.
    place = program_of(expanded)
    if place is not None and expanded[0] not in ("echo", "cp", "ls", "cat", "mkdir", "cd", "rm", "printf"):
        launch = Launch(
            launcher=tuple(expanded[:place]),
            program=expanded[place],
            options=tuple(expanded[place + 1 :]),
            line=line,
        )
        script.launches.append(launch)


def read_into(words: list[str], separator: str, script: Script) -> None:
    """`read … A B <<< TEXT`, or a here-document: the names take the parts of the text, the last one the rest. Names of
    a text that is not known are not known by the text's own variable."""
    raw = words.pop()[1:]
    names = [word for word in words[1:] if word.isidentifier()]
    if raw.startswith("'") or len(names) < 2:
        assign(names[-1], raw, False, script)
        return
    text = word_value(raw, script)
    parts = text.split(separator or None, len(names) - 1)
    for at, name in enumerate(names):
        if name not in script.fixed:
            script.variables[name] = text if unknown(text) is not None else parts[at] if at < len(parts) else ""
            script.fresh.add(name)


def positions(script: Script) -> list[str]:
    """Names of the positional parameters that are set, `1` and on."""
    count = 0
    while str(count + 1) in script.variables:
        count += 1
    return [str(number + 1) for number in range(count)]


def shift(count: int, script: Script) -> None:
    """Move the positional parameters down. Of a script whose parameters are not given, the next is not known by its
    own number: `$1` after `shift 2` is `3`."""
    script.shifted += count
    values = [script.variables.pop(name) for name in positions(script)]
    script.variables.update({str(i): value for i, value in enumerate(values[count:], 1)})


def follow_source(line: int, name: str, script: Script, depth: int) -> None:
    """A script that this one sources by a path from where it lies; a folder that is not known is this script's."""
    # `source "$SCRIPT_DIR/env.sh"`, where SCRIPT_DIR is found by a command.
    below = re.sub(f"^{UNKNOWN}[^{UNKNOWN}]*{UNKNOWN}/?", "", name)
    outside = script.folder is None or unknown(below) is not None or below.startswith(("/", "~"))
    path = None if outside or script.folder is None else script.folder / below
    try:
        text = None if path is None or not path.is_file() else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError):
        text = None
    if text is None or len(text) > MAX_SCRIPT:
        script.skipped.append(f"source of {below or name} on line {line}")
        return
    run(text, script, depth + 1)


def assign(name: str, raw: str, is_counter: bool, script: Script) -> None:
    """Carries out `name=raw`, or `name+=raw`."""
    if name in script.fixed:
        return
    # A counter's value depends on how often the loop ran, which is not known; what is set anew each time is.
    if script.loops and name not in script.fresh:
        if is_counter or re.search(rf"\b{name}\b", raw):  # what a loop counts
            script.variables[name] = f"{UNKNOWN}{name}{UNKNOWN}"
            return
        script.fresh.add(name)
    old = script.variables.get(name, "")
    if raw.startswith("("):
        items = [w for _, word in lex(raw[1:-1]) if word not in OPERATORS for w in expand(word, script)]
        before = (old if isinstance(old, list) else [old] if old else []) if is_counter else []
        script.words += len(items) + len(before)
        if script.words > MAX_WORDS:
            raise FormatError(f"array {name} grows beyond {MAX_WORDS} words; give the training command", f"{name}")
        script.variables[name] = [*before, *items]
        return
    text = word_value(raw, script)
    if f"{UNKNOWN}$(command){UNKNOWN}" in text:  # by the name under which somebody can say it
        text = text.replace(f"{UNKNOWN}$(command){UNKNOWN}", f"{UNKNOWN}{name}{UNKNOWN}")
    if is_counter and isinstance(old, list):
        script.variables[name] = [*old, text]
    else:
        script.variables[name] = ((old if isinstance(old, str) else "") if is_counter else "") + text
    # Bounds memory: values that double each other grow exponentially.
    script.words += len(text) // 8
    if script.words > MAX_WORDS:
        raise FormatError(f"variable {name} grows beyond what a job needs; give the training command", f"{name}")


def word_value(raw: str, script: Script) -> str:
    """A word's value as one string, not split."""
    return " ".join(expand(raw, script, split=False))


def expand(raw: str, script: Script, *, split: bool = True) -> list[str]:
    """The words that one raw word becomes: variables filled in, unquoted results split at blanks, quotes removed."""
    words: list[str] = [""]
    present = False  # an empty quoted string is a word; an empty variable is none
    at = 0
    while at < len(raw):
        char = raw[at]
        if char == "\\":
            words[-1] += raw[at + 1 : at + 2].replace("\n", "")
            at += 2
        elif char == "'":
            end = closing(raw, at + 1, "'", 1)
            words[-1] += raw[at + 1 : end - 1]
            at, present = end, True
        elif char == '"':
            end = double_quote_end(raw, at + 1, 1)
            parts = quoted(raw[at + 1 : end - 1], script)
            words[-1] += parts[0] if parts else ""
            words += parts[1:]
            at, present = end, present or bool(parts)
        elif char in "$`":
            value, at = substitute(raw, at, script)
            text = " ".join(value) if isinstance(value, list) else value
            # An unquoted variable with blanks is several words.
            pieces = text.split() if split else [text]
            # Blanks at the front end the word so far.
            if split and text[:1].isspace() and words[-1]:
                words.append("")
            words[-1] += pieces[0] if pieces else ""
            words += pieces[1:]
        else:
            plain = PLAIN.match(raw, at)
            stop = plain.end() if plain else at + 1
            words[-1] += raw[at:stop]
            at = stop
    return words if present else [w for w in words if w] if split else words


def quoted(text: str, script: Script) -> list[str]:
    """The inside of double quotes: one word, or one for each item of `${array[@]}`."""
    words = [""]
    at = 0
    while at < len(text):
        if text[at] == "\\":
            following = text[at + 1 : at + 2]
            words[-1] += "" if following == "\n" else following if following in '"\\$`' else text[at : at + 2]
            at += 2
        elif text[at] in "$`":
            value, at = substitute(text, at, script)
            if isinstance(value, list):
                # "${empty[@]}" alone is no word at all, unlike "$empty".
                if not value and words == [""] and at >= len(text):
                    return []
                words[-1] += value[0] if value else ""
                words += value[1:]
            else:
                words[-1] += value
        else:
            words[-1] += text[at]
            at += 1
    return words


COUNTED = re.compile(r"\s*expr\s+([^|;&<>]*?)\s*", re.DOTALL)
"""A command that computes with whole numbers, as `expr 16 / $GPUS`, `expr $A \\* 2`."""


GPUS = re.compile(r"\s*(nvidia-smi|rocm-smi)\s[^|;&]*\|\s*(wc\s+-l|grep\s+-c\s+\S+)\s*", re.DOTALL)
"""A command that counts the GPUs of the machine that the script runs on."""


def substitute(text: str, at: int, script: Script) -> tuple[Value, int]:
    """(value of the `$…` at `at`, position after it)."""
    if text[at] == "`":
        end = closing(text, at + 1, "`", 1)
        if (counted := COUNTED.fullmatch(text[at + 1 : end - 1])) is not None:
            return arithmetic(counted[1].replace("\\", "").replace("'", ""), script), end
        return f"{UNKNOWN}`command`{UNKNOWN}", end
    if text.startswith("$((", at):
        end = bracket_end(text, at + 1, 1)
        return arithmetic(text[at + 3 : end - 2], script), end
    if text.startswith("$(", at):
        end = bracket_end(text, at + 1, 1)
        # `$(test … && echo 1 || echo 0)`: the second is what a machine without the thing prints.
        if choice := re.search(r"&&\s*echo\s+(\w+)\s*\|\|\s*echo\s+(\w+)\s*\)$", text[at:end]):
            phrase = f"a command that prints {choice[1]} or {choice[2]}: taken as {choice[2]}"
            script.skipped += [phrase] if phrase not in script.skipped else []
            return choice[2], end
        if (counted := COUNTED.fullmatch(text[at + 2 : end - 1])) is not None:
            return arithmetic(counted[1].replace("\\", "").replace("'", ""), script), end
        # The command is not run: this machine need not be the one that trains.
        if script.devices and GPUS.fullmatch(text[at + 2 : end - 1]) is not None:
            phrase = f"a command that counts GPUs of a machine: taken as {script.devices}"
            script.skipped += [phrase] if phrase not in script.skipped else []
            return str(script.devices), end
        return f"{UNKNOWN}$(command){UNKNOWN}", end
    if text.startswith("${", at):
        end = bracket_end(text, at + 1, 1)
        return parameter(text[at + 2 : end - 1], script), end
    match = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!]").match(text, at + 1)
    if not match:
        return "$", at + 1
    return parameter(match[0], script), match.end()


def parameter(inside: str, script: Script) -> Value:
    """Evaluates `${inside}`: a name, `name[@]`, `name[2]`, `name:-default`, `#name[@]`; others are not known."""
    if inside == "#":
        return str(sum(name.isdecimal() and name != "0" for name in script.variables))
    match = re.fullmatch(r"([A-Za-z_]\w*|\d+|[@*])(\[[@*\d]+\])?(?:(:?[-=+?])(.*))?", inside, re.DOTALL)
    if not match:
        return f"{UNKNOWN}{inside.replace(UNKNOWN, '')}{UNKNOWN}"
    name, index, operator, default = match.groups()
    script.read.add(name)
    value: Value | None = script.variables.get(name)
    if isinstance(value, list):
        if index in ("[@]", "[*]"):
            return value
        place = int(index[1:-1]) if index else 0
        value = value[place] if place < len(value) else None
    if value is not None and index in ("[@]", "[*]"):
        value = [value]
    missing = value is None or (operator and operator.startswith(":") and value == "")
    if operator and operator.endswith("+"):
        return "" if missing else word_value(default, script)
    if missing and operator and operator[-1] in "-=":
        # Quoted, so that a default with blanks stays one word.
        return word_value(f'"{default}"' if '"' not in default else default, script)
    if value is None and name in "@*":
        return [str(script.variables[position]) for position in positions(script)]
    # `$1` after `shift 2` is what the caller knows as the third argument.
    if value is None and name.isdecimal() and script.shifted:
        name = str(int(name) + script.shifted)
    if value is None:
        return f"{UNKNOWN}{name}{UNKNOWN}"
    return value


def arithmetic(text: str, script: Script) -> str:
    """Value of `$((text))` for + - * / % on integers; not known otherwise."""
    # Within $((…)) a bare name is a variable.
    filled = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda m: word_value(f"${m[1]}", script), text)
    if (name := unknown(filled)) is not None:
        return f"{UNKNOWN}{name}{UNKNOWN}"
    try:
        if len(filled) > 1000:
            raise ValueError
        # The grammar of sums is Python's too; only the tree's numbers and + - * / % are evaluated, nothing is run.
        return str(calculate(ast.parse(filled.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return f"{UNKNOWN}$(({text.replace(UNKNOWN, '')})){UNKNOWN}"
