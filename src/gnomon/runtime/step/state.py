"""What happens to a rank's parameters and gradients in a step: gathered, freed, reduced, measured, updated.

`State` has one method for each such kind of action; each starts its communication under the name of the buffer that it
writes (`buffers`). Gradients are summed, never averaged: the loss is divided by all tokens of the step beforehand.
Left out: which rows there are, and when (`execute`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gnomon.lowering.gradients import TIED
from gnomon.lowering.norm import EVERYONE
from gnomon.lowering.tensor_sums import REPLICAS
from gnomon.program import NO_UNIT
from gnomon.runtime.mesh.collectives import all_gather, all_reduce, reduce_scatter
from gnomon.runtime.mesh.groups import Groups
from gnomon.runtime.mesh.routes import Together, Waits, member_work
from gnomon.runtime.module.stage import Stage
from gnomon.runtime.optim.loss_scale import LossScale
from gnomon.runtime.optim.matrix import Ranks
from gnomon.runtime.optim.update import AdamWSettings, Update, clip_scale, squares, summed
from gnomon.runtime.optim.weight_rules import WeightRule
from gnomon.runtime.parameters.parameters import GradientBucket, Parameters
from gnomon.runtime.parameters.shards import interleaved, kept_shards, packed
from gnomon.runtime.step.buffers import Buffers, Name
from gnomon.runtime.step.lane import Lane
from gnomon.runtime.step.replicas import Replicas
from gnomon.runtime.step.router_bias import RouterBias


class State:
    """Parameters, gradients and moments of a rank's stages."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        groups: Groups,
        buffers: Buffers,
        settings: AdamWSettings,
        kind: str,
        tied: frozenset[str],
        device: torch.device,
    ) -> None:
        """Takes kind, the rule of the update, and tied, the parameters that several stages hold, whose gradients are
        added up before it."""
        self.stages, self.groups, self.buffers, self.settings, self.tied = stages, groups, buffers, settings, tied
        self.device = device
        # bf16 has fp32's exponents and needs no scale.
        fp16 = any(
            parameters.dtypes.param == torch.float16 for stage in stages.values() for parameters in stage.own_parameters
        )
        self.loss_scale: LossScale | None = LossScale() if fp16 else None
        """Of plans that compute in fp16."""
        self.biases: RouterBias | None = None
        """Moves the biases of routers after their update, which leaves them where they are."""
        self.replicas: Replicas | None = None
        """Adds up gradients of experts that several ranks hold, and moves experts."""
        self.watch: Callable[[Parameters], None] | None = None
        """Is shown parameters with their whole gradient, before they are updated."""
        self.rules: tuple[WeightRule, ...] = ()
        """What is done to weights around their update."""
        self.adam = {
            number: tuple(Update.of(parameters, kind) for parameters in stage.own_parameters)
            for number, stage in stages.items()
        }
        self.on_host: Mapping[int, Sequence[Parameters]] = {}
        """Stages whose update is on the host -> the host's side of their parameters."""
        self.lane: Lane | None = None
        """Where all-reduces take turns with exchanges of experts, as on one network; None: each beside all else."""
        self.reduce_parts = 1
        """Parts that they are cut into there."""
        self._part = dict[int, int]()
        """Stage -> parts of its all-reduce that were started."""
        self.clips = True
        """Whether gradients are clipped to the norm that is measured."""
        self.by_layer = False
        """Whether a stage of the Program is a layer though ZeRO 3 does not ask for it."""
        self.buckets: dict[tuple[int, ...], list[GradientBucket]] = {}
        self.new_step()

    @property
    def nbytes(self) -> int:
        """Counts the bytes of the optimizer's moments on the device, and of what `rules` keep."""
        own = sum(adam.nbytes for n, parts in self.adam.items() if n not in self.on_host for adam in parts)
        return own + sum(rule.nbytes for rule in self.rules)

    def put_on_host(self, parts: Mapping[int, Sequence[Parameters]]) -> None:
        """The moments of these stages are the host's, and so is their gradient once it came down."""
        self.on_host = parts
        kinds = {number: self.adam[number][0].kind for number in parts}
        self.adam |= {n: tuple(Update.of(parameters, kinds[n]) for parameters in host) for n, host in parts.items()}

    def wait_for_gradient(self, stage: int) -> None:
        """Waits until the stage's gradient is there."""
        self.buffers.wait(self._grad_name(stage))

    def new_step(self) -> None:
        """Forgets the norm of the step before."""
        self.norm = torch.full((), float("nan"), dtype=torch.float64, device=self.device)
        self.scale: Tensor | float = 1.0
        self.skips = False
        """Whether gradients overflowed, so that the step updates nothing."""
        self.joined = False

    def gathered(self, stage: int) -> None:
        """Waits until the gather of the stage's parameters has arrived."""
        self.buffers.wait(("P", stage, NO_UNIT))

    def _grad_name(self, stage: int) -> Name:
        return ("GS" if self.stages[stage].zero >= 2 else "G", stage, NO_UNIT)

    def _group(self, parameters: Parameters, comm: str) -> ProcessGroup | None:
        """The ranks that these parameters have in common under a communicator of the Program."""
        return self.groups.by_comm[parameters.comm(comm)]

    def put_together(self, stages: Sequence[int]) -> None:
        """Has gradients of several layers lie together: a bucket, which one all-reduce sums."""
        all_parameters = [all_parameters for number in stages for all_parameters in self.stages[number].own_parameters]
        # Experts are added up over other ranks than all else, so a bucket holds one sort only.
        parts = [[one for one in all_parameters if one.experts == experts] for experts in (False, True)]
        self.buckets[tuple(stages)] = [GradientBucket(part) for part in parts if part]

    def all_reduce_bucket(self, stages: Sequence[int], comm: str) -> None:
        """AR of several layers: the sum over data-parallel ranks of their gradients, together."""
        names = [self._grad_name(number) for number in stages]
        for name in names:
            self.buffers.wait(name)
        buckets = self.buckets[tuple(stages)]
        sums = [(bucket.whole(), group) for bucket in buckets if (group := self._group(bucket.members[0], comm))]
        if sums:
            works = Together(tuple(member_work(all_reduce(grad, group, wait=False)) for grad, group in sums))
            self.buffers.start(names[0], works, sum(grad.nbytes for grad, _ in sums), also=names[1:])

    def all_reduce(self, stage: int, comm: str) -> None:
        """Carries out AR: sums the gradient over a communicator, or the part of it that this communicator adds up."""
        name = self._grad_name(stage)
        self.buffers.wait(name)
        if comm == TIED:
            self.join_tied(name)
            return
        if comm == REPLICAS:
            assert self.replicas is not None, "a Program that adds up replicas is of a plan that has them"
            self.buffers.wait(name)
            self.replicas.add_up(stage)
            return
        if comm in ("dp", "dp_replicate"):
            grads = [
                (parameters.my_grad(), group)
                for parameters in self.stages[stage].own_parameters
                if (group := self._group(parameters, comm))
            ]
            if grads and self.lane is not None:
                self._in_turn(stage, name, grads, self.lane)
            elif grads:
                works = Together(tuple(member_work(all_reduce(grad, group, wait=False)) for grad, group in grads))
                self.buffers.start(name, works, sum(grad.nbytes for grad, _ in grads))
            return
        group = self.groups.by_comm[comm]
        if group is not None:
            self._sum_parts(stage, comm, group)

    def _in_turn(self, stage: int, name: Name, grads: Sequence[tuple[Tensor, ProcessGroup]], lane: Lane) -> None:
        """A part of the all-reduce, after what the lane was given before."""
        part = self._part.get(stage, 0)
        self._part[stage] = (part + 1) % self.reduce_parts
        last = part + 1 == self.reduce_parts
        cut = [(grad.tensor_split(self.reduce_parts)[part], group) for grad, group in grads]

        def reduce() -> None:
            for grad, group in cut:
                all_reduce(grad, group)

        def finish() -> None:
            for earlier in range(part):
                self.buffers.wait((f"{name[0]}.{earlier}", stage, NO_UNIT))

        # Only the last part is under the gradient's own name: whoever waits for the gradient waits for all parts.
        own = name if last else (f"{name[0]}.{part}", stage, NO_UNIT)
        self.buffers.start(own, lane.start(reduce), sum(grad.nbytes for grad, _ in cut), finish if last else None)

    def _sum_parts(self, stage: int, comm: str, group: ProcessGroup) -> None:
        """Adds up the gradients that ranks of `comm` have terms or copies of: small ones packed together, large ones
        where they lie."""
        name = self._grad_name(stage)
        chosen = [
            parameters.my_grad()[slice(*range_)]
            for parameters in self.stages[stage].own_parameters
            for slot, range_ in parameters.pieces()
            if slot.sums == comm
        ]
        if not chosen:
            return
        summed, unpack = packed(chosen)
        works = Together(tuple(member_work(all_reduce(grad, group, wait=False)) for grad in summed))
        copied = tuple(grad for grad in summed if all(grad is not one for one in chosen))
        self.buffers.start(name, works, sum(grad.nbytes for grad in chosen), unpack, copied)

    def is_tied(self, stage: int) -> bool:
        """Whether it holds a parameter that another stage holds too."""
        return any(
            not parameters.experts and self.tied & set(parameters.by_name)
            for parameters in self.stages[stage].own_parameters
        )

    def join_tied(self, row: Name | None = None) -> None:
        """Gives every stage that holds a tied parameter the sum of all their gradients, once a step: over the stages of
        this rank, and over the communicator `embedding`. Under ZeRO stages cut a parameter into other shards than each
        other, so ranks that shard exchange its whole gradient. row: what an AR of the Program writes; without one, all
        holders are on this pipeline rank, and the first NORM or OPT comes here."""
        elsewhere = row is None and self.groups.by_comm.get(TIED) is not None  # an AR does it, in its own step
        if self.joined or elsewhere or not self.tied:
            return
        self.joined = True
        stages = {
            n: parameters
            for n, stage in self.stages.items()
            for parameters in stage.own_parameters
            if not parameters.experts and self.tied & set(parameters.by_name)
        }
        if not stages:
            return
        for number in stages:
            self.wait_for_gradient(number)
        for number in stages:
            self.buffers.wait(self._grad_name(number))
        sharded = any(parameters.zero for parameters in stages.values())
        group = self.groups.by_comm[TIED] or (self.groups.by_comm["dp_shard"] if sharded else None)
        if group is None and len(stages) == 1:
            return
        slots = {
            slot.name: slot for parameters in stages.values() for slot in parameters.slots if slot.name in self.tied
        }
        first, size = dict[str, int](), 0
        # By name: every rank that holds some of them lays the sum out alike.
        for name, slot in sorted(slots.items()):
            first[name], size = size, size + slot.stop - slot.start
        some = next(iter(stages.values()))
        # The whole of all tied parameters on every rank; where a rank has a shard the rest stays 0, and the sum over
        # ranks fills it.
        total = torch.zeros(size, dtype=some.dtypes.grad, device=self.device)
        parts: list[tuple[Parameters, slice, slice]] = []
        for parameters in stages.values():
            for slot, (low, high) in parameters.pieces():
                if slot.name in first:
                    at = first[slot.name] + parameters.mine[0] + low - slot.start
                    parts.append((parameters, slice(low, high), slice(at, at + high - low)))
        for parameters, mine, whole in parts:
            total[whole] += parameters.my_grad()[mine]

        def hand_out() -> None:
            for parameters, mine, whole in parts:
                parameters.my_grad()[mine] = total[whole]

        if row is None or group is None:
            if group is not None:
                all_reduce(total, group)
            hand_out()
            return
        self.buffers.start(row, all_reduce(total, group, wait=False), total.nbytes, hand_out, (total,))
        if set(stages) != {row[1]}:  # the update of another stage reads the sum and waits for its own gradient alone
            self.buffers.wait(row)

    def unshard(self, stages: Iterable[int]) -> None:
        """Carries out UNSHARD: gathers whole parameters from the shards of all ranks."""
        for number in stages:
            self.buffers.wait(("PS", number, NO_UNIT))
            works, size = [], 0
            for parameters in self.stages[number].parts:
                if not parameters.zero:
                    continue  # nobody to divide over: they are whole
                (flat, part), group = parameters.make_room(), self._shards(parameters)
                if group is None:
                    continue  # a copy from the host made them whole
                works.append(member_work(all_gather(flat, part, group, wait=False)))
                size += flat.nbytes
            self.buffers.start(("P", number, NO_UNIT), Together(tuple(works)), size)

    def reshard(self, stage: int) -> None:
        """Carries out RESHARD: frees what was gathered."""
        self.gathered(stage)
        for parameters in self.stages[stage].parts:
            if parameters.zero == 3:
                parameters.flat = None

    def _shards(self, parameters: Parameters) -> ProcessGroup | None:
        """The ranks that divide them; None for parameters that only a copy from the host brings."""
        group = self._group(parameters, "dp_shard")
        assert group is not None or parameters.away, "rows that shard need several ranks to divide over"
        return group

    def reduce_grad(self, stages: Iterable[int]) -> None:
        """Carries out REDUCE_GRAD: sums gradients so that this rank has its shard of the sum, in place; later units add
        to it. One at a time under ZeRO 2 and 3: what is under way holds a whole gradient."""
        numbers = tuple(stages)
        if self.by_layer or len(numbers) > 1:
            self.reduced()
        if len(numbers) > 1:
            return self._reduce_together(numbers)
        for number in numbers:
            stage, name = self.stages[number], self._grad_name(number)
            if stage.zero >= 2:
                self.reduced()
            self.buffers.wait(name)
            works, wholes, parts = list[Waits](), list[Tensor](), list[tuple[Parameters, Tensor]]()
            for parameters in stage.reduced:
                if not parameters.zero:
                    continue
                whole = parameters.whole_grad()
                part, group = whole[parameters.mine[0] : parameters.mine[1]], self._shards(parameters)
                if group is not None:
                    works.append(member_work(reduce_scatter(part, whole, group, wait=False)))
                wholes.append(whole)
                parts.append((parameters, part))
                if parameters.zero >= 2:
                    # The message has the whole gradient until it is over (`holds`); a later unit makes room of its own.
                    parameters.grad = None
            size = sum(whole.nbytes for whole in wholes)
            if stage.zero == 1:
                self.buffers.start(name, Together(tuple(works)), size)
                continue
            self.buffers.start(name, Together(tuple(works)), size, partial(kept_shards, parts), tuple(wholes))
            if not works:  # one rank has all of it
                self.buffers.wait(name)

    def _reduce_together(self, stages: Sequence[int]) -> None:
        """The same of several layers by one reduce-scatter: their gradients are copied beside each other (`shards`)."""
        names = [self._grad_name(number) for number in stages]
        for name in names:
            self.buffers.wait(name)
        all_parameters = [
            all_parameters for number in stages for all_parameters in self.stages[number].reduced if all_parameters.zero
        ]
        works, wholes, parts = list[Waits](), list[Tensor](), list[tuple[Parameters, Tensor]]()
        for experts in (False, True):
            if members := [one for one in all_parameters if one.experts == experts]:
                whole = interleaved(members)
                part, group = whole[members[0].shard_number], self._shards(members[0])
                if group is not None:
                    works.append(member_work(reduce_scatter(part, whole.view(-1), group, wait=False)))
                wholes.append(whole)
                parts += zip(members, part.split([one.mine[1] - one.mine[0] for one in members]), strict=True)
        for one in all_parameters:
            if one.zero >= 2:
                one.grad = None
        size = sum(whole.nbytes for whole in wholes)
        self.buffers.start(
            names[0], Together(tuple(works)), size, partial(kept_shards, parts), tuple(wholes), also=names[1:]
        )

    def reduced(self) -> None:
        """Waits until no shard of a gradient is under way."""
        for name in [n for n in self.buffers.arriving if n[0] == "GS" or (self.by_layer and n[0] == "G")]:
            self.buffers.wait(name)

    def measure_norm(self, stages: Iterable[int]) -> None:
        """Carries out NORM: measures the global gradient norm, and sets the factor that clips to it."""
        numbers, terms = tuple(stages), list[Tensor]()
        down = {n for n in numbers if any(part.grad is not None for part in self.on_host.get(n, ()))}
        if not down.issuperset(
            numbers
        ):  # those that went down were joined before; a delayed norm is of the step before
            self.join_tied()
        for number in numbers:
            self.buffers.wait(self._grad_name(number))
            for parameters in self.on_host[number] if number in down else self.stages[number].own_parameters:
                terms.append(squares(parameters))
        total = summed(terms, self.device)
        group = self.groups.by_comm[EVERYONE]
        if group is not None:
            all_reduce(total, group)
        self.norm = total.sqrt()
        by = self.loss_scale.scale if self.loss_scale is not None else 1.0
        if self.loss_scale is not None:
            self.norm /= by
            self.skips = not math.isfinite(float(self.norm))  # the same on every rank
            self.loss_scale.update(finite=not self.skips)
        # Gradients still have the loss scale: one multiplication takes it off and clips.
        self.scale = (clip_scale(self.norm, self.settings.clip_norm) if self.clips else 1.0) / by

    def ranks_of(self, parameters: Parameters) -> Ranks:
        """Says which ranks have parts of the same matrices."""
        shards, parts = self._shards(parameters) if parameters.zero else None, self.groups.by_comm.get("vocabulary")
        if parts is not None:  # without tensor parallelism
            return Ranks(shards=shards, inner=parts, differ=True)
        return Ranks(shards=shards, inner=self.groups.by_comm.get("etp" if parameters.experts else "tp"))

    def update(self, stage: int) -> None:
        """Carries out OPT: updates this rank's part."""
        self.join_tied()
        self.buffers.wait(self._grad_name(stage))
        # A gather that is still under way writes these parameters, and would bring back those of before the update.
        if self.stages[stage].zero < 3:
            self.gathered(stage)
        if self.watch is not None:
            for parameters in self.stages[stage].own_parameters:
                self.watch(parameters)
        for parameters, adam in zip(self.stages[stage].own_parameters, self.adam[stage], strict=True):
            if not self.skips:
                self._update(parameters, adam)
                if self.biases is not None:
                    self.biases.move(parameters)
            parameters.drop_grad()

    def _update(self, parameters: Parameters, adam: Update) -> None:
        """One update with what `rules` do around it. Terms that they add to a gradient are not clipped with it."""
        scale, lr = self.scale, self.settings.lr * self.settings.rate.factor(adam.steps)
        if self.rules and not (isinstance(scale, float) and scale == 1.0):
            parameters.my_grad().mul_(scale)
            scale = 1.0
        for rule in self.rules:
            rule.before(parameters)
        adam.update(parameters, self.settings, scale=scale, ranks=self.ranks_of(parameters))
        for rule in self.rules:
            rule.after(parameters, lr)
