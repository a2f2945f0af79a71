"""The models of DAPPLE's paper as its authors measured them on V100s, and its clusters A, B and C, as `Costs`.

Figures: profiling_results/ of AlibabaPAI/DAPPLE on GitHub (commit fd75dcf), of ResNet-50 the one line in
analysis_dapple.py; bytes on a device and global batches: the paper's table of benchmark models (Fan et al. 2021).
Inputs (loading of data) are left out, small ops are joined to the layer that they follow, and times of an op that the
profiler booked on its neighbour are added up with it. A stage's replica never takes less than the profiled batch's
time: nothing was measured below it, and small batches are no faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from gnomon.hardware import Cluster, Link, parse_cluster
from gnomon.prices.collectives import collective_seconds, p2p_seconds
from gnomon.prices.links import axis_link
from gnomon.search.stages.replication import Pieces, PipelineStep, StagePiece, Used, may_fit, pipelines, place, step_s

MS, MB = 1e-3, 1e6


@dataclass(frozen=True)
class Profile:
    """A model as it was measured."""

    name: str
    layers: tuple[tuple[float, float, float, float], ...]
    """Of each layer: forward ms, backward ms, bytes that a cut after it must send, bytes of parameters."""
    batch: int
    """Samples that were profiled."""
    global_batch: int
    """Samples of a step."""
    device_gb: float
    """GB on one device that trains all of it with the profiled batch."""
    states: int = 4
    """Times the parameters: Adam's two moments and the gradient beside them, 32 bits all."""


BERT_48 = Profile(
    "BERT-48",
    ((0.067, 0.0, 4325376, 127131648), *((2.69, 4.47, 4325376, 50384896),) * 47, (2.69, 4.47, 0, 54583296)),
    batch=2,
    global_batch=64,
    device_gb=11.4,
)
XLNET_36 = Profile(
    "XLNet-36",  # a cut sends hidden states; the masks and positions beside them are made where they are read
    ((0.07, 0.0, 2e6, 131e6), *((3.4, 4.9, 2e6, 52e6),) * 35, (3.86, 6.28, 0, 52e6)),
    batch=1,
    global_batch=128,
    device_gb=12,
)
_ENCODER, _DECODER = 9175040, 2 * 9437184  # a decoder's cut sends hidden states and attention's context
GNMT_16 = Profile(
    "GNMT-16",
    (
        (7.646, 11.763, 18350080, 149749760 + 67174400),  # embedding and the bidirectional LSTM
        (4.743, 8.862, _ENCODER, 50364416),
        *((3.510, 6.655, _ENCODER, 33587200),) * 6,
        (7.017, 11.381, _DECODER, 149749760 + 41979904),  # the decoder's embedding and the LSTM with attention
        *((4.687, 8.685, _DECODER, 50364416),) * 6,
        (4.694, 31.157, 9437184, 50364416),  # the profiler booked part of the classifier's backward here
        (17.078, 2.904, 0, 149896000),
    ),
    batch=64,
    global_batch=1024,
    device_gb=3.9,
)
VGG_19 = Profile(
    "VGG-19",
    (
        (3.4, 6.8, 384e6, 6835), (7.85, 15.7, 96e6, 140869), (3.4, 6.8, 192e6, 281738), (5.3, 10.6, 48e6, 562988),
        (2.3, 4.6, 96e6, 1125976), (3.55, 7.1, 96e6, 2250976), (3.55, 7.1, 96e6, 2250976),
        (3.715, 7.43, 24e6, 2250976), (1.71, 3.42, 48e6, 4501953), (2.9, 5.8, 48e6, 9001953),
        (2.88, 5.76, 48e6, 9001953), (2.96, 5.92, 12e6, 9001953), (0.965, 1.93, 12e6, 9001953),
        (0.965, 1.93, 12e6, 9001953), (0.96, 1.92, 12e6, 9001953), (0.995, 1.99, 3e6, 9001953),
        (0.45, 0.9, 0.5e6, 392015625), (0.1, 0.2, 0.5e6, 64015625), (0.06, 0.3, 0, 15628814),
    ),
    batch=32,
    global_batch=2048,
    device_gb=5.6,
    states=3,
)  # fmt: skip
_CELLS = (
    *((1.04, 2.38, 2 * 6422528, 13e6),) * 12,
    (1.16, 2.51, 2 * 2408448, 31195136),
    *((0.98, 2.84, 2 * 3211264, 56e6),) * 12,
    (1.27, 3.42, 2 * 1204224, 124780544),
    *((1.70, 3.77, 2 * 1605632, 225e6),) * 12,
)
AMOEBANET_36 = Profile(
    "AmoebaNet-36",
    ((1.26, 3.37, 2 * 2408448, 1576320), *_CELLS, (0.17, 0.10, 0, 32804772)),
    batch=1,
    global_batch=128,
    device_gb=20,
)
RESNET_50 = Profile(
    "ResNet-50",  # of 16 equal parts: its one line says 100 ms of 32 samples, 100 MB, 0.4 MB a sample at a cut
    ((100 / 48, 200 / 48, 12.8e6, 6.25e6),) * 16,
    batch=32,
    global_batch=2048,
    device_gb=1,
)
PROFILES = (RESNET_50, VGG_19, GNMT_16, BERT_48, XLNET_36, AMOEBANET_36)


def cluster(config: str) -> Cluster:
    """A: two servers of eight V100s with NVLink, 25 Gb/s between them; B: 16 servers of one, 25 Gb/s; C: the same with
    10 Gb/s. Source: the paper's table of hardware."""
    machines = parse_cluster("2x8xv100-sxm-16gb" if config == "A" else "16x1xv100-sxm-16gb")
    (group,) = machines.groups
    nic = Link(
        name=f"ethernet-{config}",
        kind="ethernet",
        bytes_per_s=(10e9 if config == "C" else 25e9) / 8,
        latency_s=25e-6,
        source="DAPPLE",
        date="2020-07",
    )
    return replace(machines, name=config, groups=(replace(group, node=replace(group.node, nic=nic, nics=1)),))


