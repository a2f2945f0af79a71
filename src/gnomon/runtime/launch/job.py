"""A plan in one's own training loop: `prepare(model, plan)` returns a job whose steps the caller feeds.

    job = gnomon.prepare("path/to/config.json", "plan.toml")
    loss = job.step(batch)

In a script that torchrun started every process prepares and steps alike; a plan of one rank needs no torchrun. Leaves
out data (`data`), and what `gnomon run` does around steps: progress, signals, checkpoints in time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from gnomon.errors import PlanError
from gnomon.formats.huggingface.weights import parameters_of
from gnomon.graph import Graph
from gnomon.hardware import parse_cluster
from gnomon.lowering.norm import EVERYONE
from gnomon.methods import rewrites
from gnomon.plans import Plan, PlanFile, Workload, load_plan
from gnomon.prediction import Prediction, predict
from gnomon.request.model import is_code
from gnomon.request.runnable import read_runnable_model
from gnomon.runtime.checkpoint.load import load
from gnomon.runtime.checkpoint.pretrained import gathered, is_first, values_of
from gnomon.runtime.checkpoint.save import save
from gnomon.runtime.launch.own_module import OwnModule
from gnomon.runtime.module.apply import check_before
from gnomon.runtime.optim.update import AdamWSettings
from gnomon.runtime.processes.launch import BACKENDS, meet_by_torchrun, own_device
from gnomon.runtime.step.evaluate import evaluate
from gnomon.runtime.step.execute import Executor
from gnomon.runtime.watch.measure import Recorder, clock_of, gather
from gnomon.software import stack
from gnomon.timeline import Timeline

Batch = Tensor | Mapping[str, Tensor]
"""(global_batch_size, seq_len + 1) token ids, or the model's inputs by name, rows first; the same on every rank."""


