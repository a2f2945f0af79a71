"""A config.json as a model to run: the Graph with all that its results depend on, or the reason why not.

`read_runnable(text, name)` is `read_hf_config`, strict, with the head that has a loss (BERT's masked-language-model
head), and with numerics written onto the Graph; `classifies(text)` says whether it is a classifier of texts, which is
served and not trained. Leaves out weights (`weights`, `gnomon.runtime.checkpoint.pretrained`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gnomon.errors import InputError, PlanError
from gnomon.formats.huggingface.known import unread
from gnomon.formats.huggingface.parts import ReadOptions
from gnomon.formats.huggingface.read import read_hf_config
from gnomon.formats.keys import read_json
from gnomon.graph import Graph
from gnomon.models.numerics import with_numerics

OTHER_HEADS = re.compile(
    r"(For(?!CausalLM|MaskedLM|ConditionalGeneration|ImageClassification|PreTraining)|DoubleHeads)"
)
"""Names of classes of transformers with a head of their own: classifiers of sequences and tokens, answers, rewards."""

CLASSIFIER = "ForSequenceClassification"
"""How names of classifiers of texts end."""

DROPOUT = re.compile(r"^(?!summary_|classifier_).*(dropout|pdrop|dropout_rate|dropout_prob)$")
"""Keys of dropouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runnable:
    """A model that the runtime can execute."""

    graph: Graph
    """With its numerics."""
    notes: tuple[str, ...]
    """What the file says that the graph leaves out."""
    model_type: str
    """As the file names it; the layout of its weights goes by it."""


def classifies(text: str) -> bool:
    """Whether a config.json is of a classifier of texts."""
    return any(one.endswith(CLASSIFIER) for one in _architectures(read_json(text, "config", infinite=True)))


def read_runnable(text: str, name: str, *, classifier: bool = False) -> Runnable:
    """PlanError, naming the model type, for one that the runtime does not run; other errors as `read_hf_config`.
    classifier: with the head of one, which is BERT's or RoBERTa's."""
    read = read_hf_config(
        text, name, ReadOptions(bert_head="classifier" if classifier else "mlm", complete=True), strict=True
    )
    if isinstance(read.numerics, str):
        raise PlanError(f"{name} cannot be run: {read.numerics}")
    values = read_json(text, f"config {name!r}", infinite=True)
    if not classifier:
        _check_head(values, name)
    elif read.graph.outputs != ("head.logits",):
        raise InputError(
            f"{name} classifies texts by a {values['model_type']}, and classifiers that are served are those of BERT's "
            "and RoBERTa's families; leave it to transformers",
            "$.architectures",
        )
    graph = with_numerics(read.graph, read.numerics)
    _check_rotary(graph, name)
    dropped = any(op.does == "drops" or op.attr("dropout", 0.0) for block in graph.blocks for op in block.ops)
    named = ", ".join(f"{key}={value}" for key, value in _dropouts(values))
    notes = list(read.notes)
    if dropped or named:
        notes.append(f"its dropout{f' ({named})' if named else ''} is left out: the runtime trains without")
    if ignored := unread(values):
        notes.append(f"{', '.join(ignored)}: its class in transformers does not read this, so it does nothing")
    return Runnable(graph=graph, notes=tuple(notes), model_type=str(values["model_type"]))


def _check_head(values: Mapping[str, object], name: str) -> None:
    """Refuses a file whose architectures have a head other than the one that its reader gives every model."""
    for one in _architectures(values):
        if OTHER_HEADS.search(one):
            raise InputError(
                f"{name}: {one} has another head than the model that would run, which predicts tokens (or classes of "
                f"images); name that class in architectures to train it, and leave {one} to transformers",
                "$.architectures",
            )


def _architectures(values: Mapping[str, object]) -> list[str]:
    architectures = values.get("architectures")
    return [one for one in architectures if isinstance(one, str)] if isinstance(architectures, list) else []


def _check_rotary(graph: Graph, name: str) -> None:
    """Refuses angles that do not fit a head: pairs of elements are turned."""
    for block in graph.blocks:
        for op in block.ops:
            if op.does != "rotates":
                continue
            head = block.tensor(op.inputs[0]).atoms[-1].size or 0
            width = int(head * float(op.attr("fraction", 1.0)))  # type: ignore[arg-type]
            least = 4 if op.attr("scaling", "") == "dynamic" else 2  # its base is raised to width / (width - 2)
            if width < least or width % 2:
                raise InputError(
                    f"{name}: rotary angles turn {width} of a head's {head} elements; an even number of at least "
                    f"{least} is needed: change head_dim, or the part that is turned",
                    "$.rope_parameters",
                )
            for key in ("short_factors", "long_factors"):
                factors = str(op.attr(key, "")).split()
                if factors and len(factors) != width // 2:
                    raise InputError(
                        f"{name}: {len(factors)} {key} of longrope, and {width // 2} pairs of elements are turned",
                        f"$.rope_parameters.{key.removesuffix('s')}",
                    )


def _dropouts(values: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Keys of dropouts that are on, those of inner objects too; heads that classify have their own."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _dropouts(value)
        elif DROPOUT.search(key) and isinstance(value, (int, float)) and value:
            yield key, value
