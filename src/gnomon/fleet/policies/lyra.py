"""Lyra: training borrows idle inference nodes, gives them back with few preemptions, and elastic jobs use what is left.

Three parts, each of which can be left out to see what it brings. *Reclaim*: elastic jobs first give up workers beyond
their minimum on the nodes that go back; then the node is vacated whose jobs cost least, a job counting 1 over the nodes
that it stands on, again and again, since its jobs leave other nodes too. *Start*: minimum demands, shortest job first;
rigid jobs prefer training nodes, elastic ones borrowed nodes. *Scale*: free devices go to elastic jobs by a
multiple-choice knapsack whose values are the seconds that a job gains. Source: Li et al., EuroSys 2023 (Lyra; Aryl).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from zlib import crc32

from gnomon.fleet.job import Job
from gnomon.fleet.knapsack import choose
from gnomon.fleet.placement import give, place, take
from gnomon.fleet.state import Active, Allocation, Decide, Decision, Forecasts, Policy, State, devices_of

Reclaim = Callable[[State, Sequence[int], Mapping[int, Sequence[str]], Mapping[str, Sequence[int]]], int]
"""(state, candidates, jobs by node, nodes by job) -> the node to vacate next."""


def cheapest(
    state: State, nodes: Sequence[int], jobs: Mapping[int, Sequence[str]], spans: Mapping[str, Sequence[int]]
) -> int:
    """The node whose jobs cost least: each 1 over the number of its nodes (Lyra)."""
    return min(nodes, key=lambda node: (sum(1.0 / len(spans[job]) for job in jobs.get(node, ())), node))


def fewest(
    state: State, nodes: Sequence[int], jobs: Mapping[int, Sequence[str]], spans: Mapping[str, Sequence[int]]
) -> int:
    """The node with fewest jobs."""
    return min(nodes, key=lambda node: (len(jobs.get(node, ())), node))


def at_random(
    state: State, nodes: Sequence[int], jobs: Mapping[int, Sequence[str]], spans: Mapping[str, Sequence[int]]
) -> int:
    """Any node, drawn from the time and its number."""
    # A hash in place of a generator: a replay that is run again draws the same nodes.
    return min(nodes, key=lambda node: (crc32(f"{state.now:.3f} {node}".encode()), node))


def lyra(*, loans: bool = True, elastic: bool = True, reclaim: Reclaim = cheapest) -> Decide:
    """The policy, whole or with parts left out."""

    def decide(state: State, forecasts: Forecasts) -> Sequence[Decision]:
        return _Round(state, forecasts, loans, elastic, reclaim).decisions()

    return decide


class _Round:
    """One round of decisions, on copies of what the state says."""

    def __init__(self, state: State, forecasts: Forecasts, loans: bool, elastic: bool, reclaim: Reclaim) -> None:
        self.state, self.forecasts, self.elastic, self.reclaim = state, forecasts, elastic, reclaim
        pools = state.machines.pools
        self.training = [n for i, p in enumerate(pools) if not p.serves for n in state.machines.nodes_of(i)]
        self.borrowed = (
            [n for i, p in enumerate(pools) if p.serves for n in state.machines.nodes_of(i)] if loans else []
        )
        self.free = list(state.free)
        self.allocations = {active.job.id: active.allocation for active in state.running}
        self.active = state.jobs()
        self.given_back: set[int] = set()

    def decisions(self) -> Sequence[Decision]:
        stopped = self._give_back() if self.state.owed else set()
        for node in self.given_back:
            self.free[node] = 0
        self._start()
        if self.elastic:
            self._scale()
        before = {active.job.id: active.allocation for active in self.state.running}
        out = [Decision(job, ()) for job in before if job in stopped]
        out += [
            Decision(job, allocation)
            for job, allocation in self.allocations.items()
            if allocation != before.get(job, ()) and job not in stopped
        ]
        return out

    # Reclaim.

    def _give_back(self) -> set[str]:
        """Vacate as many nodes as inference wants; the jobs that are preempted for it."""
        stopped: set[str] = set()
        capacity = self.state.machines.capacity
        own = {n for i, p in enumerate(self.state.machines.pools) if p.serves for n in self.state.machines.nodes_of(i)}
        candidates = sorted({n for allocation in self.allocations.values() for n, _ in allocation if n in own})
        for _ in range(self.state.owed):
            candidates = [n for n in candidates if n not in self.given_back]
            if not candidates:
                break
            freed = next((n for n in candidates if self.free[n] == capacity[n]), None)
            if freed is None:
                freed = self._by_scaling_in(candidates)
            if freed is None:
                freed = self._by_preemption(candidates, stopped)
            self.given_back.add(freed)
        return stopped

    def _by_scaling_in(self, candidates: Sequence[int]) -> int | None:
        """A node whose jobs can all do without it, each keeping its minimum."""
        jobs = self._by_node()
        for node in candidates:
            on = jobs.get(node, ())
            if not self.elastic or not all(self._can_leave(job, node) for job in on):
                continue
            for job in on:
                used = sum(count for n, count in self.allocations[job] if n == node)
                self.allocations[job] = tuple((n, count) for n, count in self.allocations[job] if n != node)
                self.free[node] += used
            return node
        return None

    def _can_leave(self, job: str, node: int) -> bool:
        rest = sum(count for n, count in self.allocations[job] if n != node)
        return rest >= self.active[job].job.fewest

    def _by_preemption(self, candidates: Sequence[int], stopped: set[str]) -> int:
        jobs = self._by_node()
        spans = {job: [n for n, _ in allocation] for job, allocation in self.allocations.items()}
        node = self.reclaim(self.state, candidates, jobs, spans)
        for job in jobs.get(node, ()):
            give(self.free, self.allocations[job])
            del self.allocations[job]
            stopped.add(job)
        return node

    def _by_node(self) -> dict[int, list[str]]:
        out: dict[int, list[str]] = {}
        for job, allocation in self.allocations.items():
            for node, _ in allocation:
                out.setdefault(node, []).append(job)
        return out

    # Start.

    def _start(self) -> None:
        """Minimum demands of those that wait, shortest first; extra workers of elastic jobs make room."""
        waiting = list(self.state.queue)
        if not waiting:
            return
        now = self.state.now
        spare = sum(self.free[n] for n in (*self.training, *self.borrowed)) + (self._extra() if self.elastic else 0)
        fit = [active for active in waiting if self._wants(active.job) <= spare]
        for active in sorted(
            # Seconds left on the devices asked for, stretched to what the job starts with as if its rate were linear in
            # them.
            fit,
            key=lambda active: (active.left_s(now) * active.job.devices / self._wants(active.job), active.index),
        ):
            count = self._wants(active.job)
            if count > spare:
                continue
            allocation = self._place(active.job, count)
            if allocation is None and self.elastic and self._extra():
                self._shrink_all()
                allocation = self._place(active.job, count)
            if allocation is not None:
                take(self.free, allocation)
                self.allocations[active.job.id] = allocation
                spare -= count
            if spare <= 0:
                break

    def _wants(self, job: Job) -> int:
        """What a job starts with: its minimum if it is elastic, else what it asked for."""
        return job.fewest if self.elastic else job.devices

    def _extra(self) -> int:
        """Workers beyond the minimum, of all running elastic jobs."""
        return sum(max(devices_of(allocation) - self._least(job), 0) for job, allocation in self.allocations.items())

    def _least(self, job: str) -> int:
        return self._wants(self.active[job].job)

    def _shrink_all(self) -> None:
        """Every elastic job keeps its minimum: of training nodes first if it has them."""
        for job, allocation in self.allocations.items():
            if devices_of(allocation) > self._least(job):
                self.allocations[job] = self._trim(allocation, self._least(job))

    def _place(self, job: Job, count: int) -> Allocation | None:
        """Rigid jobs on training nodes if they can, elastic ones on borrowed nodes."""
        pools = (self.training, self.borrowed) if not job.elastic else (self.borrowed, self.training)
        per_node = max(self.state.machines.capacity)
        most = 0 if self.state.spread else -(-count // per_node)
        needed = self.forecasts.memory_bytes(job, count)
        for nodes in pools:
            allocation = place(self.free, [n for n in nodes if self._memory(n) >= needed], count, most)
            if allocation is not None:
                return allocation
        return None

    def _memory(self, node: int) -> float:
        """Memory bytes of each device of a node."""
        machines = self.state.machines
        return machines.pools[machines.pool_of[node]].memory_bytes

    # Scale.

    def _scale(self) -> None:
        """Free devices to elastic jobs, by the seconds that each gains."""
        jobs = [self.active[job] for job in self.allocations if self.active[job].job.elastic]
        free = {id(nodes): sum(self.free[n] for n in nodes) for nodes in (self.training, self.borrowed)}
        capacity = sum(free.values()) + sum(devices_of(self.allocations[a.job.id]) - a.job.fewest for a in jobs)
        if not jobs or capacity <= 0:
            return
        chosen = choose([self._gains(active) for active in jobs], capacity)
        # Item i is i + 1 workers beyond the minimum, and -1 is none: one formula for both.
        targets = {a.job.id: a.job.fewest + 1 + item for a, item in zip(jobs, chosen, strict=True)}
        grow = []
        for active in jobs:
            job = active.job.id
            if targets[job] < devices_of(self.allocations[job]):
                self.allocations[job] = self._trim(self.allocations[job], targets[job])
            elif targets[job] > devices_of(self.allocations[job]):
                grow.append(job)
        for job in grow:
            self._extend(job, targets[job] - devices_of(self.allocations[job]))

    def _gains(self, active: Active) -> list[tuple[int, float]]:
        """(extra workers, seconds gained) of each number of workers that a job can use."""
        job, now = active.job, self.state.now
        remaining_s, node = active.left_s(now), self.allocations[active.job.id][0][0]
        # As if all were on one node: the knapsack is about how many, not where.
        base = remaining_s / self._rate(job, node, job.fewest)
        return [
            (extra, base - remaining_s / self._rate(job, node, job.fewest + extra))
            for extra in range(1, job.most - job.fewest + 1)
        ]

    def _rate(self, job: Job, node: int, count: int) -> float:
        return self.forecasts.phase(job, 0.0, ((node, count),))[0]

    def _trim(self, allocation: Allocation, count: int) -> Allocation:
        """The first `count` devices; those on borrowed nodes go first."""
        borrowed = set(self.borrowed)
        keep = []
        # What is kept comes first: training nodes before borrowed ones, which go back, then nodes with most of its
        # devices, so that the job stands on few.
        for node, have in sorted(allocation, key=lambda part: (part[0] in borrowed, -part[1], part[0])):
            use = min(have, count)
            count -= use
            self.free[node] += have - use
            if use:
                keep.append((node, use))
        return tuple(keep)

    def _extend(self, job: str, added: int) -> None:
        """Up to `added` devices: on its own nodes first, then on the emptiest ones that are no slower."""
        speed = self.state.machines.speed
        devices_of_node = dict(self.allocations[job])
        # Workers of a job wait for the slowest in each step: a node slower than those it has would hold up all of them.
        want = min(speed[node] for node in devices_of_node)
        needed = self.forecasts.memory_bytes(self.active[job].job, sum(devices_of_node.values()) + added)
        allowed = [
            n
            for n in (*self.borrowed, *self.training)
            if self.free[n] and speed[n] >= want and self._memory(n) >= needed
        ]
        for node in sorted(allowed, key=lambda n: (n not in devices_of_node, -self.free[n], n)):
            use = min(self.free[node], added)
            devices_of_node[node] = devices_of_node.get(node, 0) + use
            self.free[node] -= use
            added -= use
            if not added:
                break
        self.allocations[job] = tuple(devices_of_node.items())


def _policy(name: str, about: str, decide: Decide, loans: bool = True) -> Policy:
    return Policy(
        name=name,
        paper="Li et al., EuroSys 2023",
        about=about,
        decide=decide,
        needs="duration",
        interval_s=300.0,
        loans=loans,
    )


LYRA = _policy("lyra", "borrows inference nodes, reclaims by preemption cost, scales elastic jobs", lyra())
VARIANTS = (
    _policy("lyra-no-loan", "Lyra without borrowing, rigid jobs", lyra(loans=False, elastic=False), False),
    _policy("lyra-elastic-only", "Lyra without borrowing", lyra(loans=False), False),
    _policy("lyra-rigid", "Lyra with rigid jobs", lyra(elastic=False)),
    _policy(
        "lyra-rigid-random", "borrows, rigid jobs, vacates nodes at random", lyra(elastic=False, reclaim=at_random)
    ),
    _policy(
        "lyra-rigid-fewest", "borrows, rigid jobs, vacates nodes with fewest jobs", lyra(elastic=False, reclaim=fewest)
    ),
    _policy("lyra-random", "Lyra that vacates nodes at random", lyra(reclaim=at_random)),
    _policy("lyra-fewest", "Lyra that vacates nodes with fewest jobs", lyra(reclaim=fewest)),
)
"""Lyra with parts left out, for ablations."""
