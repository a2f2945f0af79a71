"""MIG: which slices a device can be cut into. A `Geometry` holds the slices of one device and says where more may go.

A device has 8 memory slices and 7 compute slices; a profile may start only at certain memory slices. Counts and places
are those that `nvidia-smi mig -lgipp` lists for A100 and H100 (NVIDIA MIG user guide). Leaves out the time of cutting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from gnomon.errors import InputError
from gnomon.fleet.job import Job

PLACES: Mapping[str, tuple[int, tuple[int, ...]]] = {
    "1g": (1, (0, 1, 2, 3, 4, 5, 6)),
    "1g+": (2, (0, 2, 4, 6)),
    "2g": (2, (0, 2, 4)),
    "3g": (4, (0, 4)),
    "4g": (4, (0,)),
    "7g": (8, (0,)),
}
"""Profile -> (memory slices, where it may start). `1g+` is 1g with twice the memory."""

_PROFILE = re.compile(r"([12347])g(?:\.([0-9]+)gb)?(\+me)?")
_DOUBLE = ("1g.10gb+me", "1g.20gb", "1g.24gb")
"""Names of a slice with twice the memory on devices of 40, 80 and 96 GB; 1g.10gb alone is that of an 80 GB device."""


def profile_of(job: Job) -> str:
    """The profile that a job asks for: its `slice`, or the smallest with as many compute slices."""
    if job.slice:
        return profile(job.slice)
    for name in ("1g", "2g", "3g", "4g", "7g"):
        if int(name[0]) >= job.devices:
            return name
    raise InputError(f"job {job.id!r} asks for {job.devices} compute slices; a device has 7")


def profile(text: str) -> str:
    """The short name of a MIG profile: `3g.20gb` is `3g`, and `1g.20gb` (80 GB devices) is `1g+`."""
    match = _PROFILE.fullmatch(text.strip().lower())
    if match is None:
        raise InputError(f"unknown MIG profile {text!r}; known are 1g, 2g, 3g, 4g and 7g, as in 3g.20gb")
    return "1g+" if text.strip().lower() in _DOUBLE else f"{match[1]}g"


def memory_share(name: str) -> float:
    """Share of a device's memory that a slice of a profile has."""
    return PLACES[name][0] / 8


@dataclass(slots=True)
class Geometry:
    """Slices of one device: who holds which, from where."""

    slices: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Holder -> (profile, first memory slice)."""

    def start(self, name: str) -> int | None:
        """First memory slice at which a slice of a profile may be cut now; None if there is none."""
        width, places = PLACES[name]
        used = self.mask()
        compute = sum(int(slice_entry[0][0]) for slice_entry in self.slices.values())
        if compute + int(name[0]) > 7:
            return None
        # The last legal place first: 1g at the end leaves the first half for 4g and 3g.
        for place in reversed(places):
            if not used & (((1 << width) - 1) << place):
                return place
        return None

    def mask(self) -> int:
        """Memory slices in use, a bit each."""
        bits = 0
        for name, place in self.slices.values():
            bits |= ((1 << PLACES[name][0]) - 1) << place
        return bits

    def add(self, holder: str, name: str) -> None:
        """Cut a slice for a holder. InputError if there is no legal place."""
        place = self.start(name)
        if place is None:
            raise InputError(f"no legal place is left for a {name} slice beside {sorted(self.slices.values())}")
        self.slices[holder] = (name, place)

    def remove(self, holder: str) -> None:
        """Give a holder's slice back."""
        del self.slices[holder]

    def copy(self) -> Geometry:
        """Another with the same slices."""
        return Geometry(dict(self.slices))


def legal(slices: Mapping[str, tuple[str, int]]) -> bool:
    """Whether slices may stand on one device: in legal places, without overlap, no more compute than there is."""
    used = 0
    compute = 0
    for name, place in slices.values():
        width, places = PLACES[name]
        bits = ((1 << width) - 1) << place
        if place not in places or used & bits:
            return False
        used |= bits
        compute += int(name[0])
    return compute <= 7
