"""Seconds per iteration of Korthikanti et al. 2022, table 5 (A100-80GB, sequences of 2048): within 15 %, none fitted.

The paper: 22B, 175B, 530B and 1T with full recompute ("Baseline"), and with sequence parallelism and selective
recompute ("Present work").
"""

from __future__ import annotations

import pytest
from prediction.jobs import FP16, MEGATRON_2022, gpt_model

from gnomon.plans import Layout, Mesh, Plan, Saved, Schedule, Workload
from gnomon.prediction import predict

# layers, hidden, heads, devices, pp, interleaved stages a rank, micro batch, global batch, full s, selective s
ROWS = {
    "22B": (48, 6144, 64, 8, 1, 1, 4, 4, 1.42, 1.10),
    "175B": (96, 12288, 96, 64, 8, 3, 1, 64, 18.13, 13.75),
    "530B": (105, 20480, 128, 280, 35, 3, 1, 280, 49.05, 37.83),
    "1T": (128, 25600, 160, 512, 64, 1, 1, 512, 94.42, 71.49),
}


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("name", ROWS)
def test_seconds_per_iteration(name: str, recompute: str) -> None:
    layers, hidden, heads, devices, pp, virtual, micro, batch, full_s, selective_s = ROWS[name]
    plan = Plan(
        mesh=Mesh(pp=pp, tp=8),
        schedule=Schedule(
            name="interleaved_one_f_one_b" if virtual > 1 else "one_f_one_b",
            virtual_stages=virtual,
            micro_batch_size=micro,
        ),
        saved=Saved(preset="full" if recompute == "full" else "selective"),
        layout=Layout(sequence_parallel=recompute == "selective"),
        precision=FP16,
    )
    workload = Workload(global_batch_size=batch, seq_len=2048)
    prediction = predict(
        gpt_model(layers, hidden, heads), f"{devices // 8}x8xa100-sxm-80gb", plan, workload, MEGATRON_2022
    )

    assert prediction.step_s == pytest.approx(full_s if recompute == "full" else selective_s, rel=0.15)
    assert prediction.fits  # they ran
