"""The sum of logical workers' gradients, added up in an order that depends on their number alone.

The order is a binary tree over workers 0 … n-1: a node of k workers is the sum of its first 2^j (the largest power of
two below k) and of the rest. A process adds up the nodes whose workers it has all (`Partial`), so it holds few
gradients whatever the number of its workers; `exchange` finishes the tree: every process adds up its share of the
elements, from the nodes of all, and gathers the others'. Where workers are next to each other on equal processes, that
moves as many bytes as a ring all-reduce. Returns nothing about which workers are where (`methods.easyscale`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gnomon.methods.easyscale import Node, halves, pair_of
from gnomon.runtime.mesh.collectives import all_gather, all_to_all

CHUNK = 1 << 22
"""Elements that are exchanged at once: what is made on the way is a few times so many."""


class Partial:
    """Adds up gradients of the workers of one process, as far as it can alone."""

    def __init__(self, total: int) -> None:
        """Takes the total number of workers of all processes."""
        self.total = total
        self.sums: dict[Node, list[Tensor]] = {}

    def add(self, worker: int, grads: list[Tensor]) -> list[Tensor] | None:
        """Takes the gradient of a worker; returns buffers that are free again, if any. The tensors are its own from now
        on."""
        node, free = (worker, worker + 1), None
        self.sums[node] = grads
        # Adds up as soon as both halves of a node are there, so that few gradients are held at a time.
        while (pair := pair_of(node, self.total)) is not None:
            first_half, right = pair
            if first_half not in self.sums or right not in self.sums:
                break
            # The sum goes into the left half's buffers, so the right one's are free. Which halves are added follows
            # from the tree, whichever came last: so does the rounding.
            free = self.sums.pop(right)
            for into, term in zip(self.sums[first_half], free, strict=True):
                into += term
            node = first_half[0], right[1]
            self.sums[node] = self.sums.pop(first_half)
        return free


def exchange(
    sums: Mapping[Node, Tensor], out: Tensor, nodes: Sequence[Sequence[Node]], total: int, group: ProcessGroup | None
) -> None:
    """Writes the sum over all workers into `out` on every process. sums: of this process's nodes, vectors as long as
    `out`. nodes: of each process of the group, in order of ranks; all must call it."""
    if group is None:
        out.copy_(sums[0, total])
        return
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    # In chunks, so that what is exchanged at once does not depend on the size of the model.
    for start in range(0, out.numel(), CHUNK):
        stop = min(start + CHUNK, out.numel())
        # each process finishes the sum of one part of the chunk: it is sent that part of every node that others hold
        part = -(-(stop - start) // size)
        # The last part is filled up with zeros: all processes then exchange equal parts.
        mine = torch.zeros(len(nodes[rank]), size * part, dtype=out.dtype)
        for row, node in zip(mine, nodes[rank], strict=True):
            row[: stop - start] = sums[node][start:stop]
        # [nodes, size, part] -> [size, nodes, part]: what goes to one process lies in one run
        sent = mine.view(-1, size, part).transpose(0, 1).contiguous()
        counts = [len(nodes_of_rank) * part for nodes_of_rank in nodes]
        came = torch.empty(sum(counts), dtype=out.dtype)
        width = out.element_size()
        all_to_all(
            came.view(torch.uint8),
            sent.view(-1).view(torch.uint8),
            group,
            received=[count * width for count in counts],
            sent=[len(nodes[rank]) * part * width] * size,
        )
        # came: the nodes of process 0, then those of process 1 …, one row of `part` elements each
        parts = dict(zip((node for nodes_of_rank in nodes for node in nodes_of_rank), came.view(-1, part), strict=True))
        whole = torch.empty(size * part, dtype=out.dtype)
        all_gather(whole.view(torch.uint8), _finished(parts, (0, total)).view(torch.uint8), group)
        out[start:stop] = whole[: stop - start]


def _finished(parts: dict[Node, Tensor], node: Node) -> Tensor:
    """Adds up a node from those below it that are there, which are used up."""
    if node in parts:
        return parts[node]
    first_half, right = (_finished(parts, half) for half in halves(node))
    # In place: the terms are this call's own.
    first_half += right
    return first_half
