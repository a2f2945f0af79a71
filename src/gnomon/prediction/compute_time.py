"""Seconds of computing actions: kernels, the collectives within layers that they wait for, and their launches.

A stage's forward lasts as long as its kernels and the collectives they wait for, or as its launches if the host is
slower, or as its offloaded activations take over the host link. Where it has a row for each layer, the rows together
last as long as that one, unless the host waits for each layer by itself. Leaves out kernels besides those of layers,
messages between stages and what happens to gradients and parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from gnomon.prediction.layer_types import LayerPrice, Phase
from gnomon.prediction.priced import PricedStages
from gnomon.prediction.stage_kernels import around, other_host_s
from gnomon.prediction.update import host_copy_s
from gnomon.prices.collectives import collective_seconds
from gnomon.prices.host import check_s
from gnomon.prices.kernels import OpPrice
from gnomon.software import own

PHASES: Mapping[str, tuple[str, ...]] = {
    "F": ("forward",),
    "C": ("forward",),
    "R": ("forward",),
    "FRC": ("forward",),
    "B": ("recompute", "input_grad", "weight_grad"),
    "I": ("recompute", "input_grad"),
    "W": ("weight_grad",),
}
"""Maps a kind of action to the phases that it computes; `R` runs the forward of its whole stage once more, `FRC` that
of another rank's."""


