"""`gnomon parity`: whether a plan computes what the plain model computes, in small, and the first tensor that differs.

The plan file's model with short dims, under the plan's own axes, schedule and layout, is trained for three steps in
float64 beside torch's autograd on whole tensors. A model that is code keeps its own dims. Leaves out speed, dtypes and
the machines that the plan is for.
"""

from __future__ import annotations

from importlib.util import find_spec

from gnomon.cli.models import read_model_to_run
from gnomon.cli.options.run import ParityOptions
from gnomon.cli.run import read_plan
from gnomon.cli.terminal import print_json, print_lines
from gnomon.errors import InputError
from gnomon.late import load_late
from gnomon.request.model import is_code

EQUAL, DIFFERS = 0, 1


def run(options: ParityOptions) -> int:
    """Shrink, train in as many processes as the small plan has ranks, compare, tell."""
    file = read_plan(options.plan)
    graph, notes = read_model_to_run(file.model)
    if find_spec("torch") is None:
        raise InputError("comparing a plan with the plain model needs torch, which is not installed: pip install torch")
    small = load_late("gnomon.runtime.checks.parity:in_small")(
        graph, file.plan, file.workload, ranks=options.ranks, code=file.model if is_code(file.model) else ""
    )
    launch, compare = (
        load_late("gnomon.runtime.processes.launch:launch"),
        load_late("gnomon.runtime.checks.parity:compare"),
    )
    results = launch(compare, small.plan.world_size, small)
    comparison = next(iter(results.values()))
    if options.json:
        print_json(load_late("gnomon.runtime.checks.parity:to_mapping")(comparison, small))
    else:
        print_lines((*notes, *load_late("gnomon.runtime.checks.parity:lines")(comparison, small)))
    return DIFFERS if comparison.first else EQUAL
