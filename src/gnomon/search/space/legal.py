"""What the model says against dividing it over some axes, whatever the batch and the schedule.

`broken_rule` asks `plans.check` about a mesh and a layout alone; both searches, over equal and over mixed devices, take
their illegal axes from it. Leaves out the rules of schedules and batches.
"""

from __future__ import annotations

from gnomon.graph import Graph
from gnomon.plans import Layout, Mesh, Plan, Problem, Workload
from gnomon.plans.check import problems


def broken_rule(graph: Graph, base: Plan, workload: Workload, mesh: Mesh, layout: Layout) -> Problem | None:
    """The first rule that axes and layout break; None where they are legal. base: precision, what is saved."""
    plan = Plan(mesh=mesh, layout=layout, precision=base.precision, saved=base.saved)
    one = Workload(global_batch_size=1, seq_len=workload.sequence_lengths()[0], sizes=workload.sizes)
    findings = problems(plan, graph, None, one)
    return next((problem for problem in findings if problem.severity == "error" and problem.name != "batch"), None)
