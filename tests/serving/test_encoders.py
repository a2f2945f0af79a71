"""An encoder's server predicted: the best policy is the best of those played, and the command says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gnomon.cli import main
from gnomon.errors import InputError
from gnomon.hardware import parse_cluster
from gnomon.models.presets import model
from gnomon.serving.encoders import EncoderPrice, best_policy, forecast, policies
from gnomon.serving.requests import poisson
from gnomon.software.engine import engine


def test_seconds_rise_with_tokens_and_are_not_under_the_roofline() -> None:
    graph, cluster = model("bert-base"), parse_cluster("1xa100-sxm-80gb")
    price = EncoderPrice(graph, cluster, engine("gnomon"), "bf16")
    times = [price.seconds(tokens) for tokens in (8, 64, 256, 512)]
    assert times == sorted(times)
    matrices = 12 * (4 * 768 * 768 + 2 * 768 * 3072)
    assert times[-1] >= 2 * matrices * 512 / 312e12


def test_the_best_policy_has_the_least_of_all_that_are_tried() -> None:
    load = poisson(400, 1, 9.0, 300, spread=0.97)
    found = best_policy(load, 2, 512, lambda tokens: 1e-4 * tokens + 2e-7 * tokens**2)
    every = [one.texts.percentile(98) for one in found]
    assert every == sorted(every) and len(found) == len(list(policies(load, 2, 512, lambda n: 1e-4 * n)))
    padded = next(one for one in found if one.policy.lengths == (512,))
    assert found[0].texts.percentile(98) < 0.8 * padded.texts.percentile(98)
    with pytest.raises(InputError, match="a text of 400|a text of 39"):
        forecast(load, next(policies(load, 2, 100, lambda n: 1.0)), lambda n: 1.0)


def test_predict_and_plan_of_an_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"{i * 0.004},{20 + (i * 37) % 400},1" for i in range(300)]
    trace.write_text("arrival_s,context_tokens,generated_tokens\n" + "\n".join(rows) + "\n")
    asked = ["bert-base", "--serve", "--on", "2xl4", "--requests", str(trace)]
    assert main(["predict", *asked, "--pad-to", "64,256,512", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["buckets"] == [64, 256, 512] and 0 < told["padding"] < 1
    assert told["latency"]["p50_s"] <= told["latency"]["p98_s"]
    plan = tmp_path / "serve.toml"
    assert main(["plan", *asked, "-o", str(plan)]) == 0
    assert "policies played" in capsys.readouterr().out and 'engine = "gnomon"' in plan.read_text()
    for wrong, why in (
        (["--pad-to", "64,256"], "add 512"), (["--pad-to", "64,64,512"], "rise"), (["--kv-dtype", "fp8"], "--kv"),
        (["--max-model-len", "600"], "above the 512 places"),
    ):  # fmt: skip
        assert main(["predict", *asked, *wrong]) == 2
        assert why in capsys.readouterr().err
