"""What clusters cost: public prices, own prices, none."""

from __future__ import annotations

import pytest

from gnomon.errors import InputError
from gnomon.hardware import parse_cluster, parse_prices, prices, rent
from gnomon.hardware.rent import newest_price


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
