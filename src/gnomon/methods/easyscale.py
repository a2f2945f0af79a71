"""EasyScale: a fixed number of logical workers on however many devices there are, with the same sums in the same order
(Li et al., SC 2023).

`easyscale(devices)` places worker v on device `devices[v]`. A device runs its workers one after the other; the
gradients are added in the order of the workers, 0, 1, 2 …, wherever they are: the running sum is sent from device to
device, and the total back to all. `additions` reads that order off a Program. Data-parallel only: each device holds the
whole model. `placed` decides where the workers of a plan run, from what is observed. Left out: the workers' other state
(random numbers, data order, batch-norm buffers), which is the runtime's (`runtime.launch.logical_workers`, which adds
up in a tree in place of a chain), and buckets, which repeat this for each bucket.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from gnomon.errors import PlanError, ProgramError
from gnomon.methods.method import Method
from gnomon.plans import Plan, Unit
from gnomon.program import (
    STANDARD_BUFFERS,
    BufferClass,
    Kind,
    Override,
    Program,
    ProgramBuilder,
    Structure,
    effects,
    with_kinds,
)

KINDS = with_kinds(
    Kind(name="B", effects=effects("read P, consume S, write DP")),
    Kind(name="RED", stream="reduce", effects=effects("consume DP, accumulate G")),
    Kind(name="SEND_G", stream="send", effects=effects("consume G"), comm="sum", message="send", hop=1),
    Kind(name="RECV_G", stream="recv", effects=effects("write G"), comm="sum", message="recv", hop=1),
    Kind(name="SEND_T", stream="send", effects=effects("read G"), comm="total", message="send", hop=1),
    Kind(name="RECV_T", stream="recv", effects=effects("write G"), comm="total", message="recv", hop=1),
)
"""B leaves a worker's gradient in DP, RED adds it to the running sum G, which SEND_G hands on; SEND_T spreads the
total."""

BUFFERS = (*STANDARD_BUFFERS, BufferClass(name="DP", memory="not in the step's"))
"""The standard buffers and the gradient of one worker."""


def easyscale(devices: Sequence[int]) -> Program:
    """The step of `len(devices)` logical workers, worker v on device devices[v].

    Devices are stages of the Program that exchange nothing but sums; worker v is unit v. The device of the last worker
    sends the total to the others in their order, and updates once the total has left. PlanError unless the devices are
    0 … n-1, each with a worker.
    """
    count = max(devices, default=-1) + 1
    idle = set(range(count)) - set(devices)
    if not devices or min(devices) < 0 or idle:
        raise PlanError(f"workers are on devices {tuple(devices)}; number the devices from 0, each with a worker")
    units = tuple(Unit(pieces=((v, 0, 1),), weight=1 / len(devices), worker=v) for v in range(len(devices)))
    builder = ProgramBuilder(num_stages=count, units=units, kinds=KINDS)
    for device in range(count):
        cls = builder.rank_class()
        for worker in (v for v, place in enumerate(devices) if place == device):
            builder.add_all(cls, [("F", device, worker), ("B", device, worker)])
            if worker and devices[worker - 1] != device:
                builder.add(cls, "RECV_G", device, worker - 1, override=_peer(devices[worker - 1]))
            builder.add(cls, "RED", device, worker)
            if worker + 1 < len(devices) and devices[worker + 1] != device:
                builder.add(cls, "SEND_G", device, worker, override=_peer(devices[worker + 1]))
        if device == devices[-1]:
            for other in range(count):
                if other != device:
                    builder.add(cls, "SEND_T", device, override=_peer(other))
        else:
            builder.add(cls, "RECV_T", device, override=_peer(devices[-1]))
        builder.add(cls, "OPT", device)
    return builder.build(buffers=BUFFERS, chains=tuple(range(count)))


def _peer(device: int) -> Override:
    return Override(peer=device)


def additions(structure: Structure) -> tuple[tuple[int, ...], ...]:
    """Workers in the order in which their gradients are added up, in the sum that each device's update reads.

    Follows the contents of G through the Program's actions, so it says what is computed, not what was meant.
    ProgramError when an update reads a sum that no reduction wrote.
    """
    program = structure.program
    sums: dict[int, tuple[int, ...]] = {}
    sent: dict[tuple[str, int, int], tuple[int, ...]] = {}
    updates: dict[int, tuple[int, ...]] = {}
    # In topological order, so that a message is there before it is received.
    for row in sorted(range(program.num_rows), key=structure.order.position.__getitem__):
        kind, device, unit = program.kinds[program.kind[row]], int(program.stage[row]), int(program.unit[row])
        override = program.overrides.get(row)
        peer = device + (kind.hop if kind.message == "send" else -kind.hop)
        peer = override.peer if override is not None and override.peer is not None else peer
        if kind.name == "RED":
            sums[device] = (*sums.get(device, ()), unit)
        elif kind.message == "send":
            # The running sum leaves its device, the total stays there too: as the effects of SEND_G and SEND_T say.
            sent[kind.comm, peer, unit] = sums[device] if kind.name == "SEND_T" else sums.pop(device)
        elif kind.message == "recv":
            sums[device] = sent[kind.comm, device, unit]
        elif kind.name == "OPT":
            if device not in sums:
                raise ProgramError(f"{program.where(row)} updates with a sum that no reduction wrote")
            updates[device] = sums.pop(device)
    return tuple(updates[device] for device in sorted(updates))


Node = tuple[int, int]
"""Workers from the first up to the second, without it: of a binary tree over workers 0 … n-1, in which a node of k
workers is the sum of its first 2^j (the largest power of two below k) and of the rest (`runtime.mesh.ordered_sums`)."""


def halves(node: Node) -> tuple[Node, Node]:
    """The two that a node of several workers is the sum of."""
    low, high = node
    # (k - 1).bit_length() - 1 is the exponent of the largest power of two below k.
    middle = low + (1 << ((high - low - 1).bit_length() - 1))
    return (low, middle), (middle, high)


def nodes_of(workers: Collection[int], total: int) -> list[Node]:
    """The largest nodes of the tree over `total` workers whose workers are all among these, in order."""
    own = set(workers)

    def within(node: Node) -> Iterator[Node]:
        if own.issuperset(range(*node)):
            yield node
        elif node[1] - node[0] > 1:
            for half in halves(node):
                yield from within(half)

    return list(within((0, total)))


def pair_of(node: Node, total: int) -> tuple[Node, Node] | None:
    """The halves of which the node is one, in the tree over `total` workers; None of the whole."""
    above = (0, total)
    while above != node:
        pair = halves(above)
        if node in pair:
            return pair
        above = pair[0] if node[0] < pair[0][1] else pair[1]
    return None


def merged(nodes: Collection[Node], worker: int, total: int) -> set[Node]:
    """The sums that a process holds once a worker's gradient has come to those that it held, and what can be added up
    is."""
    sums, node = {*nodes, (worker, worker + 1)}, (worker, worker + 1)
    while (pair := pair_of(node, total)) is not None and sums.issuperset(pair):
        sums.difference_update(pair)
        node = pair[0][0], pair[1][1]
        sums.add(node)
    return sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What is known of the processes that can compute now."""

    processes: int
    """How many."""
    speeds: tuple[float, ...] = ()
    """Of each, in any unit; empty: all alike."""


