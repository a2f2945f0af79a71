"""Runtime: a plan carried out on `torch.distributed`, by interpreting the same Program that the simulator plays.

`Executor(graph, plan, workload)` is one rank; `.step(batch)` trains one step and `.measured_step(batch)` returns its
Timeline too. `pretrained` reads and writes folders of weights, `generate` writes a few words. Needs torch. Names
are loaded when they are first used: who serves a model does not wait for what trains one. Left out: prediction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gnomon.late import load_late

if TYPE_CHECKING:
    from gnomon.runtime.data import Corpus as Corpus
    from gnomon.runtime.data import Source as Source
    from gnomon.runtime.launch.run import run as run
    from gnomon.runtime.launch.train import Outcome as Outcome
    from gnomon.runtime.launch.train import Record as Record
    from gnomon.runtime.launch.train import TrainingJob as TrainingJob
    from gnomon.runtime.launch.train import train as train
    from gnomon.runtime.mesh.groups import Groups as Groups
    from gnomon.runtime.module.apply import apply as apply
    from gnomon.runtime.module.stage import Stage as Stage
    from gnomon.runtime.optim.update import AdamWSettings as AdamWSettings
    from gnomon.runtime.optim.update import Update as Update
    from gnomon.runtime.parameters.parameters import Parameters as Parameters
    from gnomon.runtime.step.evaluate import evaluate as evaluate
    from gnomon.runtime.step.execute import Executor as Executor
    from gnomon.runtime.step.execute import StepResult as StepResult
    from gnomon.runtime.watch.measure import Recorder as Recorder

_HOMES = {
    "Corpus": "data",
    "Source": "data",
    "run": "launch.run",
    "TrainingJob": "launch.train",
    "Outcome": "launch.train",
    "Record": "launch.train",
    "train": "launch.train",
    "Groups": "mesh.groups",
    "apply": "module.apply",
    "Stage": "module.stage",
    "AdamWSettings": "optim.update",
    "Update": "optim.update",
    "Parameters": "parameters.parameters",
    "evaluate": "step.evaluate",
    "Executor": "step.execute",
    "StepResult": "step.execute",
    "Recorder": "watch.measure",
}
"""Name -> module."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gnomon.runtime' has no attribute {name!r}")
    return load_late(f"gnomon.runtime.{_HOMES[name]}:{name}")