class Measured:
    """Costs of a profile on a cluster, for one size of microbatch."""

    def __init__(self, profile: Profile, machines: Cluster, count: int) -> None:
        self.profile, self.machines, self.count = profile, machines, count
        self.twice = machines.name == "C"  # the paper's second warm-up, for messages that take as long as computing
        self.size = profile.global_batch // count
        self.num_layers = len(profile.layers)
        self.nodes: Used = tuple(node.count for node in machines.nodes)
        most = max(1, self.size // profile.batch)
        self.replicas = tuple(range(1, min(machines.num_devices, most) + 1))
        columns = zip(*profile.layers, strict=True)
        self.forward, self.backward, self.cut, self.bytes = ([0.0, *accumulate(column)] for column in columns)
        whole = profile.device_gb * 1e9 - profile.states * self.bytes[-1]
        self.kept = whole / (self.forward[-1] + self.backward[-1])
        """Bytes of activations for each ms of work, of the profiled batch: by layers nobody published them."""

    def stage(self, piece: StagePiece) -> PipelineStep:
        n = len(piece.devices)
        share = max(1.0, self.size / n / self.profile.batch)
        reduce = 0.0
        if n > 1:
            size = self.bytes[piece.last] - self.bytes[piece.first]
            whole = float(collective_seconds("all_reduce", size, axis_link(self.machines, np.array([piece.devices]))))
            mine = self.profile.layers[piece.first : piece.last]
            reduce = exposed_s([entry[1] * share * MS for entry in mine], [entry[3] / size * whole for entry in mine])
        forward = self.forward[piece.last] - self.forward[piece.first]
        backward = self.backward[piece.last] - self.backward[piece.first]
        return PipelineStep(forward * share * MS, backward * share * MS, reduce)

    def message(self, source: StagePiece, target: StagePiece) -> PipelineStep:
        pairs = np.array(list(zip(source.devices, target.devices, strict=False)))
        size = self.profile.layers[source.last - 1][2] * self.size / self.profile.batch
        seconds = float(p2p_seconds(size / len(pairs), axis_link(self.machines, pairs)))
        return PipelineStep(seconds, seconds, message=True)

    def fits(self, piece: StagePiece, in_flight: int) -> bool:
        work = self.forward[piece.last] + self.backward[piece.last]
        work -= self.forward[piece.first] + self.backward[piece.first]
        share = max(1.0, self.size / len(piece.devices) / self.profile.batch)
        held = self.profile.states * (self.bytes[piece.last] - self.bytes[piece.first])
        return held + in_flight * share * self.kept * work <= self.machines.devices[0].memory_bytes


def exposed_s(backward: Sequence[float], reduce: Sequence[float]) -> float:
    """Seconds that reductions still take after the last backward: each layer's begins when its backward is done and the
    reduction of the layer after it is over. Both are of layers in the order of forward."""
    done = free = 0.0
    for b, r in zip(reversed(backward), reversed(reduce), strict=True):
        done += b
        free = max(free, done) + r
    return max(0.0, free - done)


def counts(profile: Profile) -> Iterator[int]:
    """Numbers of microbatches, each of the profiled batch or more."""
    most = profile.global_batch // profile.batch
    return (n for n in range(1, most + 1) if profile.global_batch % n == 0)


@dataclass(frozen=True)
class Planned:
    """A pipeline, and the seconds of its step by the closed form."""

    seconds: float
    count: int
    pieces: Pieces

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(len(piece.devices) for piece in self.pieces)

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(piece.last - piece.first for piece in self.pieces)


def best(profile: Profile, config: str) -> Planned:
    """What the programme finds over all numbers of microbatches."""
    candidates = []
    for count in counts(profile):
        for seconds, pieces in pipelines(Measured(profile, cluster(config), count), 1)[0]:
            candidates.append(Planned(seconds, count, pieces))
    return min(candidates, key=lambda entry: entry.seconds)


def of_paper(profile: Profile, config: str) -> dict[str, Planned]:
    """The best of each kind that the paper's planner chooses among: data parallelism, two stages on 1 to 15 devices
    each, and straight pipelines, of one device a stage and layers as equal as can be."""
    machines, total = cluster(config), len(profile.layers)
    fastest: dict[str, Planned] = {}
    for count in counts(profile):
        costs = Measured(profile, machines, count)
        taken = [place(costs.nodes, (0,) * len(costs.nodes), costs.nodes)]
        every = taken[0]
        for name, pieces in _shapes(total, every):
            if all(len(piece.devices) in costs.replicas for piece in pieces) and may_fit(costs, pieces):
                made = Planned(step_s(costs, pieces), count, pieces)
                if name not in fastest or made.seconds < fastest[name].seconds:
                    fastest[name] = made
    return fastest


def _shapes(total: int, every: tuple[int, ...]) -> Iterator[tuple[str, Pieces]]:
    devices = len(every)
    yield "DP", (StagePiece(0, total, (devices,), every),)
    for first in range(1, devices):
        for cut in range(1, total):
            one, two = every[:first], every[first:]
            yield (
                f"{first}:{devices - first}",
                (StagePiece(0, cut, (first,), one), StagePiece(cut, total, (devices - first,), two)),
            )
    if total >= devices:
        ends = [round(total * (i + 1) / devices) for i in range(devices)]
        starts = [0, *ends[:-1]]
        yield "straight", tuple(StagePiece(a, b, (1,), (d,)) for a, b, d in zip(starts, ends, every, strict=True))