def place_workers(plan: Plan, observation: Observation) -> Plan:
    """The plan with its logical workers on the processes that there are: a controller, so it depends on nothing else.

    Workers next to each other share a process. The time of the slowest process is the least that there is with at
    least one worker on each, workers all taking the same; processes beyond the number of workers get none.
    PlanError for a plan that has no logical workers, no process, and speeds that are not one positive number a process.
    """
    if (why := reason(plan)) is not None:
        raise PlanError(f"easyscale cannot be used in this plan: {why}")
    workers, stated_speeds = plan.world_size, observation.speeds
    if observation.processes < 1:
        raise PlanError(f"{workers} logical workers cannot run on {observation.processes} processes; give at least 1")
    if stated_speeds and (
        len(stated_speeds) != observation.processes or not all(0 < speed < float("inf") for speed in stated_speeds)
    ):
        raise PlanError(f"speeds {stated_speeds} must give each of {observation.processes} processes a positive number")
    count = min(workers, observation.processes)
    speeds = stated_speeds[:count] or (1.0,) * count
    shares = [1] * count
    for _ in range(workers - count):
        # Workers all take the same: giving each to the process that would be done with it first leaves the slowest
        # process as fast as it can be.
        best = min(range(count), key=lambda process: ((shares[process] + 1) / speeds[process], process))
        shares[best] += 1
    return replace(plan, placement=tuple(process for process, share in enumerate(shares) for _ in range(share)))


GAIN = 0.1
"""Share of the slowest process's time from which on workers move: less is noise of a measurement."""


def move_workers(plan: Plan, observation: Observation) -> Plan:
    """The plan with workers moved to faster processes, or the same plan where the slowest process's time would fall by
    less than GAIN: a controller too. observation: of the processes that the plan's workers are on, with speeds."""
    better = place_workers(plan, observation)
    before, after = (_slowest(one.placement, observation.speeds) for one in (plan, better))
    return better if after < (1 - GAIN) * before else plan


def _slowest(placement: Sequence[int], speeds: Sequence[float]) -> float:
    return max(placement.count(process) / speeds[process] for process in set(placement))


def reason(plan: Plan) -> str | None:
    """Why the ranks of the plan cannot be logical workers, and what to change; None where they can."""
    mesh = plan.mesh
    if len(plan.stages) > 1 or any(stage.shares for stage in plan.stages) or mesh.world_size != mesh.data_ranks:
        return "its ranks do not all hold the whole model and take equal shares; leave dp_replicate alone above 1"
    if plan.stages and plan.stages[0].mesh.world_size != plan.stages[0].mesh.data_ranks:
        return "its ranks do not all hold the whole model; leave dp_replicate alone above 1"
    if plan.optimizer.zero:
        return (
            f"ZeRO divides state among ranks, and each process holds all of it; use zero = 0, not {plan.optimizer.zero}"
        )
    if plan.schedule.passes:
        return f"{plan.schedule.passes[0].name} rewrites the rows of its ranks; leave it out"
    return None


METHOD = Method(
    name="easyscale",
    paper="EasyScale, Li et al., SC 2023",
    about="logical workers keep their number and the order of their sums on however many devices there are",
    switch="placement",
    exactness="bitwise",
    missing={"planned": "who runs a plan says how many processes there are (`gnomon run --processes`), not the search"},
    on=lambda plan: plan.num_devices < plan.world_size,
    refusal=reason,
)
