"""Sentinel (HPCA 2021): tensors that move between a fast and a slow tier of memory, by when they are used next.

The policy and its peers are `simulate.two_tiers`, the tensors of a predicted step `prediction.tensors`; here is how far
it goes. Left out: a field of the plan that says how large the fast tier is.
"""

from __future__ import annotations

from gnomon.methods.method import Method

_PYTHON = "no field of a plan says how large a fast tier is; from Python, simulate.two_tiers plays a predicted step"

METHOD = Method(
    name="sentinel",
    paper="Sentinel, Ren et al., HPCA 2021",
    about="tensors move between two tiers of memory, those of the next rows ahead of their use",
    switch="schedule.passes",
    exactness="bitwise",
    missing={
        "rewritten": "its moves follow from the memory of a step, and are no rows of the Program",
        "planned": _PYTHON,
        "predicted": _PYTHON,
        "run": "runtime.step.disk_tier carries moves out with files, beside rows that compute nothing of a model",
    },
)
