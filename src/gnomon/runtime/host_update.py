"""The update on the host (ZeRO-Offload): gradients come down, the host adds and updates, parameters go back.

`HostUpdate` has a function for each such kind of action: D2H, HOST_ADD, HOST_OPT, H2D. A `HostPart` is the host's side
of a device's `Parameters`: a copy of what this rank updates (under ZeRO its shard), the optimizer's, and the gradient
as it adds up. On CPU both sides are memory of one machine, and every copy is made all the same; `nbytes` counts them,
each way. A delayed update runs in a thread beside the step, with the gradient of the step before: `HOST_OPT` starts it,
and what reads its parameters or writes its gradient waits for it. Left out: copies that overlap with compute (each is
done before the next row).
Source: Ren et al. 2021 (ZeRO-Offload).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter

import torch
from torch import Tensor

from gnomon.program import Program
from gnomon.runtime.measure import HostClock, Recorder
from gnomon.runtime.parameters import CPU, Parameters
from gnomon.runtime.rows import Row, stages_of_row
from gnomon.runtime.stage import Stage
from gnomon.runtime.state import State


class HostPart(Parameters):
    """The host's side of the parameters of a stage."""

    def __init__(self, device_part: Parameters) -> None:
        """device_part: filled. Its master copy is the host's from now on."""
        one, part = device_part, max(device_part.mine[1] - device_part.mine[0], 1)
        super().__init__(
            one.slots,
            one.dtypes,
            zero=one.zero,
            shard=one.mine[0] // part,
            num_shards=max(one.size // part, 1),
            replicas=one.replicas,
            experts=one.experts,
            device=torch.device("meta"),  # of the whole there is nothing here
        )
        self.flat, self.device = None, CPU
        self.resident = torch.empty(one.mine[1] - one.mine[0], dtype=one.dtypes.param)
        self.device_part = one
        self.coming: Tensor | None = None
        """A later microbatch's gradient, which is not added yet."""
        if one.master is not None:
            one.master = one.master.to(CPU)
        self.master = one.master
        one.master_on_host = True
        self.take()

    def take(self) -> None:
        """Has the parameters that the device has, as at the start and after a checkpoint was read."""
        self.shard.copy_(self.device_part.shard)

    def my_grad(self) -> Tensor:
        """What the update consumes, once all of it came down."""
        assert self.grad is not None, "no gradient came down before the update"
        return self.grad

    def come_down(self) -> int:
        """Takes the gradient off the device and returns its bytes."""
        arrived = self.device_part.my_grad().to(CPU, copy=True)
        self.device_part.drop_grad()
        self.device_part.grad = None
        if self.grad is None:
            self.grad = arrived
            self.begun.update(self.by_name)
        else:
            assert self.coming is None, "a gradient came down before the one before it was added"
            self.coming = arrived
        return arrived.nbytes

    def add(self) -> None:
        """Adds what came down last."""
        assert self.grad is not None and self.coming is not None
        self.grad += self.coming
        self.coming = None

    def go_back(self) -> int:
        """Gives the device the updated parameters and returns their bytes."""
        self.device_part.shard.copy_(self.shard)
        return self.shard.nbytes

    def drop_grad(self) -> None:
        """After the update."""
        super().drop_grad()
        self.grad = None


class HostUpdate:
    """Updates of those stages of a rank that are on the host."""

    def __init__(self, state: State, stages: Mapping[int, Stage], moved: Collection[int]) -> None:
        """moved: stages of the Program whose update is on the host (`moved_stages`)."""
        self.state = state
        self.parts = {n: tuple(map(HostPart, stages[n].held)) for n in stages if n in moved}
        self.nbytes = {"D2H": 0, "H2D": 0}
        """Bytes copied since the start, each way."""
        self.beside = False
        """Whether updates run beside what follows them."""
        self._thread = ThreadPoolExecutor(
            1, "host update", initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
        )
        self._under_way: dict[int, Future[float]] = {}  # by stage: when it ends
        self._spans: dict[int, tuple[Recorder | None, int]] = {}  # by stage: what times the row that started it
        state.put_on_host(self.parts)

    def actions(self, about: Callable[[], Iterable[int]]) -> Mapping[str, Callable[[int, int], None]]:
        """By kind. about: stages of the row that runs."""
        return {
            "D2H": lambda stage, unit: self._down(about()),
            "HOST_ADD": lambda stage, unit: self._add(stage),
            "HOST_OPT": lambda stage, unit: self._update(about()),
            "H2D": lambda stage, unit: self._back(about()),
        }

    @property
    def waits(self) -> bool:
        """Whether gradients are on the host that no update has read."""
        self.finish()
        return any(part.grad is not None for parts in self.parts.values() for part in parts)

    def finish(self) -> None:
        """Until no update is under way."""
        for stage in list(self._under_way):
            self._finish(stage)

    def _finish(self, stage: int) -> None:
        if (update := self._under_way.pop(stage, None)) is None:
            return
        done, (recorder, span) = update.result(), self._spans.pop(stage)
        if recorder is not None and isinstance(recorder.clock, HostClock):
            recorder.end[span] = done

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()

    def take(self) -> None:
        """Has the parameters that the device has."""
        for part in self._of(self.parts):
            part.take()

    def _of(self, stages: Iterable[int]) -> Iterator[HostPart]:
        for stage in stages:
            yield from self.parts[stage]

    def _down(self, stages: Iterable[int]) -> None:
        for stage in stages:
            self._finish(stage)
            self.state.wait_for_gradient(stage)
            self.nbytes["D2H"] += sum(part.come_down() for part in self.parts[stage])

    def _add(self, stage: int) -> None:
        for part in self.parts[stage]:
            part.add()

    def _update(self, stages: Iterable[int]) -> None:
        scale = self.state.scale
        by = scale.to(CPU) if isinstance(scale, torch.Tensor) else scale
        for stage in stages:
            if self.beside:
                recorder = self.state.buffers.recorder
                self._spans[stage] = recorder, -1 if recorder is None else len(recorder.row) - 1
                self._under_way[stage] = self._thread.submit(self._update_now, stage, by, self.state.skips)
            else:
                self._update_now(stage, by, self.state.skips)

    def _update_now(self, stage: int, by: Tensor | float, skips: bool) -> float:
        for part, rule in zip(self.parts[stage], self.state.adam[stage], strict=True):
            if self.state.watch is not None:
                self.state.watch(part)
            if not skips:
                rule.update(part, self.state.settings, scale=by)
            part.drop_grad()
        return perf_counter()

    def _back(self, stages: Iterable[int]) -> None:
        for stage in stages:
            self._finish(stage)
            self.nbytes["H2D"] += sum(part.go_back() for part in self.parts[stage])


class DelayedRows:
    """Rows of a step whose Program begins with the update by the gradients of the step before."""

    def __init__(self, rows: Sequence[Row], names: Sequence[str]) -> None:
        """names: kind of each row."""
        computes = max(at for at, name in enumerate(names) if name in ("B", "I", "W"))
        of = list(enumerate(zip(rows, names, strict=True)))
        late = {row.number for _, (row, name) in of if name in ("NORM", "HOST_OPT")}
        back = {row.number for at, (row, name) in of if name == "H2D" or (name == "UNSHARD" and at > computes)}
        self.settling = [row for row in rows if row.number in late] + [row for row in rows if row.number in back]
        """Those that apply what waits; parameters go back, and are gathered where ranks divide them."""
        self.usual = [row for row in rows if row.number not in late | back] + self.settling
        """Of a step whose update does not lag."""
        self.first = [row for row in rows if row.number not in late]
        """Of one that has no gradients of a step before: it changes no parameter."""
        self.later = list(rows)


def moved_stages(program: Program) -> frozenset[int]:
    """Stages whose update a Program has on the host."""
    names = [kind.name for kind in program.kinds]
    if "HOST_OPT" not in names:
        return frozenset()
    rows = [row for row, kind in enumerate(program.kind.tolist()) if names[kind] == "HOST_OPT"]
    return frozenset(stage for row in rows for stage in stages_of_row(program, row))
