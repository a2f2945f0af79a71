"""What clusters cost: public prices, own prices, none."""

from __future__ import annotations

import pytest

from gnomon.errors import InputError
from gnomon.hardware import parse_cluster, parse_prices, prices, rent
from gnomon.hardware.rent import ANY, newest_price, other_months


def test_public_prices_are_the_newest_and_of_those_the_lowest() -> None:
    for name in {price.device for price in prices()}:
        chosen = newest_price(name)
        assert chosen is not None
        months = {price.date[:7] for price in prices(name)}
        assert chosen.date[:7] == max(months)
        same = [p.dollars_per_device_hour for p in prices(name) if p.date[:7] == max(months)]
        assert chosen.dollars_per_device_hour == min(same)


def test_a_cluster_of_two_kinds_is_the_sum() -> None:
    cluster = parse_cluster("1x8xh100-sxm+2x8xa100-sxm-80gb")
    result = rent(cluster, parse_prices(("h100-sxm=2.5,a100-sxm-80gb=$1.25/h",)))
    assert result is not None and result.dollars_per_hour == pytest.approx(8 * 2.5 + 16 * 1.25)
    assert len(result.sources) == 2 and "as given" in result.sources[0]
    every = rent(cluster, parse_prices(("3",)))
    assert every is not None and every.dollars_per_hour == pytest.approx(24 * 3)


def test_the_source_and_date_of_a_public_price_are_said() -> None:
    result = rent(parse_cluster("8xh100-sxm"))
    price = newest_price("h100-sxm-80gb")
    assert result is not None and price is not None
    assert price.source in result.sources[0] and price.date in result.sources[0]


def test_nothing_is_guessed() -> None:
    assert rent(parse_cluster("8xv100-sxm-32gb")) is None
    assert rent(parse_cluster("1x8xh100-sxm+1x8xv100-sxm-32gb")) is None


@pytest.mark.parametrize("text", ["", "h101=2", "h100=2,h100-sxm=3", "2,3", "-1", "x", "h100-sxm=", "0", "inf", "nan"])
def test_prices_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match="--price"):
        parse_prices((text,))


def test_prices_of_different_months_are_said() -> None:
    """Rents fall: a price of last year against one of today says more of the year than of the machine."""
    newest = {row.device: newest_price(row.device) for row in prices()}
    months = {name: row.date for name, row in newest.items() if row is not None}
    old, new = min(months, key=lambda name: months[name]), max(months, key=lambda name: months[name])
    rents = [each for each in (rent(parse_cluster(f"1x1x{name}")) for name in (old, new)) if each is not None]
    said = other_months(rents)
    assert months[old] != months[new] and len(rents) == 2
    assert all(f"{name} {month}" in said for each in rents for name, month in each.offers) and "--price" in said
    assert other_months(rents[:1]) == ""
    assert other_months([each for name in (old, new) if (each := rent(parse_cluster(name), {ANY: 2.0}))]) == ""