class ComputeTime:
    """Seconds of the computing actions of a plan's Program: a view of its priced stages, which holds nothing else."""

    def __init__(self, priced: PricedStages) -> None:
        self.priced = priced

    @cached_property
    def of_stages(self) -> ComputeTime:
        """The same with one row for each stage."""
        blocks = tuple((stage, -1) for stage in range(len(self.priced.stages)))
        return ComputeTime(replace(self.priced, blocks=blocks))

    @cached_property
    def _shares(self) -> dict[tuple[str, int], dict[int, float]]:
        return {}

    def phase(self, name: str, block: int) -> Phase:
        """A phase of one of the Program's stages."""
        return self.priced.phase(name, block)

    def parts(self, kind: str, block: int) -> dict[str, float]:
        """Divides the seconds of a computing action by what they go into: `compute`, what is computed
        again (`again`), collectives by axis (`tp`), what launches take beyond (`launch`), what offloaded activations
        take beyond that (`offload`), and what methods do on top (`methods`). They add up to its price."""
        own = self._own_parts(kind, block)
        methods_s = self._methods_s(kind, block)
        return {**own, "methods": methods_s} if methods_s else own

    def _methods_s(self, kind: str, block: int) -> float:
        """Seconds of the forward of a teacher, and of forwards and backwards from other activations."""
        costs = self.priced.costs
        if costs is None or kind not in ("F", "B"):
            return 0.0
        if kind == "F":
            return costs.teacher_forwards * self.priced.teacher_s
        method_times = (("F", costs.forwards), ("I", costs.input_gradients), ("B", costs.backwards))
        return sum(times * sum(self._own_parts(one, block).values()) for one, times in method_times if times)

    def _own_parts(self, kind: str, block: int) -> dict[str, float]:
        """The parts of an action as its layers take them, before any method changes them."""
        stage = self.priced.blocks[block][0]
        phases = [self.phase(name, block) for name in PHASES[kind]]
        extra = self.priced.extras(kind, block)
        if self.priced.stack.launch.composed:
            return self._one_by_one(kind, block, extra)
        spent = [self._sustained_s(stage, phase) for phase in phases]
        again = sum(s for n, s in zip(PHASES[kind], spent, strict=True) if kind == "R" or n == "recompute")
        compute = sum(spent) + float(extra.device_s) / self.priced.rates[stage].compute
        comm: dict[str, float] = {}
        for phase in phases:
            for axis in phase.comm_s:
                comm[axis] = comm.get(axis, 0.0) + self._waited_s(stage, phase, axis)
        # device: kernels and the collectives they wait for, in one stream.
        device = compute + sum(comm.values())
        spent_on = {"compute": compute - again, "again": again, **comm}
        # Rows of single layers: their launches and copies overlap with other layers of the stage, so what they expose
        # is a share of what the stage's row would.
        if self.priced.blocks[block][1] >= 0 and not self.priced.waits_by_layer:
            whole, share = self.of_stages._own_parts(kind, stage), self._share(kind, block)
            return {**spent_on, "launch": share * whole["launch"], "offload": share * whole["offload"]}
        # The host launches ahead: the action lasts as long as the slower of device and host.
        host = self._host_s(stage, phases, extra.kernels) + self.priced.other_host_s(kind, block)
        issue_s = max(device + self._starved_s(kind, block), host)
        # Copies have their own link; only what exceeds the action shows, unless nothing overlaps them.
        copies, overlaps = self._activation_copies(kind, block), self.copies_overlap(stage)
        return {**spent_on, "launch": issue_s - device, "offload": max(copies - issue_s, 0.0) if overlaps else copies}

    def _share(self, kind: str, block: int) -> float:
        """A layer's share of what its stage's row takes beyond kernels and collectives: as it is launched slower than
        it runs and as it has activations to copy; the same for all where none has."""
        stage = self.priced.blocks[block][0]
        if (kind, stage) not in self._shares:
            own, of_stage = self.priced.rates[stage], dict[int, float]()
            for other in (b for b, (at, _) in enumerate(self.priced.blocks) if at == stage):
                phases = [self.phase(name, other) for name in PHASES[kind]]
                host_s = self._host_s(stage, phases, self.priced.extras(kind, other).kernels) - own.host_unit_s
                host_s += self.priced.other_host_s(kind, other)
                # What a layer alone would expose is its weight: host beyond device, and copies.
                device_s = sum(self.phase_s(stage, phase) for phase in phases)
                of_stage[other] = max(host_s - device_s, 0.0) + self._activation_copies(kind, other)
            total = sum(of_stage.values())
            self._shares[kind, stage] = {
                other: weight / total if total else 1 / len(of_stage) for other, weight in of_stage.items()
            }
        return self._shares[kind, stage][block]

    def copies_overlap(self, stage: int) -> bool:
        """Whether activations go to the host and come back while the device computes: not where a processor copies by
        itself, and not in Gnomon's own runtime, which copies on the stream that computes (`runtime.module.saving`)."""
        return self.priced.stages[stage].device.kind != "cpu" and self.priced.stack.name != own.NAME

    def _one_by_one(self, kind: str, block: int, extra: OpPrice) -> dict[str, float]:
        """Divides the seconds of an action where a simulator puts layers one behind the other (`Stack.composed`)."""
        stage, layers = self.priced.layers(block)
        at, parts = self.priced.blocks[block][0], {"compute": 0.0, "again": 0.0, "launch": 0.0, "offload": 0.0}
        repeated = {price for price, alike in stage.layers if alike[0].call.first is not None}
        for layer, times in layers:
            device, launches, launch_s = 0.0, 0.0, self._each_launch_s(at, layer)
            for name in PHASES[kind]:
                phase: Phase = getattr(layer, name)
                spent = self._sustained_s(at, phase)
                device += spent
                launches += launch_s[name] * phase.launches
                parts["again" if kind == "R" or name == "recompute" else "compute"] += times * spent
                for axis in phase.comm_s if layer in repeated else ():
                    parts[axis] = parts.get(axis, 0.0) + times * self._waited_s(at, phase, axis)
            parts["launch"] += times * max(launches - device, 0.0)
        parts["compute"] += float(extra.device_s) / self.priced.rates[at].compute
        return parts

    def _each_launch_s(self, stage: int, layer: LayerPrice) -> dict[str, float]:
        """Host seconds of a launch in each phase of a layer, `host_kernel_s` on average over forward and backward."""
        longer = self.priced.stack.launch.forward_launches or 1.0
        forward, backward = layer.forward.launches, layer.input_grad.launches + layer.weight_grad.launches
        # Forward launches may take `longer` times those of backward; the mean over both stays the fitted number.
        launch_s = self.priced.launch_s[stage] * (forward + backward) / max(longer * forward + backward, 1.0)
        return {
            "forward": longer * launch_s,
            "recompute": longer * launch_s,
            "input_grad": launch_s,
            "weight_grad": launch_s,
        }

    def vocabulary(self, kind: str, block: int) -> float:
        """An action of a divided embedding or head: its kernels or their launches, and what ranks exchange in it."""
        stage = self.priced.stages[block]
        share = stage.share
        assert share is not None, f"stage {block} has no part of the vocabulary"
        wire = sum(float(collective_seconds(name, size, share.link)) for name, size in share.exchanged(kind))
        wire *= self.priced.slower(share.link)
        phases, extra = share.phases(kind), share.passes(kind, stage.device)
        if not phases:
            return wire
        layer = share.layer(kind)
        if layer is not None and share.gathers_weights(kind):
            extra = extra + around("W", stage, [(layer, 1)], self.priced.stack, self.priced.count)
        device = sum(self._sustained_s(block, phase) for phase in phases)
        device += float(extra.device_s) / self.priced.rates[block].compute + wire
        return max(device, self._host_s(block, phases, extra.kernels))

    def device_s(self, kind: str, block: int) -> float:
        """Seconds of a computing action's kernels and of the collectives that they wait for."""
        return sum(seconds for part, seconds in self.parts(kind, block).items() if part not in ("launch", "offload"))

    def host_s(self, kind: str, block: int) -> float:
        """Seconds that the host takes to issue a computing action."""
        return self._host_s(self.priced.blocks[block][0], [self.phase(name, block) for name in PHASES[kind]], 0)

    def layer_s(self, kind: str, stage: int, layer: LayerPrice) -> float:
        """Seconds of one layer in an action of this kind: its kernels and the collectives that they wait for, or its
        launches if those take longer. No such action of a stage is shorter than its layers together."""
        own = self.priced.rates[stage]
        phases = [getattr(layer, name) for name in PHASES[kind]]
        total = sum(self.phase_s(stage, phase) for phase in phases)
        return max(total, self._host_s(stage, phases, 0) - own.host_unit_s)

    def phase_s(self, stage: int, phase: Phase) -> float:
        """Seconds of a phase's kernels, and of the collectives that they wait for."""
        return self._sustained_s(stage, phase) + sum(self._waited_s(stage, phase, axis) for axis in phase.comm_s)

    def _starved_s(self, kind: str, block: int) -> float:
        """Seconds that the device waits for launches where layers of one kind are launched slower than they run: what
        another kind (the head) takes longer does not make up for it, since launches of both go in order."""
        stage, layers = self.priced.layers(block)
        if len(layers) < 2:
            return 0.0
        at, own, total = self.priced.blocks[block][0], self.priced.rates[self.priced.blocks[block][0]], 0.0
        for layer, times in layers:
            phases = [getattr(layer, name) for name in PHASES[kind]]
            device = sum(self._sustained_s(at, phase) for phase in phases)
            device += sum(self._waited_s(at, phase, axis) for phase in phases for axis in phase.comm_s)
            host = self._host_s(at, phases, 0) + other_host_s(kind, stage, ((layer, times),), self.priced.stack) / times
            total += times * max(host - own.host_unit_s - device, 0.0)
        return total

    def _waited_s(self, stage: int, phase: Phase, axis: str) -> float:
        """Seconds that kernels of a phase wait for its collectives over an axis. What a network takes beyond its price
        outside layers is not in it: in layers that is the stack's own number."""
        hops = self.priced.numbers.hops_s(axis, phase.collectives.get(axis, 0), self.priced.stages[stage].links[axis])
        return (phase.comm_s[axis] + hops) * self.priced.rates[stage].exposed

    def _sustained_s(self, stage: int, phase: Phase) -> float:
        """Device seconds of a phase's kernels as the stack runs them for minutes, with its own attention kernels."""
        own = self.priced.rates[stage]
        # Attention runs at its own fitted speed; all kernels are divided by the sustained speed.
        return (phase.compute_s - phase.attention_s + phase.attention_s / own.attention) / own.compute

    def _host_s(self, stage: int, phases: Sequence[Phase], kernels: int) -> float:
        """Host seconds of an action: its launches, what its collectives take beyond one, and the loop around it."""
        own, links = self.priced.rates[stage], self.priced.stages[stage].links
        total = self.priced.launch_s[stage] * (sum(phase.kernels for phase in phases) + kernels) + own.host_unit_s
        total += sum(phase.waited_s for phase in phases) / own.compute
        for phase in phases:
            for axis, count in phase.collectives.items():
                total += count * (own.host_collective_s + check_s(self.priced.stack, links[axis].ranks))
        return total

    def _activation_copies(self, kind: str, block: int) -> float:
        """Seconds of copying offloaded activations over the host link, one way; 0 for actions that copy none."""
        stage, layers = self.priced.layers(block)
        size = sum(layer.offloaded_bytes * times for layer, times in layers)
        if not size or kind not in ("F", "B", "I"):
            return 0.0
        return host_copy_s(stage, self.priced.cluster, size)
