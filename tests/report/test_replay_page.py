"""The page of a replay has a curve of each quantity, within its frame, and no script or address in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gnomon.cli import main


def test_the_page_draws_queue_batch_keys_and_first_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "replay.html"
    asked = "predict llama-3.1-8b --serve --on h100-sxm --input-len 500 --output-len 30 --concurrency 8 --page"
    assert main([*asked.split(), str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    assert re.findall("<h2>(.*?)</h2>", text) == [
        "requests in the queue",
        "requests that run",
        "share of KV blocks",
        "time to first token, at the first token",
    ]
    assert len(re.findall("<circle", text)) == 80
    assert "<script" not in text and "http" not in text
    heights = [float(y) for y in re.findall(r"V([\d.]+)", text)]
    assert heights and all(0 <= y <= 150 for y in heights)
    assert "throughput" in capsys.readouterr().out
