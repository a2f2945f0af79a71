"""FGD and its measure of fragmentation, by trying all placements."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from gnomon.cli import main
from gnomon.errors import InputError
from gnomon.fleet.job import Job, Trace
from gnomon.fleet.machines import PARTS, machines
from gnomon.fleet.policies import policy
from gnomon.fleet.policies.fgd import Free, best_place, fragmentation
from gnomon.fleet.replay import replay
from gnomon.fleet.scenario import in_parts

PODS = """\
name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time
p0,6000,12288,1,460,,LS,Running,0,120,20
p1,1,1,2,1000,,LS,Running,5,25,5
p2,1,1,1,540,,LS,Running,5,105,5
"""


def placements(free: Free, demand: int) -> Iterator[tuple[int, ...]]:
    """Every set of devices that can hold a demand."""
    count, each = max(demand // PARTS, 1), min(demand, PARTS)
    for devices in itertools.combinations(range(len(free)), count):
        if all(free[device] >= each for device in devices):
            yield devices


def by_hand(free: Free, demands: dict[int, float]) -> float:
    """Parts on devices that no placement uses."""
    total = 0.0
    for demand, share in demands.items():
        used = {device for devices in placements(free, demand) for device in devices}
        total += share * sum(have for device, have in enumerate(free) if device not in used)
    return total


def drawn(draw: random.Random) -> tuple[Free, dict[int, float]]:
    free = tuple(draw.choice((0, 100, 250, 500, 750, PARTS, PARTS)) for _ in range(draw.choice((1, 2, 4))))
    asked = draw.sample((100, 200, 500, 700, PARTS, 2 * PARTS, 4 * PARTS), 3)
    return free, dict(zip(asked, (0.5, 0.3, 0.2), strict=True))


def test_fragmentation_is_what_no_placement_uses() -> None:
    draw = random.Random(1)
    for _ in range(300):
        free, demands = drawn(draw)
        assert fragmentation(free, demands) == pytest.approx(by_hand(free, demands))


def test_the_place_is_the_one_that_leaves_least() -> None:
    draw = random.Random(2)
    for _ in range(300):
        free, demands = drawn(draw)
        for demand in (100, 500, 700, PARTS, 2 * PARTS):
            grows = []
            for devices in placements(free, demand):
                after = tuple(h - min(demand, PARTS) * (d in devices) for d, h in enumerate(free))
                grows.append(by_hand(after, demands) - by_hand(free, demands))
            found = best_place(free, demand, demands)
            assert (found is None) == (not grows)
            if found is not None:
                assert found[0] == pytest.approx(min(grows))
                assert found[1] in set(placements(free, demand))


def test_shared_devices_in_a_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both parts go on one device, so that a job on two whole ones has room on a machine of three."""
    table = tmp_path / "pods.csv"
    table.write_text(PODS)
    assert main(["fleet", "replay", str(table), "--on", "1x3xv100-sxm-32gb", "--gpu-sharing", "--policy", "fgd"]) == 0
    assert "1 x 3 v100-sxm-32gb" in capsys.readouterr().out
    jobs = tuple(
        Job(id=f"j{i}", submit_s=i, work_s=100, devices=devices, share=share)
        for i, (devices, share) in enumerate(((1, 0.46), (1, 0.54), (2, 1.0)))
    )
    cluster = machines("1x3xv100-sxm-32gb", parts=True)
    result = replay(in_parts(Trace(name="t", format="openb", jobs=jobs)), cluster, policy("fgd"))
    assert result.waited_s.tolist() == [0, 0, 0]
    assert result.device_s["useful"] == pytest.approx(100 * 3)
    assert result.figures()["utilisation"] == pytest.approx(300 / (3 * 102))
    for name, parts in (("fifo", True), ("fgd", False)):
        with pytest.raises(InputError, match="--gpu-sharing"):
            replay(Trace(name="t", format="openb", jobs=jobs), machines("1x3xv100-sxm-32gb", parts=parts), policy(name))
    assert main(["fleet", "replay", str(table), "--on", "1x3xv100-sxm-32gb", "--gpu-sharing", "--mig"]) == 2
