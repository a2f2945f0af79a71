"""Words of a shell script, as a shell parts them: quotes, brackets, comments, redirections and here-documents.

`lex(text)` yields words and operators with their lines; `closing`, `double_quote_end` and `bracket_end` find where what
was opened ends. Leaves out what words mean (`shell`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from gnomon.errors import FormatError

OPERATORS = ("&&", "||", ";;", ";", "|", "&", "(", ")", "\n")

DOCUMENT = "\ue001"
"""Begins the word that stands for a here-document, quoted as its text is to be expanded."""

REDIRECTION = re.compile(r"(?:\d+|&)?(?:<<<|<<-?|>>|>\||<>|[<>])(?:&(?:\d+|-))?")
"""What sends a command's output elsewhere, at the start of a word."""


def lex(text: str) -> Iterator[tuple[int, str]]:
    """(line, raw word or operator); `NAME=(…)` is one word, and so is the text of a here-document, behind DOCUMENT.
    Quotes stay; comments, continuations and redirections go."""
    at, line, size = 0, 1, len(text)
    double = False  # within [[ ]], where < and > compare
    documents: list[str] = []  # words that end the here-documents which the next line begins
    while at < size:
        if text[at] == "\n" and documents:
            yield line, "\n"
            after = here_document_end(text, at + 1, documents)
            at, line, documents = after, line + text.count("\n", at, after), []
        elif text.startswith("\\\n", at):
            at, line = at + 2, line + 1
        elif text[at] in " \t\r":
            at += 1
        elif text[at] == "#":
            at = end if (end := text.find("\n", at)) >= 0 else size
        elif text.startswith("[[", at) and text[at + 2 : at + 3] in " \t":
            yield line, "[["
            at, double = at + 2, True
        elif not double and (sent := REDIRECTION.match(text, at)):
            at = sent.end()
            # 2>&1 names its target itself; of others the word that follows is the target.
            if "&" in sent[0].lstrip("&"):
                continue
            while text[at : at + 1] in (" ", "\t"):
                at += 1
            stop = word_end(text, at, line)
            if "<<<" in sent[0]:
                yield line, DOCUMENT + text[at:stop]
            elif "<<" in sent[0]:
                documents.append(text[at:stop].strip("'\"\\"))
                if len(documents) == 1 and (start := text.find("\n", stop) + 1):
                    body = text[start : here_document_end(text, start, documents)].rstrip("\n").rpartition("\n")[0]
                    yield line, DOCUMENT + (f"'{body}'" if text[at] in "'\"\\" else quote(body))
            at, line = stop, line + text.count("\n", at, stop)
        elif operator := next((o for o in OPERATORS if text.startswith(o, at)), ""):
            yield line, operator
            at, line = at + len(operator), line + (operator == "\n")
        else:
            stop = word_end(text, at, line)
            double = double and text[at:stop] != "]]"
            yield line, text[at:stop]
            at, line = stop, line + text.count("\n", at, stop)


def quote(body: str) -> str:
    """The text of a here-document as a word in double quotes."""
    return '"' + body.replace('"', '\\"') + '"'


def here_document_end(text: str, at: int, ends: list[str]) -> int:
    """Position after the lines of here-documents that begin at `at`; the end of the text where one is not closed."""
    for end in ends:
        while at < len(text):
            stop = stop if (stop := text.find("\n", at)) >= 0 else len(text)
            line, at = text[at:stop], stop + 1
            if line.strip() == end:
                break
    return min(at, len(text))


def word_end(text: str, at: int, line: int) -> int:
    """End of the word that starts at `at`."""
    start = at
    while at < len(text):
        char = text[at]
        if char == "\\":
            if text.startswith("\\\n", at):
                return at
            at += 2
        elif char == "'":
            at = closing(text, at + 1, "'", line)
        elif char == '"':
            at = double_quote_end(text, at + 1, line)
        elif text.startswith(("$(", "${"), at):
            at = bracket_end(text, at + 1, line)
        elif char == "`":
            at = closing(text, at + 1, "`", line)
        elif char == "(" and text[at - 1] == "=" and at > start:
            at = bracket_end(text, at, line)
        elif char in " \t\r\n;|&()" or (char in "<>" and at > start):
            break
        else:
            at += 1
    # At least one character, so that `lex` gets on.
    return max(at, start + 1)


def closing(text: str, at: int, quote: str, line: int) -> int:
    """Position after the next `quote`."""
    if (end := text.find(quote, at)) < 0:
        raise FormatError(f"a {quote} is opened and never closed; close it", f"line {line}")
    return end + 1


def double_quote_end(text: str, at: int, line: int) -> int:
    """Position after the `"` that closes what opened before `at`."""
    while at < len(text):
        if text[at] == "\\":
            at += 2
        elif text[at] == '"':
            return at + 1
        elif text.startswith(("$(", "${"), at):
            at = bracket_end(text, at + 1, line)
        else:
            at += 1
    raise FormatError('a " is opened and never closed; close it', f"line {line}")


def bracket_end(text: str, at: int, line: int) -> int:
    """Position after the bracket that closes the one at `at`, quotes respected; comments within arrays too."""
    pairs = {"(": ")", "{": "}"}
    opener, closer, depth, opened = text[at], pairs[text[at]], 0, at
    while at < len(text):
        char = text[at]
        if char == opener:
            depth += 1
        elif char == closer:
            depth -= 1
            if not depth:
                return at + 1
        elif char == "\\":
            at += 1
        elif char in "'`":
            at = closing(text, at + 1, char, line) - 1
        elif char == '"':
            at = double_quote_end(text, at + 1, line) - 1
        elif char == "#" and opener == "(" and text[at - 1] in " \t\n(" and not text.startswith("((", opened):
            at = (end if (end := text.find("\n", at)) >= 0 else len(text)) - 1
        at += 1
    raise FormatError(f"a {opener} is opened and never closed; close it", f"line {line}")


def command_line(text: str, option: str) -> list[str]:
    """Words of a command line that `--set OPTION=…` gives."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise FormatError(f"--set {option}={text[:60]} is no command line: {error}; close the quote", option) from None
