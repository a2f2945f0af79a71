"""Logical workers: the data-parallel ranks of a plan on fewer processes, with the same bits (EasyScale).

`LogicalWorkers` is one process. It holds the model once and runs the forwards and backwards of each of its workers in
turn; their gradients are added up in an order that depends on the number of workers alone (`ordered_sums`), then every
process does the same update. What a worker computes is a function of its number and of the step: nothing else lives
from one step to the next but what all share. So losses and parameters are the same bits on any number of processes, and
workers can move between steps (`place`). Left out: where they are (`methods.easyscale.place_workers`), and processes
that come and go (`elastic`).
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter, sleep

import torch
import torch.distributed as dist
from torch import Tensor

from gnomon.errors import PlanError
from gnomon.graph import Graph
from gnomon.methods.easyscale import Node, nodes_of, reason
from gnomon.plans import Plan, Workload
from gnomon.runtime.launch.replica import Replica, inputs_by_name
from gnomon.runtime.mesh.ordered_sums import Partial, exchange
from gnomon.runtime.module.stage import Batch
from gnomon.runtime.optim.update import AdamWSettings
from gnomon.runtime.parameters.parameters import Values
from gnomon.runtime.step.evaluate import forward_loss
from gnomon.runtime.step.execute import StepResult
from gnomon.runtime.watch.measure import Recorder
from gnomon.timeline import Timeline

MEETINGS = ("NORM", "OPT")
"""Rows that a process does once, when the gradients of all workers are added up."""


class LogicalWorkers(Replica):
    """One process, with some of the plan's workers."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        workload: Workload,
        *,
        seed: int = 0,
        settings: AdamWSettings = AdamWSettings(),  # noqa: B008 (frozen)
        values: Values | None = None,
    ) -> None:
        """Takes what `Executor` takes, on processors, before any group is joined: `place` says which workers are here.
        PlanError for a plan whose ranks cannot be logical workers."""
        if (why := reason(plan)) is not None:
            raise PlanError(f"easyscale cannot be used in this plan: {why}")
        super().__init__(graph, plan, workload, seed=seed, settings=settings, values=values)
        self.own: Sequence[int] = ()
        """Workers that are here."""
        self.worker_s = 0.0
        """Seconds that one of them computed in the last step."""
        self.pause_s = 0.0
        """That each worker sleeps in a step, in place of a slower processor."""
        self.nodes: Sequence[Sequence[Node]] = ()
        """Of each process, what it adds up alone."""
        self.together = False
        """Whether there are other processes. Their group is asked for when it is used: who holds it keeps its
        connections open, and others that wait in it do not find it broken."""
        kinds = [self.program.kinds[self.program.kind[row.number]].name for row in self.rows]
        first = next(at for at, kind in enumerate(kinds) if kind in MEETINGS)
        if any(kind not in MEETINGS for kind in kinds[first:]):
            raise PlanError("logical workers update after their last backward, and this plan's rows do not")
        self.computing, self.updating = self.rows[:first], self.rows[first:]

    def place(self, placement: Sequence[int]) -> None:
        """Takes the workers that the placement (the process of each) gives this rank of the group that is joined now.
        All its ranks must call it."""
        size = dist.get_world_size()
        # Every process knows the workers of all, since who adds up what follows from it.
        workers_of_ranks = [
            [worker for worker, process in enumerate(placement) if process == rank] for rank in range(size)
        ]
        assert len(placement) == self.workers and sum(map(len, workers_of_ranks)) == self.workers, (
            "workers without a process"
        )
        self.own = workers_of_ranks[dist.get_rank()]
        # Nodes of the tree of sums whose leaves are all on one process: it adds these up alone, and the rest is
        # exchanged.
        self.nodes = [nodes_of(workers, self.workers) for workers in workers_of_ranks]
        self.together = size > 1
        for part, _ in self.parameters():
            part.drop_grad()  # of a step that was not finished
        self.buffers.tensors.clear()
        self.compute.saved.clear()

    def step(self, batch: Tensor | Batch, recorder: Recorder | None = None) -> StepResult:
        """One step of all workers. If it raises, nothing was updated. batch: of the whole job."""
        assert recorder is None, "steps of logical workers are not measured row by row"
        self.state.new_step()
        inputs, partial = inputs_by_name(batch), Partial(self.workers)
        losses = torch.zeros(self.workers, dtype=torch.float64)
        parameters = [part for part, _ in self.parameters()]
        began = perf_counter()
        for worker in self.own:
            sleep(self.pause_s)
            self.feed.take(self.rows_of(inputs, worker))
            # The loss is the mean over the labels of the whole batch; `take` has counted those of this worker's rows.
            self.feed.counted = self._counted(inputs)
            self.compute.new_step()
            for row in self.computing:
                self._do(row)
            # By worker, not summed here: the order of additions must not depend on which workers are on one process.
            losses[worker] = self.compute.loss
            # The gradients are `partial`'s now. The next worker writes into buffers that a finished sum has freed, or
            # into new ones; `begun` is empty, so old numbers are not added to.
            free = partial.add(worker, [part.whole_grad() for part in parameters])
            for index, part in enumerate(parameters):
                part.grad = None if free is None else free[index]
                part.begun.clear()
        self.worker_s = (perf_counter() - began) / max(1, len(self.own))
        loss = self._in_order(losses)
        for index, part in enumerate(parameters):
            sums = {node: grads[index] for node, grads in partial.sums.items()}
            # Room for the sum: its own went to `partial`.
            part.whole_grad()
            assert part.grad is not None
            exchange(sums, part.grad, self.nodes, self.workers, dist.group.WORLD if self.together else None)
        for row in self.updating:
            self._do(row)
        if self.watchdog is not None:
            self.watchdog.row = -1
        return StepResult(loss=loss, grad_norm=self.state.norm)

    def evaluate(self, batch: Tensor | Batch) -> float:
        """Mean loss over all labels without training, the same bits on any number of processes."""
        inputs = inputs_by_name(batch)
        losses, whole = torch.zeros(self.workers, dtype=torch.float64), self._counted(inputs)
        for worker in self.own:
            self.feed.take(self.rows_of(inputs, worker))
            self.feed.counted = whole
            losses[worker] = forward_loss(self)
        return float(self._in_order(losses))

    def total_loss(self, result: StepResult) -> float:
        """The mean loss over all tokens of the step."""
        return float(result.loss)

    def measured_step(self, batch: Tensor | Batch, *, memory: bool = False) -> tuple[StepResult, Timeline]:
        """Raises PlanError: workers that take turns have no Timeline yet."""
        raise PlanError("a Timeline of logical workers is not measured yet; leave out --timeline or --processes")

    def _counted(self, batch: Batch) -> int:
        """Labels that a loss is the mean of."""
        labels = batch.get("labels")
        if labels is None:
            return next(iter(batch.values())).shape[0] * self.workload.seq_len
        return max(1, int((labels >= 0).sum()))

    def _in_order(self, values: Tensor) -> Tensor:
        """The sum of one number a worker, in the order of workers; each process gives those of its own, zeros else."""
        if self.together:
            dist.all_reduce(values)  # every other term is 0: exact in any order
        total = torch.zeros((), dtype=values.dtype)
        for value in values:
            total += value
        return total
