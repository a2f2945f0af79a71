"""Gnomon tells you how a deep-learning job will run before you run it.

The public verbs, loaded when first used so that `import gnomon` stays light:
`gnomon.predict(model, cluster, plan, workload) -> Prediction`, `gnomon.plan(model, cluster, workload)
-> search.Result`. Everything else is in the rooms (`gnomon.plans` …).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gnomon.prediction import predict as predict
    from gnomon.search import plan as plan

__version__ = "0.1.0.dev0"
__all__ = ["plan", "predict"]


_VERBS = {"predict": "gnomon.prediction", "plan": "gnomon.search"}


def __getattr__(name: str) -> Any:
    if name in _VERBS:
        return getattr(import_module(_VERBS[name]), name)
    raise AttributeError(f"module 'gnomon' has no attribute {name!r}")
