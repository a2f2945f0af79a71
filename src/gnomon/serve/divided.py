"""A replica of several processes: `Leader` is its model as the engine sees it, `follow` what the other ranks run.

The engine's process is rank 0. It sends what an iteration computes to all others over pipes; activations go from stage
to stage, and terms are added up within a stage, over gloo as in training. A batch is under way in every stage, so that
none waits (`sizes.lanes`). Where a rank is lost, the others find its connections closed and end, and the router starts
the replica again. Leaves out how a model is divided (`division`).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from gnomon.errors import GnomonError, RunError
from gnomon.runtime.ops.site import Axis
from gnomon.runtime.processes.local import loopback
from gnomon.serve.decoder import Decoder
from gnomon.serve.division import divide
from gnomon.serve.load import load_share, look
from gnomon.serve.messages import Failure, Ready, Seat
from gnomon.serve.rows import Turn
from gnomon.serve.settings import Settings
from gnomon.serve.sizes import Ways
from gnomon.serving.kv_blocks import KvBlocks

Sent = tuple[Any, Tensor]
"""(what to wait for, what is kept until then)."""


def meet(seat: Seat, ways: Ways) -> Axis:
    """Joins the other ranks; the group of this rank's stage."""
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    store = TCPStore("127.0.0.1", seat.port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=ways.ranks)
    own = None
    if ways.tp > 1:
        # Every rank makes every stage's group, in the same order, whether it is in it or not: torch.distributed wants
        # it so.
        for stage in range(ways.pp):
            tp_group = dist.new_group(list(range(stage * ways.tp, (stage + 1) * ways.tp)))
            own = tp_group if stage == seat.rank // ways.tp else own
    return Axis(group=own, ranks=ways.tp, index=seat.rank % ways.tp)


def open_rank(settings: Settings, seat: Seat) -> tuple[Decoder, int]:
    """(what this rank holds, most tokens of a request), once all ranks have met."""
    folder = Path(settings.folder)
    found = look(
        folder, settings.rules, dtype=settings.dtype, kv_bytes=settings.kv_bytes, weights=settings.weights,
        max_model_len=settings.max_model_len, ways=settings.ways,
    )  # fmt: skip
    share = divide(found.graph_without_loss, settings.ways, seat.rank, meet(seat, settings.ways))
    model = load_share(
        folder, found, share, settings.adapters, settings.resident_bytes, expert_copies=settings.expert_copies
    )
    return model, found.max_model_len


class DividedStage:
    """One rank's layers, and whom it hears and tells."""

    def __init__(self, model: Decoder) -> None:
        self.model, ways = model, model.share.ways
        self.before = model.share.rank - ways.tp if model.share.stage else None
        """Rank of the stage before that hands its results to this one."""
        self.after = None if model.share.is_last else model.share.rank + ways.tp
        self.tells_leader = model.share.is_last and ways.pp > 1 and not model.share.tp.index
        self._sent: list[Sent] = []

    def run(self, turn: Turn) -> Tensor | None:
        """Runs an iteration; returns logits where the stage makes them. What is sent leaves while others are
        computed."""
        self.model.copy(turn)
        rows = turn.rows()
        entering = []
        for tensor in self.model.entering:
            assert self.before is not None
            entering.append(self.model.empty(tensor, len(rows.ids)))
            dist.recv(entering[-1], self.before)
        outputs = self.model.outputs(rows, entering)
        if not self.model.share.is_last:
            assert self.after is not None
            self._send(outputs, self.after)
            return None
        logits = outputs[0] if outputs[0].dtype == torch.float64 else outputs[0].float()
        if self.tells_leader:
            self._send([logits], 0)
        return logits

    def _send(self, tensors: Sequence[Tensor], rank: int) -> None:
        for work, _ in self._sent:
            work.wait()
        # the workspace that they lie in is written to again
        own = [x.clone(memory_format=torch.contiguous_format) for x in tensors]
        self._sent = [(dist.isend(x, rank), x) for x in own]


class Leader:
    """Rank 0, as the engine sees it."""

    def __init__(self, model: Decoder, others: Sequence[Connection]) -> None:
        """Takes others, pipes to the other ranks, which `follow`."""
        self.stage, self.others, self.sizes = DividedStage(model), others, model.sizes
        self._outputs = deque[Tensor | tuple[int, int]]()
        """Logits, or the shape of those that the last stage sends."""

    @property
    def ranks(self) -> int:
        """Counts the processes."""
        return self.stage.model.ranks

    @property
    def vocab_size(self) -> int:
        """Tokens that logits are about."""
        return self.stage.model.vocab_size

    def adapter(self, name: str) -> int:
        """Numbers an adapter as `Decoder.adapter` does."""
        return self.stage.model.adapter(name)

    def blocks(self, *, prefix_cache: bool) -> KvBlocks:
        """Makes the blocks of one lane."""
        return self.stage.model.blocks(prefix_cache=prefix_cache)

    def start(self, turn: Turn) -> None:
        """Begins an iteration on all ranks. RunError where one is gone."""
        try:
            for other in self.others:
                other.send(turn)
            logits = self.stage.run(turn)
        except (OSError, RuntimeError) as error:
            raise RunError(f"a process of this replica is gone: {error}") from error
        num_logits = sum(len(part.logit_places) for part in turn.parts)
        self._outputs.append((num_logits, self.vocab_size) if logits is None else logits)

    def logits(self) -> Tensor:
        """(wanted, vocabulary) of the iteration that began first. RunError where a rank is gone."""
        next_logits = self._outputs.popleft()
        if isinstance(next_logits, Tensor):
            return next_logits
        ways, model = self.stage.model.share.ways, self.stage.model
        out = torch.empty(next_logits, dtype=torch.float64 if model.dtype == torch.float64 else torch.float32)
        try:
            dist.recv(out, (ways.pp - 1) * ways.tp)
        except RuntimeError as error:
            raise RunError(f"a process of this replica is gone: {error}") from error
        return out


def follow(connection: Connection, settings: Settings, seat: Seat) -> None:
    """A rank that is not the engine's: computes what it is told until its leader goes."""
    try:
        model, _ = open_rank(settings, seat)
    except GnomonError as error:
        connection.send(Failure(-1, str(error), 500))
        return
    stage = DividedStage(model)
    connection.send(Ready(max_model_len=model.sizes.max_len, vocab_size=model.vocab_size))
    while True:
        try:
            stage.run(connection.recv())
        except (EOFError, ConnectionResetError):
            return


def lead(settings: Settings, seat: Seat, others: Sequence[Connection]) -> tuple[Leader, int]:
    """(the model of a replica whose other ranks are ready, most tokens of a request). RunError with what one says that
    cannot serve."""
    model, longest = open_rank(settings, seat)
    for other in others:
        try:
            reply = other.recv()
        except EOFError as error:
            raise RunError("a process of this replica ended before it served") from error
        if isinstance(reply, Failure):
            raise RunError(reply.why)
    return Leader(model, others), longest
