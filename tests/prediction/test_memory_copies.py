"""The price of checkpoints in memory: bytes by hand, never under the link, and nothing where others hold the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gnomon.cli import main
from gnomon.errors import InputError
from gnomon.hardware import parse_cluster
from gnomon.plans import Mesh, Optimizer, Plan, Schedule, Workload
from gnomon.prediction import memory_copies, predict

CLUSTER = parse_cluster("1x8xh100-sxm")
WORK = Workload(global_batch_size=32, seq_len=1024)
PLAN = Plan(mesh=Mesh(dp_shard=8), optimizer=Optimizer(zero=3), schedule=Schedule(micro_batch_size=1))
PARAMETERS = 8_030_261_248
"""Of Llama 3.1 8B."""


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_rank_s_part_is_fourteen_bytes_a_parameter_over_its_ranks(zero: int) -> None:
    """2 of bf16, 4 of a master copy and 8 of AdamW."""
    plan = replace(PLAN, optimizer=Optimizer(zero=zero))  # type: ignore[arg-type]
    predicted = predict("llama-3.1-8b", CLUSTER, plan, WORK)
    copies = memory_copies(predicted, 10)
    assert copies.sent_bytes == pytest.approx(14 * PARAMETERS / 8, rel=1e-3)
    assert copies.held_bytes == 3 * copies.sent_bytes
    assert copies.send_s >= copies.sent_bytes / CLUSTER.groups[0].node.pair_rate_bytes_per_s
    assert copies.step_s == pytest.approx((copies.send_s + copies.copy_s) / 10)


def test_replicas_send_nothing_and_keep_one_copy() -> None:
    for mesh, zero in (
        (Mesh(dp_replicate=2, tp=4), 0),
        (Mesh(dp_shard=2, tp=4), 0),
        (Mesh(dp_replicate=2, dp_shard=4), 1),
    ):
        plan = replace(PLAN, mesh=mesh, optimizer=Optimizer(zero=zero))  # type: ignore[arg-type]
        copies = memory_copies(predict("llama-3.1-8b", CLUSTER, plan, WORK), 1)
        assert copies.sent_bytes == copies.send_s == 0
        assert copies.held_bytes == copies.state_bytes > 0 and copies.copy_s > 0
        assert "nothing (others hold the same)" in copies.sentence


def test_predict_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    main(["predict", "gpt2", "--on", "1x2xh100-sxm", "--zero", "3", "--memory-checkpoint-every", "5"])
    assert "copies in memory every 5 steps: a rank sends " in " ".join(capsys.readouterr().out.split())
    with pytest.raises(InputError, match="give 1 or more"):
        memory_copies(predict("gpt2", parse_cluster("h100-sxm"), replace(PLAN, mesh=Mesh()), WORK), 0)
