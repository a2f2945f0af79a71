"""A user's own runs: plan files that say what was measured, as `gnomon plan --try` leaves them.

`own_run(file, config, …)` is the `Run` of one of them, so that what reads published runs reads these too. Leaves out
finding the files, and the model and machines that they name.
"""

from __future__ import annotations

from gnomon.errors import InputError
from gnomon.formats.published.notes import read_notes
from gnomon.formats.published.row import Row
from gnomon.formats.published.run import Run
from gnomon.hardware import Cluster
from gnomon.models.llama import LlamaConfig
from gnomon.plans import PlanFile, Stack

FAMILY = "own runs"
"""Source of every one of them."""


def own_run(id: str, file: PlanFile, config: LlamaConfig, cluster: Cluster, stack: Stack) -> Run:
    """The run of a plan file.

    id: what to call it. config, cluster, stack: what the file's names stand for. InputError for a file without a
    measurement.
    """
    ran = file.measured
    if ran is None:
        raise InputError("the plan file does not say what was measured; `gnomon plan --try` writes ones that do")
    devices = sorted({device.name for device in cluster.devices})
    row = Row(
        id=id,
        family=FAMILY,
        model=file.model,
        device=", ".join(devices),
        framework=stack.name,
        metric="s_per_step",
        value=ran.step_s,
        num_devices=cluster.num_devices,
        seq_len=file.workload.seq_len or None,
        global_batch=file.workload.batch_size,
        source=f"{ran.made} on {ran.host}",
    )
    return Run(
        id=id,
        family=FAMILY,
        model=config,
        plan=file.plan,
        workload=file.workload,
        stack=stack,
        cluster=cluster,
        readings_s=(ran.step_s,),
        covers="step",
        memory_bytes=None,
        memory_metric="unstated",
        memory_rank=None,
        facts=read_notes(row),
        notes=(),
        row=row,
    )
