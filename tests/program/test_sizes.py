"""Labels of sizes: the most specific one counts, down to the rank class."""

from __future__ import annotations

import pytest

from gnomon.errors import UnpricedError
from gnomon.program import issue_order_peak, parse_program, validate
from gnomon.program.memory import size_labels

TEXT = """\
gnomon.program/1
stages 1
unit 0 = 0:0:4
unit 1 = 1:0:2
class 0
  0F0 0B0 0OPT
class 1 count 3
  0F1 0B1 0OPT
"""
SIZES = {"S": 1, "P": 0, "G": 0}


def peaks(**sizes: float) -> list[float]:
    program = parse_program(TEXT)
    return [peak.bytes for peak in issue_order_peak(program, validate(program).deps, {**SIZES, **sizes})]


def test_a_size_may_be_of_one_rank_class() -> None:
    assert peaks() == [1, 1]
    assert peaks(**{"1:S": 2}) == [1, 2]
    assert peaks(**{"1:S": 2, "0S": 3}) == [3, 3]  # the stage is more specific than the class alone
    assert peaks(**{"1:S": 2, "0S": 3, "1:0S": 5}) == [3, 5]
    assert peaks(**{"1:S": 2, "S~2": 7, "0:S~4": 9}) == [9, 7]  # so is the shape
    assert size_labels("S", 2, "4", 1) == ("1:2S~4", "2S~4", "1:S~4", "S~4", "1:2S", "2S", "1:S", "S")


def test_a_missing_size_lists_the_labels() -> None:
    program = parse_program(TEXT)
    with pytest.raises(UnpricedError, match="no size for buffer S of stage 0: give one of 0:0S~4, 0S~4, 0:S~4"):
        issue_order_peak(program, validate(program).deps, {"P": 0, "G": 0})
