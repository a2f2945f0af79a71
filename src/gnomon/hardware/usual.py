"""Devices and counts as people type them: `8xA100-80G`, `h100:8`, `8 x H100 SXM5`, `8x4090`.

`usual(name)` finds the catalogue's device behind a name that is not one of its own: the product, with the form and the
memory where they are typed, of several the one that most machines have (`[usual]` of the catalogue's files). `plain`
writes a part of a cluster as `NxNxNAME`. Whoever calls says what was taken. Leaves out names that no device has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from gnomon.hardware import catalogue
from gnomon.hardware.types import Device

MAKERS = ("nvidia", "amd", "google", "tesla", "geforce", "instinct", "gpu")
"""Words before or after a product's name that tell no two devices apart."""
SERIES = ("rtx", "tpu")
"""Words that people leave out of a product's name."""
FORMS = {"sxm2": "sxm", "sxm4": "sxm", "sxm5": "sxm", "sxm6": "sxm", "nvlink": "sxm", "pci": "pcie"}
"""Form as typed -> as the catalogue has it."""

_MEMORY = re.compile(r"(\d{1,3})(?:g|gb|gib)")
_FORM = re.compile(r"sxm[2-6]?|nvlink|pcie?|nvl\d*|gcd")
_COUNTS = re.compile(r"(?:(\d{1,18})\s*[x×*]\s*)?(?:(\d{1,18})(?:\s*[x×*]\s*|\s+))?(\S.*)", re.DOTALL)
_GLUED = re.compile(r"(\d{1,4})([a-z].*)", re.DOTALL)
_AFTER = re.compile(r"(?:gpu:)?(.+?)\s*[x×*:]\s*(\d{1,18})", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """What a name that is short for a device was taken as."""

    device: Device
    """The one that is meant, or most machines have."""
    others: tuple[str, ...]
    """Names of the devices that it may have meant too."""

    def sentence(self, name: str) -> str:
        """The sentence that tells a user which part was taken for a name, and which others it might mean."""
        among = f", the usual one (others: {', '.join(self.others)})" if self.others else ""
        return f"{name!r} taken as {self.device.name}{among}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """A device's name taken apart."""

    product: str
    form: str = ""
    memory: int | None = None


def usual(name: str) -> Usual | None:
    """The device that a name is short for; None where no device has its product, its form and its memory."""
    name_parts = _parts(name)
    product_names = [name_parts.product, *(f"{series}{name_parts.product}" for series in SERIES)]
    first, able = None, list[tuple[Device, _Parts]]()
    for product_name in product_names:
        if able := [pair for pair in _known() if pair[1].product == product_name]:
            first = _first(product_name)
            break
    fits = [
        (device, parts)
        for device, parts in able
        if (not name_parts.form or parts.form == name_parts.form) and name_parts.memory in (None, parts.memory)
    ]
    if not fits:
        return None
    preferred = _parts(first or fits[0][0].name)
    fits.sort(key=lambda pair: (pair[1].form != preferred.form, pair[1].memory != preferred.memory))
    return Usual(device=fits[0][0], others=tuple(device.name for device, _ in fits[1:]))


def plain(part: str) -> str:
    """A part of a cluster as `NODESxDEVICESxNAME`: blanks, `*` and `×` away, and a count behind the name before it. A
    part that is read as it stands, or that has no such form, is given back as it is."""
    match = _COUNTS.fullmatch(part)
    if match is None:
        return part
    numbers, name = [number for number in match.groups()[:2] if number is not None], match[3]
    if len(numbers) < 2 and not _named(name):
        if (behind := _AFTER.fullmatch(name)) and _named(behind[1]):
            numbers, name = [*numbers, behind[2]], behind[1]
        elif (before := _GLUED.fullmatch(name)) and _named(before[2]):
            numbers, name = [*numbers, before[1]], before[2]
    return "x".join([*numbers, re.sub(r"[\s_]+", "-", name.strip())])


def _named(name: str) -> bool:
    """Whether a device or a node has that name, or is meant by it."""
    known = name in catalogue.device_names(aliases=True) or name in catalogue.node_names(aliases=True)
    return known or usual(name) is not None


def _parts(name: str) -> _Parts:
    """Product, form and memory of a name as it is typed, or as the catalogue has it."""
    words = [word for word in re.split(r"[\s_./-]+", name.lower()) if word and word not in MAKERS]
    product_name, form, memory = "", "", None
    for at, word in enumerate(words):
        # A number behind a product is its memory; behind a series it is the product (`rtx 500`).
        if at and (hit := _MEMORY.fullmatch(word) or re.fullmatch(r"(\d{2,3})", word)) and product_name not in SERIES:
            memory = int(hit[1])
        elif at and _FORM.fullmatch(word):
            form = FORMS.get(word, word)
        elif at == 0 and (joined := re.fullmatch(rf"([a-z]+\d+[a-z]?)({_FORM.pattern})({_MEMORY.pattern})?", word)):
            product_name, form = joined[1], FORMS.get(joined[2], joined[2])  # h100sxm, a100pcie40gb
            memory = int(joined[4]) if joined[3] else None
        else:
            product_name += word
    return _Parts(product=product_name, form=form, memory=memory)


@cache
def _known() -> tuple[tuple[Device, _Parts], ...]:
    """Every device with its name taken apart."""
    return tuple((device, _parts(device.name)) for device in map(catalogue.device, catalogue.device_names()))


def _first(product_name: str) -> str | None:
    """The device that most machines have of a product that is built in several forms."""
    most: Mapping[str, str] = catalogue.usual_devices()
    return most.get(product_name)
