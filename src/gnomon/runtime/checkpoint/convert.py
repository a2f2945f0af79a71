"""A checkpoint for another plan, without its processes: `preview` says what it costs, `convert` writes it.

A run reads any checkpoint under any plan, so this is for what is read often, or far away: each rank of the new plan
finds all that it wants in one file of its own. The tensors are the same, bit by bit. What each rank holds comes from
the rules that the runtime itself follows (`apply.parts_held`), on torch's `meta` device. Leaves out other models and
precisions.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile
from time import perf_counter

import torch

from gnomon.errors import InputError
from gnomon.graph import Graph
from gnomon.plans import Plan, Workload
from gnomon.plans.ends import cut_ends
from gnomon.plans.expert_rows import has_rows, taken_apart
from gnomon.plans.plan import effective_zero
from gnomon.runtime.checkpoint.files import Reader, WrittenTensor, write_file
from gnomon.runtime.checkpoint.lock import FolderLock
from gnomon.runtime.checkpoint.pieces import Piece, pieces, shared_out
from gnomon.runtime.checkpoint.record import check_identity, identity_of, read_record, write_record
from gnomon.runtime.checkpoint.save import put_in_place
from gnomon.runtime.mesh.groups import AXES, EXPERT_AXES, Groups, coordinates, meshes_of
from gnomon.runtime.module.apply import NO_SHARES, check_plan, has_experts, holders, parts_held, sharded_blocks
from gnomon.runtime.optim.update import Update
from gnomon.runtime.parameters.parameters import Parameters
from gnomon.runtime.step.vocabulary import DividedVocabulary
from gnomon.software import own

META = torch.device("meta")
PROBE_BYTES = 32 << 20
"""Written and summed to see how fast this disk and processor are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What a conversion costs on this machine."""

    files: tuple[int, ...]
    """Bytes of tensors in each rank's new file."""
    parts: int
    """Pieces of tensors that are written."""
    seconds: float
    """By the speed at which a probe was written and summed up."""

    @property
    def nbytes(self) -> int:
        """Bytes that are read and written."""
        return sum(self.files)

    @property
    def memory_bytes(self) -> int:
        """Bytes that are held at once: those of the largest file."""
        return max(self.files)


def holdings(graph: Graph, plan: Plan, rank: int) -> Iterator[tuple[Parameters, Update]]:
    """What a rank of the plan holds, as an executor's `parameters()`, without values."""
    whole, ends = graph, cut_ends(plan, graph) if plan.schedule.vocabulary != "ends" else None
    if ends is not None:
        graph, plan = ends.inside, ends.plan
    if has_rows(plan):
        cut = taken_apart(plan, graph)
        graph, plan = cut.graph, cut.plan
    tied = {stage for stages in holders(plan, graph, effective_zero(plan)).values() for stage in stages}
    here = coordinates(plan, rank, experts=has_experts(graph))
    mesh = meshes_of(plan, tied=sorted(tied))[here.pipeline_rank]
    groups = Groups(mesh=mesh, here=here, by_comm=dict.fromkeys((*AXES, *EXPERT_AXES, "vocabulary"), None))
    blocks, by_layer = sharded_blocks(graph, plan, mesh), own.by_layer(plan)
    vocabulary_shares = NO_SHARES if ends is None else DividedVocabulary.of(ends, plan, groups).shares_of_stages(whole)
    for holding in parts_held(graph, plan, groups, blocks, META, by_layer=by_layer, shares=vocabulary_shares):
        for parameters in holding.parts:
            if parameters.dtypes.master is not None:
                parameters.master = torch.empty(
                    parameters.mine[1] - parameters.mine[0], dtype=parameters.dtypes.master, device=META
                )
            yield parameters, Update.of(parameters, plan.optimizer.kind)


def shares(graph: Graph, plan: Plan) -> list[list[Piece]]:
    """Pieces, without values, that each rank of the plan writes."""
    check_plan(plan)
    everyone = [list(pieces(holdings(graph, plan, rank), writes=True)) for rank in range(plan.world_size)]
    chosen = shared_out([{piece.key: piece.value.nbytes for piece in mine} for mine in everyone])
    return [[piece for piece in mine if piece.key in keys] for mine, keys in zip(everyone, chosen, strict=True)]


def preview(graph: Graph, plan: Plan) -> Preview:
    """What it costs to write a checkpoint of the model for the plan."""
    parts = shares(graph, plan)
    files = tuple(sum(piece.value.nbytes for piece in mine) for mine in parts)
    return Preview(files=files, parts=sum(map(len, parts)), seconds=sum(files) * _seconds_a_byte())


def _seconds_a_byte() -> float:
    """Seconds to read, sum up and write a byte, measured on a probe that is read from memory, as files that were
    written lately are."""
    block = os.urandom(1 << 20)
    began = perf_counter()
    with TemporaryFile() as out:
        for _ in range(PROBE_BYTES >> 20):
            sha256(block)
            sha256(block)  # when it is checked, and for the new file
            out.write(block)
        out.flush()
        os.fsync(out.fileno())
    return (perf_counter() - began) / PROBE_BYTES


def convert(
    source: Path,
    target: Path,
    graph: Graph,
    plan: Plan,
    workload: Workload,
    *,
    say: Callable[[int, int], None] = lambda done, ranks: None,
) -> Path:
    """Writes the checkpoint `source` as one of the plan below the folder `target` and returns its path.

    InputError for a checkpoint of another model, precision or batch, or one that has not all that the plan's ranks
    hold (another optimizer). say: takes the number of files that are done, and of all.
    """
    record = read_record(source)
    check_identity(source, record.identity, identity_of(graph, plan, workload))
    done = target / f"step-{record.step:06}"
    if done.exists():
        raise InputError(f"{done} is there already; give another folder, or remove it")
    reader, parts = Reader(source, record), shares(graph, plan)
    partial = target / f".step-{record.step:06}.partial"
    lock = FolderLock(target)
    try:
        target.mkdir(parents=True, exist_ok=True)
        lock.take()
        # Left by a conversion that was killed: under the lock nobody else writes there.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        files = []
        for rank, mine in enumerate(parts):
            files.append(write_file(partial / f"rank-{rank:05}.safetensors", _filled(reader, mine)))
            say(rank + 1, len(parts))
        write_record(partial, replace(record, plan=plan.mesh.describe(), files=tuple(files)))
        put_in_place(partial, done)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise InputError(f"cannot write a checkpoint to {str(target)!r}: {error.strerror}; make room there") from error
    finally:
        lock.free()
    return done


def _filled(reader: Reader, mine: Sequence[Piece]) -> Mapping[str, WrittenTensor]:
    """The pieces of one rank with their values."""
    tensors = {}
    for piece in mine:
        value = torch.empty(piece.value.shape, dtype=piece.value.dtype)
        reader.fill(replace(piece, value=value))
        tensors[piece.key] = WrittenTensor(whole=piece.whole, value=value)
    return tensors


def contents(reader: Reader) -> dict[str, tuple[int, int]]:
    """Counts the tensors of each kind (parameters, first, second, master) and their bytes."""
    kinds: dict[str, tuple[int, int]] = {}
    for name, parts in reader.by_name.items():
        kind = name.partition("/")[0]
        count, nbytes = kinds.get(kind, (0, 0))
        kinds[kind] = count + 1, nbytes + sum(part.entry.end - part.entry.begin for part in parts)
    return kinds
