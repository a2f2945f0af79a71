"""Each question by name has an answer, and its numbers are those of the forecast and the memory."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from gnomon.cli import main
from gnomon.hardware import parse_cluster
from gnomon.models.presets import model
from gnomon.serving.answers import ANSWERS, QUESTIONS, Question
from gnomon.serving.capacity import capacity, most_model_len
from gnomon.serving.forecast import BANDS, Disaggregated, Target, serve_pools
from gnomon.serving.layout import Serving
from gnomon.serving.requests import closed
from gnomon.software.engine import engine

ASKED = Question(
    graph=model("llama-3.1-8b"),
    cluster=parse_cluster("2xh100-sxm"),
    serving=Serving(max_model_len=1024),
    engine=engine("vllm"),
    load=closed(300, 20, 8, 24),
    target=Target(ttft_s=1.0, tpot_s=None),
    context=None,
)


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_question_has_lines_that_answer(name: str) -> None:
    assert ANSWERS.keys() == QUESTIONS.keys()
    lines = list(ANSWERS[name](ASKED))
    assert lines and all(line.strip() and "nan" not in line for line in lines)


def test_numbers_are_those_of_the_memory_and_the_forecast() -> None:
    held = capacity(ASKED.graph, ASKED.cluster, ASKED.serving, ASKED.engine)
    assert f"{held.kv_tokens:,} tokens" in " ".join(ANSWERS["memory"](ASKED))
    most = most_model_len(ASKED.graph, ASKED.cluster, ASKED.serving, ASKED.engine)
    assert f"largest max_model_len: {most}" in list(ANSWERS["fits"](ASKED))
    rate = ASKED.forecast().requests_per_s
    assert f"{rate:.3g} requests/s" in " ".join(ANSWERS["users"](ASKED))
    assert any(line.startswith("1 devices") for line in ANSWERS["fewest"](ASKED))


def test_explain_lists_and_answers_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    base = "explain llama-3.1-8b --serve --on h100-sxm --input-len 100 --output-len 10 --concurrency 4".split()
    assert main(base) == 0
    assert len(re.findall("--question", capsys.readouterr().out)) == len(QUESTIONS)
    assert main([*base, "--question", "ttft"]) == 0
    assert "in the queue" in capsys.readouterr().out
    assert main([*base, "--question", "tfft"]) == 2
    assert "did you mean 'ttft'" in capsys.readouterr().err


def test_bands_are_those_of_the_situation() -> None:
    """One at a time, several, in ggml, in two pools: four of five measured figures lie between other multiples."""
    one, several = closed(300, 20, 1, 4), closed(300, 20, 8, 24)
    asked = replace(ASKED, serving=replace(ASKED.serving, replicas=1))
    assert replace(asked, load=one).forecast().situation == "alone"
    assert replace(asked, load=several).forecast().situation == "several"
    assert replace(asked, load=one, engine=engine("llama.cpp")).forecast().situation == "alone in ggml"
    pools = Disaggregated(prefill=asked.serving, prefill_count=1, decode_count=1)
    made = serve_pools(asked.graph, asked.cluster, asked.serving, asked.engine, pools, several)
    assert made.situation == "pools"
    for bands in BANDS.values():
        assert bands.keys() == {"ttft", "tpot", "e2e"} and all(low < high for low, high in bands.values())
    assert made.to_mapping()["bands"] == {n: {"low": lo, "high": hi} for n, (lo, hi) in BANDS["pools"].items()}
