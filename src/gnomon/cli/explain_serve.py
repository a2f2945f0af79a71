"""`gnomon explain MODEL --serve --question NAME`: what people ask about a server, answered by name.

`run(options)` prints and returns 0. Without --question all names are listed with their questions. Leaves out training
(`explain`).
"""

from __future__ import annotations

from gnomon.cli.options.plan import ExplainOptions
from gnomon.cli.predict_serve import read
from gnomon.cli.terminal import print_json, print_lines
from gnomon.errors import InputError, nearest
from gnomon.serving.answers import ANSWERS, QUESTIONS, Question
from gnomon.serving.forecast import Target


def run(options: ExplainOptions) -> int:
    """Answers one of `QUESTIONS`; lists them where none is asked."""
    if options.question is None:
        print_lines(f"--question {name:16}{asked}" for name, asked in QUESTIONS.items())
        return 0
    if options.question not in ANSWERS:
        near = nearest(options.question, ANSWERS)
        raise InputError(f"no question {options.question[:40]!r}{near}; known: {', '.join(ANSWERS)}")
    asked = read(options)
    question = Question(
        graph=asked.graph,
        cluster=asked.cluster,
        serving=asked.serving,
        engine=asked.engine,
        load=asked.load,
        target=asked.target or Target(ttft_s=None, tpot_s=None),
        context=asked.context,
    )
    lines = list(ANSWERS[options.question](question))
    if options.json:
        print_json({"question": options.question, "answer": lines, "assumptions": list(asked.assumed)})
        return 0
    print_lines([QUESTIONS[options.question], "", *lines, "", "assumed", *(f"- {note}" for note in asked.assumed)])
    return 0
