"""A config.json as a model to run: the Graph with all that its results depend on, or the reason why not.

`read_runnable(text, name)` is `read_hf_config`, strict, with the head that has a loss (BERT's masked-language-model
head), and with numerics written onto the Graph. Leaves out weights (`weights`, `gnomon.runtime.pretrained`).
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.errors import PlanError
from gnomon.formats.huggingface.parts import Wanted
from gnomon.formats.huggingface.read import read_hf_config
from gnomon.formats.keys import read_json
from gnomon.graph import Graph
from gnomon.models.numerics import with_numerics


@dataclass(frozen=True, slots=True, kw_only=True)
class Runnable:
    """A model that the runtime can execute."""

    graph: Graph
    """With its numerics."""
    notes: tuple[str, ...]
    """What the file says that the graph leaves out."""
    model_type: str
    """As the file names it; the layout of its weights goes by it."""


def read_runnable(text: str, name: str) -> Runnable:
    """PlanError, naming the model type, for one that the runtime does not run; other errors as `read_hf_config`."""
    read = read_hf_config(text, name, Wanted(bert_head="mlm", complete=True), strict=True)
    if isinstance(read.numerics, str):
        raise PlanError(f"{name} cannot be run: {read.numerics}")
    kind = str(read_json(text, f"config {name!r}", infinite=True)["model_type"])
    dropped = any(op.does == "drops" or op.attr("dropout", 0.0) for block in read.graph.blocks for op in block.ops)
    notes = (*read.notes, "its dropout is left out: the runtime trains without") if dropped else read.notes
    return Runnable(graph=with_numerics(read.graph, read.numerics), notes=notes, model_type=kind)
