"""A calibrated machine measured again, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from gnomon.errors import InputError  # noqa: E402
from gnomon.hardware import Axis, Cluster, Measured, Table, measured_cluster, parse_cluster  # noqa: E402
from gnomon.runtime.calibrate.slowdown import Again, ratio, sentence, slowdown_now  # noqa: E402

pytestmark = pytest.mark.torch


def machine(*, seconds: float, processes: int = 1) -> Cluster:
    """One that multiplies 512 x 512 x 512, and does nothing else."""
    axes = tuple(Axis(name=name, sizes=(512,)) for name in "mnk")
    product = Table(
        what="matmul", dtype="fp32", direction="forward", axes=axes, seconds=(seconds,), alone_s=(), spread=(0.0,)
    )
    result = Measured(
        host="host", date="2026-11-21T08:00:00Z", software="torch", processes=processes, threads=1, tables=(product,)
    )
    return measured_cluster(result, 1 << 33)


def test_a_machine_that_was_faster_than_any_is_slower_now() -> None:
    factor, message = slowdown_now(machine(seconds=1e-9, processes=2), step_s=0.5)
    assert factor > 100
    assert (
        message.startswith("this machine is ")
        and " times slower now than when it was calibrated (matmul fp32" in message
    )
    assert message.endswith(" s a step at this speed")


def test_a_machine_that_took_a_minute_is_faster_now() -> None:
    factor, message = slowdown_now(machine(seconds=60.0))
    assert factor < 0.1
    assert "times faster now" in message


def test_the_ratio_is_that_of_the_middle_point_which_is_named() -> None:
    """One point in a burst of other work, 80 times as long, does not make a machine 80 times slower."""
    actual = (
        Again(what="product", then_s=1e-3, now_s=2e-3),
        Again(what="sum", then_s=1e-3, now_s=80e-3),
        Again(what="attention", then_s=2e-3, now_s=8e-3),
    )
    measured = machine(seconds=1.0).groups[0].node.device.measured
    assert measured is not None
    assert ratio(actual) == pytest.approx(4.0)
    assert ratio(actual[:2]) == pytest.approx((2 * 80) ** 0.5)
    assert sentence(actual, measured, 0.25) == (
        "this machine is 4.0 times slower now than when it was calibrated (attention: 2 ms then, 8 ms now; its 3 "
        "operations take 2 to 80 times as long); expected 1 s a step (0.5 to 20) at this speed"
    )
    alike = tuple(replace(entry, now_s=4.0 * entry.then_s) for entry in actual)
    assert sentence(alike, measured, 0.25).endswith(" then, 4 ms now); expected 1 s a step at this speed")
    same = tuple(replace(entry, now_s=1.1 * entry.then_s) for entry in actual)
    assert "as fast now" in sentence(same, measured, 0.25)


def test_as_fast_in_the_middle_alone_is_not_as_fast() -> None:
    """What the line once hid: a run was 63 % slower than predicted after `as fast now`."""
    actual = (
        Again(what="product", then_s=1e-3, now_s=1e-3),
        Again(what="sum", then_s=1e-3, now_s=0.5e-3),
        Again(what="attention", then_s=1e-3, now_s=2e-3),
    )
    measured = machine(seconds=1.0).groups[0].node.device.measured
    assert measured is not None
    assert sentence(actual, measured, 0.5) == (
        f"this machine is about as fast now as when it was calibrated, {measured.date}, but its 3 operations take 0.5 "
        "to 2 times as long; expected 0.5 s a step (0.25 to 1) at this speed"
    )


def test_a_machine_that_was_not_measured_cannot_be_measured_again() -> None:
    with pytest.raises(InputError, match="gnomon calibrate"):
        slowdown_now(parse_cluster("1x2xcpu-process"))
