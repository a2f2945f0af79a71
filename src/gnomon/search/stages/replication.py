"""DAPPLE's programme: where to cut the layers, how often to replicate each stage, and on which nodes to put it.

Fan et al. 2021 (PPoPP, "DAPPLE: a pipelined data parallel approach for training large models"). `pipelines(costs,
keep)` returns the best pipelines by a closed form of the step (`latency`: the pivot stage sets the pace, what surrounds
it adds a ramp; messages are stages of their own), placed by three policies. What a stage or a message takes is asked of
`ReplicationCosts`: prices of a model (`dapple`), or times that somebody measured. Leaves out the simulator, which
decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

EXACT_DEVICES = 8
"""The number of devices up to which no state is dropped. Above it the best `BEAM` states with as many layers are
extended, which found the same plan as all of them in every case of benchmarks/results/uneven.md."""

BEAM = 12
"""The number of states with as many layers that are extended there; on clusters beyond `FINE_DEVICES` a third of
them."""

FINE_DEVICES = 16
"""The number of devices up to which every number of replicas is tried; above it those that take powers of two, whole
nodes in such numbers, or all devices left but so many."""

Used = tuple[int, ...]
"""The number of devices taken on each node."""


class PipelineStep(NamedTuple):
    """A stage, or a message between two, as the closed form sees it: seconds for one microbatch."""

    forward: float
    """Seconds of its forward."""
    backward: float
    """Seconds of its backward."""
    reduce: float = 0.0
    """Seconds of the all-reduce of its gradients after the last backward."""
    message: bool = False
    """Whether it is a message, whose forwards and backwards go at once: a link has two directions."""

    @property
    def pace(self) -> float:
        """Seconds that a microbatch takes of the stage or message in steady state."""
        return max(self.forward, self.backward) if self.message else self.forward + self.backward


@dataclass(frozen=True, slots=True)
class StagePiece:
    """A stage of the programme: counted layers [first, last) on so many devices of each node."""

    first: int
    """The first counted layer."""
    last: int
    """One past the last."""
    used: Used
    devices: tuple[int, ...]


Pieces = tuple[StagePiece, ...]


class ReplicationCosts(Protocol):
    """What the programme asks about one number of microbatches."""

    @property
    def count(self) -> int:
        """Counts the microbatches of a step."""

    @property
    def twice(self) -> bool:
        """Whether stages may begin with twice as many microbatches under way, which hides messages."""

    @property
    def num_layers(self) -> int:
        """Counts the layers that may be cut apart."""

    @property
    def nodes(self) -> Used:
        """The number of devices of each node."""

    @property
    def replicas(self) -> tuple[int, ...]:
        """The numbers of replicas that a stage may have, ascending."""

    def stage(self, piece: StagePiece) -> PipelineStep:
        """Prices a stage, in seconds for one microbatch."""

    def message(self, source: StagePiece, target: StagePiece) -> PipelineStep:
        """Prices what the last layer of one stage sends the next, in seconds for one microbatch."""

    def fits(self, piece: StagePiece, in_flight: int) -> bool:
        """Whether a stage may fit that holds so many microbatches at once."""


def latency(steps: Sequence[PipelineStep], microbatches: int, *, twice: bool = True) -> float:
    """Seconds of an optimizer step: until the pivot begins, the pivot's microbatches, and what is left after it.

    The pivot is the stage with the fewest gaps: the one for which these add up to most, gradients' reductions aside.
    Source: DAPPLE, section 4.1. That form takes for granted that the pivot always has a microbatch to go on with; the
    wait for the first and the last to come back (`_round_trips`) is the longer of the two where there are few. twice:
    whether stages begin with twice as many microbatches under way.
    """
    pivot, most, before = 0, -1.0, 0.0
    # before: one microbatch forward and back through all stages up to this one. The pivot maximises (m - 1) x pace +
    # before.
    for stage, step in enumerate(steps):
        before += step.forward + step.backward
        if (microbatches - 1) * step.pace + before >= most:
            pivot, most = stage, (microbatches - 1) * step.pace + before
    steady = (microbatches - 1) * steps[pivot].pace
    # a stage before the pivot ends after the backwards between them, one behind it has ended before
    # Walking away from the pivot, `left` is when a stage's last backward ends, relative to the pivot's steady phase.
    end, remaining_s = 0.0, steps[pivot].backward
    for stage in range(pivot, -1, -1):
        end = max(end, steps[stage].reduce + remaining_s)
        remaining_s += steps[stage - 1].backward if stage else 0.0
    remaining_s = steps[pivot].backward
    for stage in range(pivot + 1, len(steps)):
        remaining_s -= steps[stage - 1].backward
        end = max(end, steps[stage].reduce + remaining_s)
    form = sum(step.forward for step in steps[: pivot + 1]) + steady + end
    return max(form, _round_trips(steps, microbatches, twice))


def _round_trips(steps: Sequence[PipelineStep], microbatches: int, twice: bool) -> float:
    """Seconds of a step at least: the longest over the stages.

    Proof: a stage with k microbatches under way does k forwards, then a backward and a forward in turn, then k
    backwards. Its first backward comes after the first microbatch's forward and its way to the end and back. All
    forwards from number k on, and as many backwards, come after that, and each of them after the k-th before it has
    come back; its last backward comes after the last of them and another such way, and then the stages before it have
    theirs.
    """
    least = ahead = behind = 0.0
    # ahead, behind: one forward, one backward of everything before the stage; beyond: both of everything after it.
    later_s = sum(step.forward + step.backward for step in steps)
    after = sum(not step.message for step in steps)
    for step in steps:
        later_s -= step.forward + step.backward
        if not step.message:
            # Warm-up of DAPPLE: stage i of p holds p - i microbatches, or 2 (p - i) - 1 with the second policy.
            under_way = min(microbatches, 2 * after - 1 if twice else after)
            after -= 1
            rest = microbatches - under_way
            # came: when the first microbatch's gradient is back at this stage.
            came = ahead + step.forward + later_s
            if rest:
                turn = step.forward + later_s + step.backward
                # The stage can take a new microbatch only when an old one came back: with k under way, every k-th waits
                # a full turn.
                turns, first = divmod(microbatches - 1, under_way)
                done = max(
                    came + rest * (step.forward + step.backward), ahead + (first + 1) * step.forward + turns * turn
                )
                done += later_s + step.backward
            else:
                done = came + microbatches * step.backward
            least = max(least, done + max(behind, step.reduce))
        ahead, behind = ahead + step.forward, behind + step.backward
    return least


def fresh_first(free: Used, size: Used, count: int) -> Used:
    """Takes devices on nodes of which none is taken, then on the others."""
    # False sorts first: nodes of which nothing is taken, then the others, each in order of number.
    return _in_order(free, sorted(range(len(free)), key=lambda node: (free[node] != size[node], node)), count)


def append_first(free: Used, size: Used, count: int) -> Used:
    """Takes devices on nodes of which some are taken, then on fresh ones."""
    # False sorts first: nodes of which something is taken, then fresh ones.
    return _in_order(free, sorted(range(len(free)), key=lambda node: (free[node] == size[node], node)), count)


def scatter_first(free: Used, size: Used, count: int) -> Used:
    """Takes devices one by one from the node with the most free ones."""
    free_left, dealt = list(free), [0] * len(free)
    for _ in range(count):
        node = max(range(len(free_left)), key=lambda n: (free_left[n], -n))
        free_left[node] -= 1
        dealt[node] += 1
    return tuple(dealt)


POLICIES: Mapping[str, Callable[[Used, Used, int], Used]] = {
    "fresh first": fresh_first,
    "append first": append_first,
    "scatter first": scatter_first,
}
"""Maps the name of a policy to its function: (free devices of each node, devices of each node, how many) -> how many on
each node."""


def _in_order(free: Used, nodes: Sequence[int], count: int) -> Used:
    dealt = [0] * len(free)
    for node in nodes:
        dealt[node] = min(free[node], count)
        count -= dealt[node]
    return tuple(dealt)


def place(nodes: Used, used: Used, dealt: Used) -> tuple[int, ...]:
    """Lists the next free devices of each node by their number in the cluster."""
    starts = np.cumsum((0, *nodes)).tolist()
    return tuple(starts[n] + used[n] + i for n, count in enumerate(dealt) for i in range(count))


def steps_of(costs: ReplicationCosts, pieces: Pieces) -> list[PipelineStep]:
    """The stages of a pipeline and the messages between them, in order."""
    steps: list[PipelineStep] = []
    for i, piece in enumerate(pieces):
        if i:
            steps.append(costs.message(pieces[i - 1], piece))
        steps.append(costs.stage(piece))
    return steps


def step_s(costs: ReplicationCosts, pieces: Pieces) -> float:
    """Seconds of the closed form, messages and reductions included."""
    return latency(steps_of(costs, pieces), costs.count, twice=costs.twice)


def may_fit(costs: ReplicationCosts, pieces: Pieces) -> bool:
    """Whether every stage of a whole pipeline may fit: stage i of p holds p - i microbatches at once."""
    return all(costs.fits(piece, min(len(pieces) - i, costs.count)) for i, piece in enumerate(pieces))


class _State(NamedTuple):
    """Finished stages of a pipeline; the rest of the layers are one last stage on the rest of the devices."""

    seconds: float
    pieces: Pieces
    steps: tuple[PipelineStep, ...]
    least: float = 0.0
    """Seconds of every pipeline that begins so, at least."""


def pipelines(costs: ReplicationCosts, keep: int) -> tuple[list[tuple[float, Pieces]], int]:
    """(the best by the closed form: (seconds, stages), states extended).

    The programme. A state is the number of layers in finished stages and the devices of each node that those use; the
    rest of the layers are one last stage on the rest of the devices. Of each state the finished stages with the
    shortest step are kept. Extending it cuts the last stage: so many layers more, on so many devices, by each policy.
    Exact up to `EXACT_DEVICES` for a closed form in which the best plan's finished stages are the best of their state,
    which the pivot's is not always. Data parallelism, where it is possible, is among the plans whatever its place.

    It begins with what the paper searches apart: all pipelines of two stages, and those of equally many replicas in
    every stage, straight ones among them. Left out are stages after which no pipeline is among the best: the pivot of
    `latency` is the stage for which (m - 1) paces and all forwards and backwards up to it add up to most, and the step
    is at least that long; so no stage may take longer than the best so far. More layers only take longer. Nor may what
    is left of the layers be too much for what is left of the devices; there a microbatch is taken for granted to be no
    slower whole than in parts.
    """
    total, nodes = costs.num_layers, costs.nodes
    beam = None if sum(nodes) <= EXACT_DEVICES else BEAM if sum(nodes) <= FINE_DEVICES else BEAM // 3
    whole = [(step_s(costs, pieces), pieces) for pieces in dict.fromkeys(_seeds(costs)) if may_fit(costs, pieces)]
    # kept: the `keep` shortest steps so far; the last of them is what a new pipeline must beat.
    best_seconds = sorted([*(seconds for seconds, _ in whole), *[float("inf")] * keep])[:keep]
    states: dict[int, dict[Used, _State]] = {0: {(0,) * len(nodes): _State(0.0, (), ())}}
    # States by layers done: extending only adds layers, so each number is complete when its turn comes.
    extended = 0
    for done in range(total):
        reached = sorted(states.pop(done, {}).items(), key=lambda item: item[1].seconds)
        for used, state in reached[:beam]:
            free = tuple(n - u for n, u in zip(nodes, used, strict=True))
            # Close the pipeline here: all layers left on all devices left.
            if sum(free) in costs.replicas:
                pieces = (*state.pieces, StagePiece(done, total, free, place(nodes, used, free)))
                if may_fit(costs, pieces):
                    whole.append((step_s(costs, pieces), pieces))
                    best_seconds = sorted([*best_seconds, whole[-1][0]])[:keep]
            extended += 1
            for piece, candidate in _extensions(costs, state, used, free, best_seconds[-1]):
                used_after = tuple(u + t for u, t in zip(used, piece.used, strict=True))
                # Dominance: of one state only the finished stages with the shortest step are kept.
                known = states.setdefault(piece.last, {})
                if used_after not in known or candidate.seconds < known[used_after].seconds:
                    known[used_after] = candidate
    found_s = {pieces: seconds for seconds, pieces in whole}
    # Data parallelism (one stage) is always reported, for it is what the answer is compared with.
    best = sorted(((seconds, pieces) for pieces, seconds in found_s.items()), key=lambda entry: entry[0])
    return [*best[:keep], *(entry for entry in best[keep:] if len(entry[1]) == 1)], extended


def _seeds(costs: ReplicationCosts) -> Iterator[Pieces]:
    """Data parallelism, every pipeline of two stages in order of devices, and pipelines of equal replicas whose slowest
    stage is as fast as can be."""
    total, devices = costs.num_layers, place(costs.nodes, (0,) * len(costs.nodes), costs.nodes)

    def piece(first: int, last: int, a: int, b: int) -> StagePiece:
        return StagePiece(first, last, taken_of(costs.nodes, range(a, b)), devices[a:b])

    # In order of devices: stage boundaries follow node boundaries wherever the numbers allow.
    if len(devices) in costs.replicas:
        yield (piece(0, total, 0, len(devices)),)
    for one in _counts(costs, len(devices)):
        if len(devices) - one in costs.replicas:
            for cut in range(1, total):
                yield piece(0, cut, 0, one), piece(cut, total, one, len(devices))
    for replicas in costs.replicas:
        stages, rest = divmod(len(devices), replicas)
        if not rest and 2 < stages <= total:
            ranges = [(replicas * stage, replicas * (stage + 1)) for stage in range(stages)]
            yield _balanced(costs, ranges, piece)


def taken_of(nodes: Used, devices: range) -> Used:
    """How many of a range of devices each node has."""
    ends = np.cumsum(nodes).tolist()
    return tuple(max(0, min(devices.stop, e) - max(devices.start, e - n)) for e, n in zip(ends, nodes, strict=True))


def _balanced(
    costs: ReplicationCosts, ranges: Sequence[tuple[int, int]], piece: Callable[[int, int, int, int], StagePiece]
) -> Pieces:
    """The cut whose slowest stage is fastest, of stages on these ranges of devices: halving the pace that is allowed,
    each stage taking as many layers as that lets it, but leaving one to each that follows."""
    total = costs.num_layers

    def cut(pace: float) -> Pieces | None:
        balanced: list[StagePiece] = []
        for stage, (a, b) in enumerate(ranges):
            first, most = balanced[-1].last if balanced else 0, total - (len(ranges) - stage - 1)
            # One layer at least even where that is slower than the pace; `slowest` refuses the cut then.
            last = first + 1
            while last < most and costs.stage(piece(first, last + 1, a, b)).pace <= pace:
                last += 1
            balanced.append(piece(first, last, a, b))
        slowest = max(costs.stage(part).pace for part in balanced)
        return tuple(balanced) if balanced[-1].last == total and slowest <= pace else None

    low, high = 0.0, costs.stage(piece(0, total, *ranges[0])).pace
    # Twenty halvings: the pace to one part in a million of the slowest possible.
    best = cut(high)
    for _ in range(20):
        middle = (low + high) / 2
        pieces = cut(middle)
        if pieces is None:
            low = middle
        else:
            high, best = middle, pieces
    assert best is not None, "a pace that one stage keeps with all layers is kept by any cut"
    return best


def _extensions(
    costs: ReplicationCosts, state: _State, used: Used, free: Used, most: float
) -> Iterator[tuple[StagePiece, _State]]:
    """(stage that may come next, state with it), each placement once; not those that take `most` seconds or longer."""
    total, nodes, free_devices = costs.num_layers, costs.nodes, sum(free)
    at = state.pieces[-1].last if state.pieces else 0
    before = sum(step.forward + step.backward for step in state.steps)
    for count in _counts(costs, free_devices):
        # Replicas that the last stage could have on what is left.
        rest = max((m for m in costs.replicas if m <= free_devices - count), default=0)
        if not rest:
            continue
        # Policies often agree; each placement is looked at once.
        for dealt in dict.fromkeys(policy(free, nodes, count) for policy in POLICIES.values()):
            devices = place(nodes, used, dealt)
            after = tuple(u + t for u, t in zip(used, dealt, strict=True))
            others = tuple(n - u for n, u in zip(nodes, after, strict=True))
            last = place(nodes, after, others)[:rest]
            message: tuple[PipelineStep, ...] = ()
            if state.pieces:
                # A message's price does not depend on how many layers the next stage has: one stands for all.
                message = (costs.message(state.pieces[-1], StagePiece(at, at + 1, dealt, devices)),)
            for end in range(at + 1, total):
                piece = StagePiece(at, end, dealt, devices)
                own = costs.stage(piece)
                # The pivot argument of `latency`: (m - 1) paces of this stage and one way through all up to it.
                least = (costs.count - 1) * own.pace + before + sum(2 * m.forward for m in message)
                least = max(state.least, least + own.forward + own.backward)
                # one stage follows at least
                if least >= most or not costs.fits(piece, min(2, costs.count)):
                    break
                # The last stage, if all devices left worked on it without loss, must still keep the pace.
                later_pace = costs.stage(StagePiece(end, total, others, last[:1])).pace
                # `continue`, not `break`: a longer piece leaves less to the later stages and may pass.
                if (costs.count - 1) * later_pace / (free_devices - count) + before >= most:
                    continue
                steps = (*state.steps, *message, own)
                final = StagePiece(end, total, others, last)
                whole = (*steps, costs.message(piece, final), costs.stage(final))
                seconds = latency(whole, costs.count, twice=costs.twice)
                yield piece, _State(seconds, (*state.pieces, piece), steps, least)


def _counts(costs: ReplicationCosts, free_devices: int) -> tuple[int, ...]:
    """The numbers of replicas of the next stage: every one below what is left, or on larger clusters some of each
    size."""
    able = tuple(m for m in costs.replicas if m < free_devices)
    if sum(costs.nodes) <= FINE_DEVICES:
        return able
    node = max(costs.nodes)
    # m & (m - 1) == 0 for powers of two.
    whole = {m for m in able if m % node == 0 and (m // node) & (m // node - 1) == 0} | {
        m for m in able if not m & (m - 1)
    }
    return tuple(m for m in able if m in whole or free_devices - m in whole)
