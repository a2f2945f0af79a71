"""Gnomon tells you how a deep-learning job will run before you run it.

The public verbs, loaded when first used so that `import gnomon` stays light:
`gnomon.predict(model, cluster, plan, workload) -> Prediction`, `gnomon.plan(model, cluster, workload)
-> search.Result`, `gnomon.fit(model, cluster, plan, workload) -> request.fit.Ladder`, of which a model that is a job
file of another program says the rest, and `gnomon.read_job(path, cluster) -> request.job_file.JobFile`; with torch,
`gnomon.capture(module, example_inputs) -> Graph`, `gnomon.op_price` and `gnomon.op_sharding` for what a custom op costs
and how it divides, `gnomon.prepare(model, plan)`, a job whose steps the caller feeds, and
`gnomon.watch(model, optimizer, plan)`, expected against actual in the caller's own loop; `gnomon.save(module, inputs,
folder)` and `gnomon.load(folder)`, compiled ahead of time for inference.
Everything else is in the rooms (`gnomon.plans` …).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gnomon.compiler.saved import load, save
    from gnomon.frontend.capture import capture
    from gnomon.frontend.custom_ops import op_price, op_sharding
    from gnomon.request.fit import fit
    from gnomon.request.job_file import read_job
    from gnomon.request.verbs import plan, predict
    from gnomon.runtime.launch.job import prepare
    from gnomon.runtime.watch.watch import watch

__version__ = "0.1.0.dev0"
__all__ = [
    "capture",
    "fit",
    "load",
    "op_price",
    "op_sharding",
    "plan",
    "predict",
    "prepare",
    "read_job",
    "save",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name == "capture":
        from gnomon.frontend.capture import capture

        return capture
    if name in ("op_price", "op_sharding"):
        from gnomon.frontend import custom_ops

        return getattr(custom_ops, name)
    if name == "prepare":
        from gnomon.runtime.launch import job

        return job.prepare
    if name in ("load", "save"):
        from gnomon.compiler import saved

        return getattr(saved, name)
    if name == "watch":
        from gnomon.runtime.watch.watch import watch

        return watch
    if name == "read_job":
        from gnomon.request import job_file

        return job_file.read_job
    if name == "fit":
        from gnomon.request import fit

        return fit.fit
    if name in __all__:
        from gnomon.request import verbs

        return getattr(verbs, name)
    raise AttributeError(f"module 'gnomon' has no attribute {name!r}")
