"""One process that trains in one epoch after the other, as others are lost and come: `InEpochs`.

It tells what it waited for when another one is lost, ends its connections, and waits for the next epoch. Leaves out
what a process does in an epoch (`survivors`, `takeover`), and who is in one (`membership`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

from torch._C._distributed_c10d import Store

from gnomon.errors import PeerError
from gnomon.runtime.launch.membership import Epoch, Membership, part
from gnomon.runtime.launch.train import Outcome
from gnomon.runtime.processes.connections import Sockets, shut, sockets
from gnomon.runtime.processes.faults import plain


class InEpochs(ABC):
    """What a process knows between two epochs."""

    after_loss_s = math.inf
    """In which the launcher must have announced an epoch after a loss."""

    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        clone: Any = membership.store
        self.watched: Store = clone.clone()
        """A connection to the store that no group uses."""
        self.before: Sockets = frozenset()
        """Sockets that there were before this epoch."""
        self.made: Sockets = frozenset()
        """Those of its groups, once all are made."""

    def until_over(self) -> Outcome | None:
        """Trains in one epoch after the other."""
        self.membership.join()
        epoch = self.membership.next(0)
        while epoch is not None:
            self.before, self.made = sockets(), frozenset()
            patience_s = math.inf
            try:
                if (outcome := self._in_epoch(epoch)) is not None:
                    return outcome
            except Exception as error:
                self._lost(error, epoch)
                patience_s = self.after_loss_s
            finally:
                part()
            epoch = self.membership.next(epoch.number, patience_s=patience_s)
        return None

    @abstractmethod
    def _in_epoch(self, epoch: Epoch) -> Outcome | None:
        """The outcome, if the job ended in this epoch; None when there is a newer one already."""

    @abstractmethod
    def _at(self) -> str:
        """Where in a step it stands."""

    def _lost(self, error: Exception, epoch: Epoch) -> None:
        """Says what this process waited for, and ends its connections. Raises what is no loss of another process."""
        rank = epoch.placement[epoch.members.index(self.membership.process)]
        lost = plain(error, rank, self._at())
        if not isinstance(lost, PeerError):
            raise lost from error
        self.membership.store.set(f"waited/{epoch.number}/{self.membership.process}", str(lost))
        self.membership.note("noticed", epoch)
        self._shut()

    def _shut(self) -> None:
        """Ends the connections of this epoch's groups, and that to the store which these were made by."""
        shut(self.made or sockets() - self.before)
