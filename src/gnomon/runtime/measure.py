"""A measured Timeline: spans that the interpreter records, gathered from all ranks.

`Recorder` takes (row, start, end) as rows run; `gather` returns the Timeline on every rank, `per_class` the part of it
that compares with a prediction, whose workers are rank classes. Clocks are the machine's
monotonic one, which processes of one machine share. Left out: memory over time, and time inside an action.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from time import perf_counter

import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup

from gnomon.errors import PlanError
from gnomon.program import Program
from gnomon.timeline import NONE, ROLES, Spans, Timeline, Worker
from gnomon.units import TICK_S

ASSUMPTIONS = (
    "times are those of the issuing thread: a communication beside compute ends when its first reader has it, or when "
    "the step ends",
    "a receive begins when it is posted, so its span holds the wait for its sender",
)


@dataclass(slots=True)
class Recorder:
    """Spans of one rank, one step."""

    origin_s: float = 0.0
    """The clock when the step began."""
    row: list[int] = field(default_factory=list)
    """Row of the Program."""
    start_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    """Bytes of the buffer that is communicated; NONE for compute."""

    def begin(self) -> None:
        """Starts the step's clock."""
        self.origin_s = perf_counter()

    def open(self, row: int, nbytes: int = NONE) -> int:
        """Starts a span and returns its number."""
        self.row.append(row)
        self.nbytes.append(nbytes)
        self.start_s.append(perf_counter())
        self.end_s.append(float("nan"))
        return len(self.row) - 1

    def close(self, span: int) -> None:
        """Ends it."""
        self.end_s[span] = perf_counter()


def gather(program: Program, recorder: Recorder, group: ProcessGroup | None) -> Timeline:
    """The Timeline of all ranks, a worker each, from the earliest start of the step.

    PlanError if a span was never closed.
    """
    mine = (recorder.origin_s, recorder.row, recorder.start_s, recorder.end_s, recorder.nbytes)
    found = [mine]
    if group is not None:
        found = [mine] * dist.get_world_size(group)
        dist.all_gather_object(found, mine, group=group)
    origin = min(part[0] for part in found)
    worker = np.concatenate([np.full(len(part[1]), i) for i, part in enumerate(found)])
    row = np.concatenate([np.array(part[1], np.int64) for part in found])
    start = np.concatenate([np.array(part[2]) for part in found]) - origin
    end = np.concatenate([np.array(part[3]) for part in found]) - origin
    if np.isnan(end).any():
        raise PlanError(f"{program.where(int(row[np.isnan(end)][0]))} was begun but never ended; measure a whole step")
    talks = np.array([bool(program.comm_of(r)) for r in row.tolist()])
    spans = Spans.of(
        worker=worker,
        stream=program.stream[row],
        kind=program.kind[row],
        role=np.where(talks, ROLES.index("communication"), ROLES.index("compute")),
        start_s=start,
        end_s=end,
        stage=program.stage[row],
        unit=program.unit[row],
        nbytes=np.concatenate([np.array(part[4], np.int64) for part in found]),
    )
    return Timeline(
        clock="measured",
        workers=tuple(Worker(name=f"rank {i}") for i in range(len(found))),
        streams=program.streams,
        kinds=tuple(kind.name for kind in program.kinds),
        spans=spans,
        makespan_s=float(np.ceil(spans.end_s.max(initial=0.0) / TICK_S) * TICK_S),
        assumptions=ASSUMPTIONS,
    )


def per_class(timeline: Timeline, first_ranks: Sequence[int], counts: Sequence[int]) -> Timeline:
    """The spans of one rank of each class, under the names that predictions use.

    first_ranks: the rank that stands for each class. counts: ranks of each class. The step's seconds stay those of all
    ranks.
    """
    of_rank = {rank: cls for cls, rank in enumerate(first_ranks)}
    chosen = np.isin(timeline.spans.worker, list(first_ranks))
    columns = {column.name: getattr(timeline.spans, column.name)[chosen] for column in fields(Spans)}
    columns["worker"] = np.array([of_rank[rank] for rank in columns["worker"].tolist()], np.int32)
    workers = tuple(Worker(name=f"class {cls}", count=count) for cls, count in enumerate(counts))
    return replace(timeline, workers=workers, spans=Spans(**columns))
