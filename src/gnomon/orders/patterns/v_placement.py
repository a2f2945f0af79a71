"""V placement: rank r of p holds stage r and stage 2p - 1 - r, so the first and the last stage share rank 0.

`VRank` writes the actions of one rank in order: each call takes the next microbatch of a chunk (0 going down, 1 coming
back), and split weight gradients wait in a queue. The schedules of this placement (`zero_bubble_v`, `dualpipe_v`) are
lists of such calls; `rows` makes Rows of them. Left out: messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from gnomon.program.program import Override
from gnomon.program.rows import Rows, of_lists

Action = tuple[str, int, int]
"""(kind, stage, unit)."""


class VRank:
    """The actions of one rank so far."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.stages = (rank, 2 * num_ranks - 1 - rank)
        self.actions: list[tuple[Action, ...]] = []
        """Actions in order; two together are a composite."""
        self.forwards, self.backwards = [0, 0], [0, 0]
        """Microbatches that have gone forward and backward, by chunk."""
        self.waiting: deque[tuple[int, int]] = deque()
        """(chunk, microbatch) of weight gradients not computed yet."""

    def forward(self, chunk: int) -> None:
        """F of the next microbatch."""
        self.actions.append((self._forward(chunk),))

    def backward(self, chunk: int) -> None:
        """B, input and weight gradient in one."""
        self.actions.append((self._backward("B", chunk),))

    def input_gradient(self, chunk: int) -> None:
        """Adds an I, whose W waits."""
        action = self._backward("I", chunk)
        self.waiting.append((chunk, action[2]))
        self.actions.append((action,))

    def weight_gradient(self, chunk: int | None = None) -> None:
        """W that has waited longest, of one chunk or of both."""
        # First in, first out: the activation that has been held longest is let go first.
        oldest = next(entry for entry in self.waiting if chunk is None or entry[0] == chunk)
        self.waiting.remove(oldest)
        self.actions.append((("W", self.stages[oldest[0]], oldest[1]),))

    def forward_and_backward(self, forward: int, backward: int) -> None:
        """F of one chunk and B of the other as one composite, whose communication hides behind the other's compute."""
        self.actions.append((self._forward(forward), self._backward("B", backward)))

    def _forward(self, chunk: int) -> Action:
        unit = self.forwards[chunk]
        self.forwards[chunk] += 1
        return "F", self.stages[chunk], unit

    def _backward(self, kind: str, chunk: int) -> Action:
        unit = self.backwards[chunk]
        self.backwards[chunk] += 1
        return kind, self.stages[chunk], unit


def rows(ranks: Sequence[VRank], num_microbatches: int) -> Rows:
    """Rows of all ranks. Members of a composite share a group and the price name `F&B`."""
    flat = of_lists(
        [[action for actions in rank.actions for action in actions] for rank in ranks],
        num_stages=2 * len(ranks),
        num_units=num_microbatches,
    )
    # `row` counts rows over all ranks, since `of_lists` joins the ranks' lists in the same order: a composite's members
    # are neighbours in it.
    row, groups = 0, 0
    overrides: dict[int, Override] = {}
    for actions in (actions for rank in ranks for actions in rank.actions):
        if len(actions) > 1:
            name = "&".join(kind for kind, _, _ in actions)
            overrides.update((r, Override(name=name)) for r in range(row, row + len(actions)))
            flat.group[row : row + len(actions)] = groups
            groups += 1
        row += len(actions)
    return flat.with_overrides(overrides)
