"""What processes of one job compute with, where any of them may do any worker's part: `Kernels`, the launcher's side.

At determinism D1 it is told once of each kind that comes; at D2 all agree on kernels that all have, and a process that
comes later without them is left out. Leaves out looking at a processor (`instruction_sets`) and saying what was found
(`membership`).
"""

from __future__ import annotations

from collections.abc import Collection

from torch._C._distributed_c10d import Store

from gnomon.runtime.launch.membership import kernels_of, say_kernels
from gnomon.runtime.processes import instruction_sets


class Kernels:
    """The instruction sets that the processes of one job compute with, and the one that all agree on."""

    def __init__(self, *, agreed: bool) -> None:
        """Takes agreed, whether all must compute with the same kernels (D2)."""
        self.must_agree = agreed
        self.agreed = ""
        """What all compute with; empty until they have said what they have."""
        self.kinds: dict[str, int] = {}
        """What processes of a D1 job compute with -> the first that does."""
        self.compared: set[int] = set()
        self.differing = ""
        """What was told of processes that differ, the last of it."""

    def look(self, store: Store, started: Collection[int], there: Collection[int]) -> tuple[list[str], list[int]]:
        """(what is to be said, processes that must leave). started: all but those that have left or are lost; there:
        those of them that run."""
        return self._agree(store, started, there) if self.must_agree else (self._compare(store, there), [])

    def _agree(self, store: Store, started: Collection[int], there: Collection[int]) -> tuple[list[str], list[int]]:
        """Agrees on kernels that all processes have which are there at first, and announces them."""
        found, lines = kernels_of(store, started), list[str]()
        # Agreed once: processes train by it from then on, and one that comes later must have it.
        if not self.agreed and found.keys() >= set(there):
            self.agreed = instruction_sets.common(found.values())
            say_kernels(store, self.agreed)
            lines.append(f"all processes compute with {self.agreed} kernels, which all have; without oneDNN")
        lacking = [one for one, has in found.items() if self.agreed and not instruction_sets.has(has, self.agreed)]
        lines += [
            f"process {process} has no {self.agreed} kernels, with which this job began: it is left out"
            for process in lacking
        ]
        return lines, lacking

    def _compare(self, store: Store, there: Collection[int]) -> list[str]:
        """A warning for each kind of processor that comes and is not the first's."""
        lines = list[str]()
        for process, kind in kernels_of(store, set(there) - self.compared).items():
            self.compared.add(process)
            if self.kinds and kind not in self.kinds:
                first, other = next(iter(self.kinds.items()))
                self.differing = (
                    f"process {process} computes with {kind}, and process {other} with {first}: at determinism D1 "
                    f"losses may then differ in their last digits with who does what; --determinism D2 gives the same "
                    f"bits"
                )
                lines.append(self.differing)
            self.kinds.setdefault(kind, process)
        return lines
