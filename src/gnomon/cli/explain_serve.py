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
        print_lines(f"--question {name:16}{text}" for name, text in QUESTIONS.items())
        return 0
    if options.question not in ANSWERS:
        near = nearest(options.question, ANSWERS)
        raise InputError(f"no question {options.question[:40]!r}{near}; known: {', '.join(ANSWERS)}")
    text = read(options)
    question = Question(
        graph=text.graph,
        cluster=text.cluster,
        serving=text.serving,
        engine=text.engine,
        load=text.load,
        target=text.target or Target(ttft_s=None, tpot_s=None),
        context=text.context,
    )
    lines = list(ANSWERS[options.question](question))
    if options.json:
        print_json({"question": options.question, "answer": lines, "assumptions": list(text.assumed)})
        return 0
    print_lines([QUESTIONS[options.question], "", *lines, "", "assumed", *(f"- {note}" for note in text.assumed)])
    return 0