class PreparedJob:
    """A model under a plan, on this process."""

    def __init__(self, executor: Executor, *, owns_group: bool, source: Path | None) -> None:
        """Takes source, what the model was read from, if it was a file."""
        self.executor, self._owns_group, self._source = executor, owns_group, source
        self.steps = 0
        """Updates so far, those of a loaded checkpoint too."""
        self._recorder: Recorder | None = None

    def step(self, batch: Batch) -> float:
        """Makes one update; returns the mean loss over all labels of the batch. All ranks must call it."""
        self._recorder = Recorder(memory=False, clock=clock_of(self.executor.device))
        result = self.executor.step(batch, self._recorder)
        self.steps += 1
        return self.executor.total_loss(result)

    def evaluate(self, batch: Batch) -> float:
        """The mean loss over all labels, without an update. All ranks must call it."""
        return evaluate(self.executor, batch)

    def timeline(self) -> Timeline:
        """The last step as it was measured, a worker for each rank class. All ranks must call it."""
        if self._recorder is None:
            raise PlanError("a timeline is that of the last step, and no step was made; call step first")
        return self.executor.per_class(
            gather(self.executor.program, self._recorder, self.executor.groups.by_comm[EVERYONE])
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Every parameter as forward reads it, whole, on the CPU, by the names and shapes that a PyTorch module gives
        them; the same on every rank. All ranks must call it."""
        self.executor.synchronise()
        mine: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], Tensor]]] = {}
        for parameters, _ in self.executor.parameters():
            freed = gathered(self.executor, parameters)
            if is_first(self.executor, parameters):
                for slot in parameters.slots:
                    for one, value in slot.experts_of(parameters.value(slot.name)):
                        part = one.whole, one.offset, value.cpu().clone()
                        mine.setdefault(slot.name, []).append(part)
            if freed:
                parameters.flat = None
        everyone: list[dict[str, list[tuple[tuple[int, ...], tuple[int, ...], Tensor]]]] = [{}] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        shapes = {name: known.shape for name, known in parameters_of(self.executor.graph).items()}
        tensors: dict[str, Tensor] = {}
        for parts in everyone:
            for name, pieces in parts.items():
                for whole, offset, value in pieces:
                    target = tensors.setdefault(name, torch.empty(whole, dtype=value.dtype))
                    target[tuple(slice(a, a + n) for a, n in zip(offset, value.shape, strict=True))] = value
        return {name: tensors[name].view(shape) for name, shape in shapes.items() if name in tensors}

    def save(self, folder: str | Path) -> Path:
        """Writes a checkpoint that any plan of the model can load; returns its path. All ranks must call it."""
        return save(Path(folder), self.executor, self.steps, source=self._source)

    def load(self, folder: str | Path) -> int:
        """Puts the newest checkpoint of a folder in place and returns the steps behind it; 0 where there is none. All
        ranks must call it."""
        self.steps = load(Path(folder), self.executor)
        return self.steps

    def close(self) -> None:
        """Ends the process groups. All ranks must call it."""
        self.executor.leave()
        if self._owns_group:
            dist.destroy_process_group()

    def __enter__(self) -> PreparedJob:
        return self

    def __exit__(self, *raised: object) -> None:
        if raised[0] is None:
            self.close()


def prepare(
    model: str | Path | Graph,
    plan: str | Path | Plan | PlanFile,
    *,
    workload: Workload | None = None,
    settings: AdamWSettings | None = None,
    weights: str | Path | None = None,
    seed: int = 0,
    device: Literal["cpu", "cuda"] = "cpu",
) -> PreparedJob:
    """The job, ready for its first step.

    model: a preset's name, a config.json or its folder, code (`my_project.model:build(ids=int64[batch,seq])`), which
    begins with the module's own values, or a Graph. plan: a plan file or its path, or a Plan, which
    wants a `workload` beside it. weights: a folder of safetensors to begin with; None: random numbers of the seed.
    PlanError where the number of processes is not the plan's, InputError for files that cannot be read.
    """
    read = load_plan(plan) if isinstance(plan, (str, Path)) else plan
    file = read if isinstance(read, PlanFile) else None
    decided = read.plan if isinstance(read, PlanFile) else read
    workload_ = workload or (file.workload if file is not None else None)
    if workload_ is None:
        raise PlanError("a Plan says nothing of the batch: give workload = Workload(global_batch_size=…, seq_len=…)")
    own = OwnModule.of(str(model), seed) if isinstance(model, str) and is_code(model) else None
    if own is not None:
        graph = own.graph
    else:
        graph = model if isinstance(model, Graph) else read_runnable_model(str(model))[0]
    check_before(graph, decided)
    source = None if own is not None or isinstance(model, Graph) or not Path(model).exists() else Path(model).resolve()
    owns = _join(decided, BACKENDS[device])
    try:
        executor = _executor(graph, own, decided, workload_, file, settings, weights, seed, device)
        return PreparedJob(executor, owns_group=owns, source=source)
    except BaseException:
        if owns:
            dist.destroy_process_group()
        raise


def _executor(
    graph: Graph,
    own: OwnModule | None,
    plan: Plan,
    workload: Workload,
    file: PlanFile | None,
    settings: AdamWSettings | None,
    weights: str | Path | None,
    seed: int,
    device: Literal["cpu", "cuda"],
) -> Executor:
    program = None
    if rewrites(plan):
        if file is None:
            raise PlanError("a plan whose passes rewrite the Program wants its machines: give a plan file")
        prediction: Prediction = predict(graph, parse_cluster(file.on), plan, workload, stack("gnomon"))
        program = prediction.structure.program
    folder = None if weights is None else Path(weights)
    values = None if folder is None or own is not None else values_of(folder, graph)
    if own is not None:
        values = own.start(folder)
    return Executor(
        graph,
        plan,
        workload,
        seed=seed,
        settings=settings or AdamWSettings(),
        program=program,
        device=own_device(BACKENDS[device]),
        values=values,
        states=None if own is None else own.states,
    )


def _join(plan: Plan, backend: str) -> bool:
    """Joins the processes of the job, and says whether that was done here. PlanError for another number of them."""
    world_size = plan.world_size
    if dist.is_initialized():
        num_ranks, owns = dist.get_world_size(), False
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        num_ranks, owns = int(os.environ["WORLD_SIZE"]), True
    else:
        num_ranks, owns = 1, True
    if num_ranks != world_size:
        raise PlanError(
            f"the plan has {world_size} ranks, and {num_ranks} "
            f"process{'es run' if num_ranks > 1 else ' runs'}; start this "
            f"script with torchrun --nproc-per-node {world_size}, or make a plan for {num_ranks}"
        )
    if owns and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        meet_by_torchrun(backend, places=plan.device_of if plan.placement else ())
    elif owns:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    return owns
