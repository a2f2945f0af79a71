"""What a cluster costs to rent: a public price of each kind of device, or the user's own.

`rent(cluster)` adds up the newest public price of every device (of several from the same time the lowest), `rent(…,
given)` takes the user's. Returns None where some kind has no price: nothing is guessed. Leaves out what is not paid by
the device-hour: storage, network traffic, idle time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gnomon.errors import InputError
from gnomon.hardware.catalogue import device, device_names, prices, suggest
from gnomon.hardware.types import Cluster, Price
from gnomon.hardware.usual import usual
from gnomon.units import DollarsPerHour, parse_dollars_per_hour

ANY = ""
"""Key of a given price that holds for every kind of device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rent:
    """What a cluster costs."""

    dollars_per_hour: DollarsPerHour
    """Of all its devices."""
    sources: tuple[str, ...]
    """A line for each kind of device: price of a device-hour, who offers it, when it was read."""
    offers: tuple[tuple[str, str], ...] = ()
    """(device, month in which its public price was read) of each kind that has no given price."""


def rent(cluster: Cluster, prices_given: Mapping[str, float] | None = None) -> Rent | None:
    """The rent of a cluster; None if a kind of device has no price.

    given: dollars of a device-hour by name of the device, or for all kinds under `ANY`; goes before public prices.
    """
    own = prices_given or {}
    counts: dict[str, int] = {}
    for group in cluster.groups:
        name = group.node.device.name
        counts[name] = counts.get(name, 0) + group.count * group.node.count
    total, sources, offers = 0.0, [], []
    for name, count in counts.items():
        if (mine := own.get(name, own.get(ANY))) is not None:
            total += mine * count
            sources.append(f"rent: ${mine:.2f} a device-hour of {name}, as given (--price)")
            continue
        public = newest_price(name)
        if public is None:
            return None
        total += public.dollars_per_device_hour * count
        offers.append((name, public.date))
        sources.append(
            f"rent: ${public.dollars_per_device_hour:.2f} a device-hour of {name} ({public.name}, {public.source}, "
            f"{public.date}; --price overrides)"
        )
    return Rent(dollars_per_hour=total, sources=tuple(sources), offers=tuple(offers))


def other_months(rents: Iterable[Rent]) -> str:
    """What to say where public prices of several months are compared; empty where they are of one."""
    months: dict[str, str] = {}
    for each in rents:
        months.update(each.offers)
    if len(set(months.values())) < 2:
        return ""
    listed = ", ".join(f"{name} {month}" for name, month in sorted(months.items(), key=lambda offer: offer[1]))
    return f"the prices compared are of different months ({listed}), and prices fall; give those of today with --price"


def newest_price(name: str) -> Price | None:
    """The newest public price of a device; of several from the same month the lowest; None without any."""
    if name not in device_names():
        return None
    return min(prices(name), key=lambda p: (_ago(p.date), p.dollars_per_device_hour), default=None)


def _ago(date: str) -> int:
    """Months since year 0, negated: the newest comes first."""
    return -(int(date[:4]) * 12 + int(date[5:7]))


def parse_prices(texts: tuple[str, ...]) -> dict[str, float]:
    """Given prices from `2.5` (all kinds) or `h100-sxm=2.5`; `$2.5/h` is read too. InputError for anything else."""
    by_device: dict[str, float] = {}
    for text in texts:
        for part in text.split(","):
            name, equals, value = part.strip().rpartition("=")
            key = _priced(name.lower()) if equals else ANY
            if key in by_device:
                raise InputError(f"--price gives that of {key or 'all devices'} twice; keep one")
            by_device[key] = _dollars(value, text)
    return by_device


def _priced(name: str) -> str:
    """The device's full name."""
    if name in device_names(aliases=True):
        return device(name).name
    if (device_meant := usual(name)) is None:
        hint = suggest(name, device_names(aliases=True))
        raise InputError(f"--price names no known device: {name[:40]!r}{hint}; write DEVICE=DOLLARS")
    return device_meant.device.name


def _dollars(value: str, text: str) -> float:
    if "/" in value:
        dollars = parse_dollars_per_hour(value)
    else:
        try:
            dollars = float(value.lstrip("$"))
        except ValueError:
            raise InputError(
                f"--price {text[:40]!r} is no price; write dollars of a device-hour, as in 2.5 or h100-sxm=2.5"
            ) from None
    if not 0 < dollars < 1e6:
        raise InputError(f"--price {text[:40]!r} must be above 0 and below a million dollars a device-hour")
    return dollars
