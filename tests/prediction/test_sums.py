"""Sums of gradients over tensor-parallel ranks: in the update's price, and never the data-parallel reduction again."""

from __future__ import annotations

from prediction.jobs import scaled, small

from gnomon.plans import Layout, Mesh, Optimizer, Plan, Schedule
from gnomon.prediction import Prediction


def predicted(*, sequence_parallel: bool) -> Prediction:
    plan = Plan(
        mesh=Mesh(dp_shard=4, tp=2),
        schedule=Schedule(num_microbatches=4),
        layout=Layout(sequence_parallel=sequence_parallel),
        optimizer=Optimizer(zero=0),
    )
    return small(plan, scaled("2x4xh100-sxm"), batch=32, seq_len=512)


def test_gradients_are_reduced_over_data_parallel_ranks_once() -> None:
    """Under sequence parallelism norms are added up over tp ranks as well: a row without bytes of the reduction."""
    made = predicted(sequence_parallel=True)
    reductions = [key for key in made.structure.program.keys if key.kind == "AR"]
    assert {key.name for key in reductions} == {"", "tp"}
    whole = next(key for key in reductions if not key.name)
    sums = next(key for key in reductions if key.name == "tp")
    assert made.pricing.seconds(whole) > 0 and made.pricing.amounts(whole)[0] > 0
    assert made.pricing.seconds(sums) == 0 and made.pricing.amounts(sums) == (0.0, 0.0)


def test_the_update_pays_for_the_sums() -> None:
    def update_s(made: Prediction) -> float:
        return made.pricing.seconds(next(key for key in made.structure.program.keys if key.kind == "OPT"))

    assert update_s(predicted(sequence_parallel=True)) > update_s(predicted(sequence_parallel=False))
