"""Gnomon tells you how a deep-learning job will run before you run it.

The public verbs, loaded when first used so that `import gnomon` stays light:
`gnomon.predict(model, cluster, plan, workload) -> Prediction`, `gnomon.plan(model, cluster, workload)
-> search.Result`. Everything else is in the rooms (`gnomon.plans` …).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gnomon.prediction.predict import predict
    from gnomon.search.planning import plan

__version__ = "0.1.0.dev0"
__all__ = ["plan", "predict"]


def __getattr__(name: str) -> Any:
    if name == "predict":
        from gnomon.prediction import predict

        return predict
    if name == "plan":
        from gnomon.search import plan

        return plan
    raise AttributeError(f"module 'gnomon' has no attribute {name!r}")
