"""Numbers as files write them."""

from __future__ import annotations

import pytest

from gnomon.errors import InputError
from gnomon.formats.keys import Keys


def test_a_number_with_an_exponent_is_one_though_yaml_takes_it_for_text() -> None:
    """As TrainingArguments and pydantic read it; `1e-4` is text in YAML 1.1, `1.0e-4` is not."""
    given = {"lr": "1e-4", "eps": "1E-08", "half": "5.e-1", "wide": "3e+2"}
    keys = Keys(given, "sft.yaml")
    assert [keys.number(key) for key in given] == [1e-4, 1e-8, 0.5, 300.0]


@pytest.mark.parametrize("text", ["1e999", "e5", "-1e5", "1e", "0x1p3", "1e5 ", "nan", "12"])
def test_other_text_is_no_number(text: str) -> None:
    with pytest.raises(InputError, match="expected a number of at least 0"):
        Keys({"lr": text}, "sft.yaml").number("lr")
