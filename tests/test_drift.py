"""Predictions do not change unsaid: `drift.toml` and a changelog fragment change with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from drift import COMMANDS, Fixed, digest, kept, predicted

ROOT = Path(__file__).parents[1]
HOW = "say why in a fragment of changelog.d and run: make drift BECAUSE=changelog.d/FRAGMENT.md"
CHANGED, KEPT = kept()


def test_the_file_has_every_prediction() -> None:
    assert tuple(fixed.command for fixed in KEPT) == COMMANDS, HOW
    assert len(set(COMMANDS)) == 30


@pytest.mark.parametrize("fixed", KEPT, ids=lambda fixed: f"{KEPT.index(fixed)}-{fixed.command.split()[0]}")
def test_predictions_are_those_on_record(fixed: Fixed) -> None:
    now = predicted(fixed.command)
    assert now.step_s == pytest.approx(fixed.step_s, rel=1e-6), HOW
    assert now.peak_bytes == pytest.approx(fixed.peak_bytes, rel=1e-6), HOW


def test_the_last_change_is_in_the_changelog() -> None:
    """As the fragment that was given, or, after a release, folded into the changelog."""
    fragment = ROOT / CHANGED["because"]
    if fragment.exists():
        assert digest(fragment) == CHANGED["text"], f"{fragment.name} changed since: {HOW}"
    else:
        assert "\n## " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), HOW
