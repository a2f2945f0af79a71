"""The update on the host (ZeRO-Offload): gradients come down, the host adds and updates, parameters go back.

`HostUpdate` has a function for each such kind of action: D2H, HOST_ADD, HOST_OPT, H2D. A `HostPart` is the host's side
of a device's `Parameters`: a copy of what this rank updates (under ZeRO its shard), the optimizer's, and the gradient
as it adds up. On CPU both sides are memory of one machine, and every copy is made all the same; `nbytes` counts them,
each way. Parameters that wait on the host anyway (`offload_parameters`) are updated where they are, and none go back.
On a CUDA device copies overlap with compute (`host_copies`), and a thread adds, updates and sends back in the order of
the rows; a layer's next row waits for its parameters. On a CPU only a delayed update runs in the thread,
beside the step, with the gradient of the step before: `HOST_OPT` starts it, and what reads its parameters or writes its
gradient waits for it.
Source: Ren et al. 2021 (ZeRO-Offload).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter

import torch
from torch import Tensor

from gnomon.program import Program
from gnomon.runtime.module.stage import Stage
from gnomon.runtime.parameters.parameters import CPU, Parameters
from gnomon.runtime.step.host_copies import Arriving, Copies
from gnomon.runtime.step.rows import RankRow, stages_of_row
from gnomon.runtime.step.state import State
from gnomon.runtime.watch.measure import HostClock, Recorder


class HostPart(Parameters):
    """The host's side of the parameters of a stage."""

    def __init__(self, device_part: Parameters, copies: Copies) -> None:
        """Takes over the master copy of a part that is on the device. device_part: filled. Its master copy is the
        host's from now on."""
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
        self.copies = copies
        self.stays = one.away
        """Whether the device has no parameters of its own: those here are the ones that it gathers."""
        # Where parameters wait on the host anyway there is one copy of them, which the update changes in place.
        self.resident = one.shard if one.away else copies.room(one.mine[1] - one.mine[0], one.dtypes.param)
        self.device_part, self.file = one, one.file
        self.first: Arriving | None = None
        """The copy that `grad` is."""
        self.coming: deque[Arriving] = deque()
        """Later microbatches' gradients, which are not added yet."""
        self.went: Arriving | None = None
        """The last copy of the parameters to the device."""
        # The fp32 copy moves to the host for good: only the update reads it.
        if one.master is not None:
            one.master = one.master.to(CPU)
        self.master = one.master
        one.master_on_host = True
        self.take()

    def take(self) -> None:
        """Has the parameters that the device has, as at the start and after a checkpoint was read."""
        if not self.stays:
            self.shard.copy_(self.device_part.shard)

    def my_grad(self) -> Tensor:
        """What the update consumes, once all of it came down."""
        assert self.grad is not None and self.first is not None, "no gradient came down before the update"
        return self.first.wait()

    def come_down(self) -> int:
        """Takes the gradient off the device and returns its bytes."""
        arriving = self.copies.down(self.device_part.my_grad())
        self.device_part.drop_grad()
        # The device's room for the gradient is what offloading is to save.
        self.device_part.free_grad()
        # The first microbatch's gradient is the sum so far: nothing needs to be zeroed and added to.
        if self.grad is None:
            self.grad, self.first = arriving.tensor, arriving
            self.begun.update(self.by_name)
        else:
            self.coming.append(arriving)
        return arriving.tensor.nbytes

    def add(self) -> None:
        """Adds the oldest of those that wait to be added."""
        whole = self.my_grad()
        # In the order in which they came down, so that the sum has one order of additions.
        whole += self.coming.popleft().wait()

    def go_back(self, after: torch.cuda.Event | None) -> Arriving:
        """Gives the device the updated parameters. after: what still reads the old ones."""
        if self.stays:
            return Arriving(self.shard, None)
        self.went = self.copies.up(self.device_part.shard, self.shard, after)
        return self.went

    def writable(self) -> None:
        """Waits until no copy reads the parameters, which the update writes."""
        if self.went is not None:
            self.went.wait()

    def drop_grad(self) -> None:
        """Frees the gradient after the update."""
        super().drop_grad()
        self.grad = self.first = None


