"""HeteroG (CoNEXT 2020): on heterogeneous devices each layer chooses who computes it and how its gradient is added up.

The search is `search.mixed.heterog`, what a step takes `search.mixed.layer_strategies`; here is how far it goes. Left
out: a field of the plan. Stages of one plan either name the same ranks or none in common, and the search over those
(`search.mixed`) finds plans that are faster (docs/methods.md).
"""

from __future__ import annotations

from gnomon.methods.method import Method

_PYTHON = "no field of a plan says it: stages share all of their ranks or none; `gnomon plan` searches plans of stages"

METHOD = Method(
    name="heterog",
    paper="HeteroG, Yi et al., CoNEXT 2020",
    about="for each layer which heterogeneous devices compute it, and how its gradient is added up, by local search",
    switch="schedule.passes",
    exactness="up to the order of sums",
    missing={
        "rewritten": "a layer's devices are no rewriting of a Program of stages",
        "planned": _PYTHON,
        "predicted": _PYTHON,
        "run": "the runtime runs stages, whose ranks are the same for all of their layers",
    },
)
