"""Rules of published sources: how a row is matched, what a file may hold, and that every rule is about some family."""

from __future__ import annotations

from pathlib import Path

import pytest

from evidence.published import Row
from evidence.published import rules as module
from evidence.published.rules import Rule, all_rules, first, matching, says, text_of
from gnomon.errors import FormatError

ROW = Row(
    id="r",
    family="f",
    model="Big 70B",
    device="H100",
    framework="NeMo",
    metric="s_per_step",
    value=1.0,
    source="a",
)

TEXT = """\
[[rules]]
match = {framework = '^nemo$', "model device" = '70b h100'}
since = "25.02"
until = "25.09"
set = {ranks = 4}
source = "a script"
date = "2026-11-23"

[[rules]]
match = {framework = '^nemo$'}
set = {ranks = 2, plain = true}
source = "another script"
date = "2026-11-23"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.setattr(module, "all_rules", module.all_rules.__wrapped__)
    monkeypatch.setattr(module, "rules", module.rules.__wrapped__)
    (tmp_path / "f.toml").write_text(TEXT)
    return tmp_path


def test_columns_are_joined_as_they_are_written() -> None:
    assert text_of(ROW, "model device") == "big 70b h100"
    assert text_of(ROW, "source|section|model") == "a||big 70b"


@pytest.mark.parametrize(("release", "ranks"), [("25.01", 2), ("25.02", 4), ("25.09", 4), ("25.10", 2), ("", 2)])
def test_the_first_rule_of_the_release_says_it(folder: Path, release: str, ranks: int) -> None:
    assert first(ROW, "ranks", release=release) == ranks
    assert says(ROW, "plain") and not says(ROW, "other") and first(ROW, "other", 7) == 7
    assert [rule.source for rule in matching(ROW, "ranks", "25.05")] == ["a script", "another script"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("since", "after", "rule 1 of f.toml has 'after'; a rule has date, match, set"),
        ('source = "a script"', "", "rule 1 of f.toml lacks source"),
        ("model device", "model maker", "matches 'maker', which is no column"),
        ('date = "2026-11-23"', 'date = "today"', "write YYYY-MM-DD"),
        ("[[rules]]", "[[rule]]", "a file of sources holds"),
    ],
)
def test_a_file_that_is_not_as_it_must_be_is_refused(folder: Path, old: str, new: str, message: str) -> None:
    (folder / "f.toml").write_text(TEXT.replace(old, new, 1))
    with pytest.raises(FormatError, match="f.toml") as error:
        first(ROW, "ranks")
    assert message in str(error.value)


def test_what_is_on_record_can_be_read_and_says_where_from() -> None:
    known = all_rules()
    assert len(known) > 100 and all(isinstance(rule, Rule) and rule.source.strip() for rule in known)
