"""Price keys of a Program: only those that rows use."""

from __future__ import annotations

from gnomon.program import parse_program


def test_a_key_whose_rows_all_have_names_is_not_asked_for() -> None:
    program = parse_program("gnomon.program/1\nstages 2\nunits 1\nclass 0\n  0F0/slow 1F0 1B0 0B0/late 0OPT 1OPT\n")
    assert sorted(key.label for key in program.keys) == ["0OPT", "1B", "1F", "1OPT", "late", "slow"]
    labels = [program.keys[key].label for key in program.key.tolist()]
    assert labels == ["slow", "1F", "1B", "late", "0OPT", "1OPT"]