class HostUpdate:
    """Updates of those stages of a rank that are on the host."""

    def __init__(self, state: State, stages: Mapping[int, Stage], moved: Collection[int]) -> None:
        """Makes the host's parts. moved: stages of the Program whose update is on the host (`moved_stages`)."""
        self.state = state
        self.copies = Copies(state.device)
        self.parts = {
            n: tuple(HostPart(part, self.copies) for part in stages[n].own_parameters) for n in stages if n in moved
        }
        self.nbytes = {"D2H": 0, "H2D": 0}
        """Bytes copied since the start, each way."""
        self.is_concurrent = False
        """Whether updates run beside what follows them."""
        self.threaded = self.copies.cuda
        """Whether a thread does all of the host's work, in the order of the rows."""
        self._thread = ThreadPoolExecutor(
            1, "host update", initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
        )
        self._under_way: dict[int, Future[float]] = {}  # by stage: when its update ends
        self._adds: deque[Future[None]] = deque()  # those that the thread was given
        self._going: dict[int, Future[list[Arriving]]] = {}  # by stage: copies to the device
        self._spans: dict[int, tuple[Recorder | None, int]] = {}  # by stage: what times the row that started it
        state.put_on_host(self.parts)

    def actions(self, about: Callable[[], Iterable[int]]) -> Mapping[str, Callable[[int, int], None]]:
        """Maps each kind of row to what does it. about: stages of the row that runs."""
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
        """Waits until no update is under way, and parameters are on their way back before whatever reads them next."""
        self.added()
        for stage in list(self._under_way):
            self._finish(stage)
        self.arrive(list(self._going))

    @property
    def going(self) -> bool:
        """Whether parameters are on their way back that nothing waited for yet."""
        return bool(self._going)

    def arrive(self, stages: Iterable[int]) -> None:
        """What is started from now on reads these stages' new parameters."""
        for stage in stages:
            if (going := self._going.pop(stage, None)) is not None:
                for arriving in going.result():
                    arriving.before(self.copies.current())

    def added(self) -> None:
        """Waits until every gradient that came down is added up."""
        while self._adds:
            self._adds.popleft().result()

    def _finish(self, stage: int) -> None:
        if (update := self._under_way.pop(stage, None)) is None:
            return
        done, (recorder, span) = update.result(), self._spans.pop(stage)
        if recorder is not None and isinstance(recorder.clock, HostClock):
            recorder.end[span] = done

    def close(self) -> None:
        """Ends the thread that updates."""
        self._thread.shutdown()

    def take(self) -> None:
        """Has the parameters that the device has."""
        for part in self._of(self.parts):
            part.take()

    def _of(self, stages: Iterable[int]) -> Iterator[HostPart]:
        for stage in stages:
            yield from self.parts[stage]

    def _down(self, stages: Iterable[int]) -> None:
        if any(self.state.is_tied(stage) for stage in stages):
            self.state.join_tied()  # what goes down is the sum
        for stage in stages:
            self._finish(stage)  # whose gradient the host still reads
            self.state.wait_for_gradient(stage)
            self.nbytes["D2H"] += sum(part.come_down() for part in self.parts[stage])

    def _add(self, stage: int) -> None:
        if self.threaded:
            # What is over is taken off, so that its errors come out here and not at the end of the step.
            while self._adds and self._adds[0].done():
                self._adds.popleft().result()
            self._adds.append(self._thread.submit(self._add_now, stage))
        else:
            self._add_now(stage)

    def _add_now(self, stage: int) -> None:
        for part in self.parts[stage]:
            part.add()

    def _update(self, stages: Iterable[int]) -> None:
        scale = self.state.scale
        by = scale.to(CPU) if isinstance(scale, torch.Tensor) else scale
        for stage in stages:
            if self.is_concurrent or self.threaded:
                # The row that started the update has its span open last.
                recorder = self.state.buffers.recorder
                self._spans[stage] = recorder, -1 if recorder is None else len(recorder.row) - 1
                self._under_way[stage] = self._thread.submit(self._update_now, stage, by, self.state.skips)
            else:
                self._update_now(stage, by, self.state.skips)

    def _update_now(self, stage: int, by: Tensor | float, skips: bool) -> float:
        for part, rule in zip(self.parts[stage], self.state.adam[stage], strict=True):
            part.writable()
            if self.state.watch is not None:
                part.my_grad()
                self.state.watch(part)
            # Gradients that overflowed are dropped all the same: the next step begins without.
            if not skips:
                rule.update(part, self.state.settings, scale=by, ranks=self.state.ranks_of(part.device_part))
            part.drop_grad()
        return perf_counter()

    def _back(self, stages: Iterable[int]) -> None:
        # What has been launched so far may still read the old parameters; the copy waits for it.
        after = self.copies.mark()
        for stage in stages:
            self.nbytes["H2D"] += sum(part.shard.nbytes for part in self.parts[stage] if not part.stays)
            if self.threaded:
                self.arrive((stage,))
                self._going[stage] = self._thread.submit(self._back_now, stage, after)
            else:
                self._finish(stage)
                self._back_now(stage, after)

    def _back_now(self, stage: int, after: torch.cuda.Event | None) -> list[Arriving]:
        return [part.go_back(after) for part in self.parts[stage]]


class DelayedRows:
    """Rows of a step whose Program begins with the update by the gradients of the step before."""

    def __init__(self, rows: Sequence[RankRow], names: Sequence[str]) -> None:
        """Splits a step's rows into those that settle what waits and the others. names: kind of each row."""
        # A gather behind the last backward is of updated parameters; those before are what forward reads.
        computes = max(at for at, name in enumerate(names) if name in ("B", "I", "W"))
        of = list(enumerate(zip(rows, names, strict=True)))
        late = {row.number for _, (row, name) in of if name in ("NORM", "HOST_OPT")}
        back = {row.number for at, (row, name) in of if name == "H2D" or (name == "UNSHARD" and at > computes)}
        # Updates first, since what goes back or is gathered is what they made, wherever the Program has these rows.
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
