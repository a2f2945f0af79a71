"""Conversations as text by a chat template, and which of its characters are to be learnt.

`ChatTemplate(source).render(messages)` returns the text and the spans of it that the assistant says. Templates are
Jinja in the dialect of transformers, run in Jinja's sandbox. What is learnt is what `{% generation %}` encloses where a
template has it, or else the part that each assistant message adds to the conversation before it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from gnomon.errors import InputError

OPEN, CLOSE = "\ue0f0", "\ue0f1"
"""Private characters that stand around what `{% generation %}` encloses until the spans are read off."""
Spans = tuple[tuple[int, int], ...]


class ChatTemplate:
    """A compiled chat template. specials: `bos_token` and the like, which templates write themselves."""

    def __init__(self, source: str, specials: Mapping[str, str], where: str) -> None:
        self.where, self.specials = where, dict(specials)
        self.marks = "generation" in source and "endgeneration" in source
        environment, self.error, variables_of = _environment()
        try:
            self.template = environment.from_string(source)
            self.reads = variables_of(environment.parse(source))
            """Variables that it has from outside."""
        except self.error as error:
            raise InputError(f"{where}: the chat template does not compile: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], at: str) -> tuple[str, Spans]:
        """(text, spans of it to be learnt). InputError where the template refuses the conversation, or where no part of
        it can be told to be the assistant's."""
        text = self._text(messages, at)
        if self.marks:
            return _spans(text)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            # With the opening of the assistant's turn, which the template writes and nobody is to learn.
            before = self._text(messages[:number], at, prompts=True)
            after = self._text(messages[: number + 1], at)
            if not (after.startswith(before) and text.startswith(after)):
                raise InputError(
                    f"{at}: the chat template of {self.where} rewrites earlier messages when one is added, so what the "
                    f"assistant says cannot be told apart; give a template with {{% generation %}} around it "
                    f"(--chat-template)"
                )
            spans.append((len(before), len(after)))
        return text, tuple(spans)

    def text(self, messages: Sequence[Mapping[str, Any]], at: str) -> str:
        """A conversation without marks, of which nothing is told apart."""
        return self._text(messages, at).replace(OPEN, "").replace(CLOSE, "")

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        opens: bool = True,
        **variables: Any,
    ) -> str:
        """What stands before the assistant's next words, without marks. tools: functions that it may call. opens:
        whether its turn is begun. variables: further ones of the template."""
        text = self._text(messages, "the conversation", prompts=opens, tools=list(tools) or None, **variables)
        return text.replace(OPEN, "").replace(CLOSE, "")

    def _text(self, messages: Sequence[Mapping[str, Any]], at: str, *, prompts: bool = False, **variables: Any) -> str:
        """Renders messages by the template; no message renders as no text. prompts: with what stands before the
        assistant's next words."""
        if not messages:
            return ""
        try:
            text: str = self.template.render(
                messages=list(messages), add_generation_prompt=prompts, **self.specials, **variables
            )
        except (self.error, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise InputError(f"{at}: the chat template of {self.where} refuses it: {error}") from error
        return text


def _spans(text: str) -> tuple[str, Spans]:
    """The text without marks, and what stood between them."""
    out, spans, length = list[str](), [], 0
    # Outside and inside in turn: odd parts stood between marks.
    for number, part in enumerate(text.replace(CLOSE, OPEN).split(OPEN)):
        if number % 2:
            spans.append((length, length + len(part)))
        out.append(part)
        length += len(part)
    return "".join(out), tuple(spans)


def _environment() -> tuple[Any, type[Exception], Callable[[Any], set[str]]]:
    """(environment, its errors, which variables a parsed template has from outside)."""
    try:
        import jinja2
        import jinja2.ext
        import jinja2.meta
        import jinja2.nodes
        import jinja2.sandbox
    except ImportError as error:
        raise InputError("chat templates need Jinja2, which is not installed: pip install gnomon[hf]") from error

    class Generation(jinja2.ext.Extension):
        """`{% generation %}…{% endgeneration %}`, as transformers has it."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_marked")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _marked(self, caller: Callable[[], str]) -> str:
            return f"{OPEN}{caller()}{CLOSE}"

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def as_json(value: Any, indent: int | None = None, **variables: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment, jinja2.TemplateError, jinja2.meta.find_undeclared_variables
