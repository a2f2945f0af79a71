"""Records of experts' paths: written and read again, refused where damaged, and what predictions make of one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from gnomon.cli import main
from gnomon.errors import InputError
from gnomon.formats.expert_paths import is_paths, load_of, read_paths, save_paths
from gnomon.hardware import parse_cluster
from gnomon.models.presets import model
from gnomon.serving.foreseen_load import costs_of
from gnomon.serving.foresight import PathRecord
from gnomon.serving.layout import Serving
from gnomon.software.engine import engine

CONFIG = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 8,
    "num_experts_per_tok": 2, "vocab_size": 1024, "max_position_embeddings": 1024, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def recorded(follows: bool, layers: int = 6, tokens: int = 2048) -> PathRecord:
    """follows: the tokens of an iteration have one topic, whose experts are those of one device or of the other, in
    turn: no placement that stays is right for all."""
    rng = np.random.default_rng(3)
    topic = np.arange(tokens) // 256 % 2
    chosen = np.zeros((layers, tokens, 2), np.int64)
    for layer in range(layers):
        first = 4 * topic + rng.integers(0, 2, tokens) if follows else rng.integers(0, 8, tokens)
        chosen[layer] = np.stack([first, (first + 1 + rng.integers(0, 7, tokens)) % 8], axis=1)
    begins = tuple(range(0, tokens + 1, 256))
    return PathRecord(
        model="mixtral", layers=tuple(f"layers[{n}]" for n in range(layers)), experts=8, begins=begins, chosen=chosen
    )


def test_what_is_written_is_read_again_and_what_is_damaged_is_refused(tmp_path: Path) -> None:
    made, file = recorded(True, layers=3), tmp_path / "paths.npz"
    save_paths(made, file)
    again = read_paths(file)
    assert is_paths(file) and (again.chosen == made.chosen).all()
    assert replace(again, chosen=made.chosen) == replace(made, chosen=made.chosen) or again.begins == made.begins
    assert load_of(again).layers[1] == tuple(map(float, np.bincount(made.chosen[1].ravel(), minlength=8)))
    arrays = dict(np.load(file))
    for name, wrong in (
        ("begins", np.array([0, 50, 40, 2048])), ("chosen", arrays["chosen"] + 1), ("experts", np.array(4)),
        ("layers", arrays["layers"][:2]), ("schema", np.array("gnomon.expert-paths/9")),
    ):  # fmt: skip
        np.savez_compressed(file, **{**arrays, name: wrong})
        with pytest.raises(InputError, match="gnomon serve --record-experts"):
            read_paths(file)
    del arrays["begins"]
    np.savez_compressed(file, **arrays)
    with pytest.raises(InputError, match="no array 'begins'"):
        read_paths(file)


def test_predictions_say_what_copies_gain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a batch's tokens want the same experts they gain, which no placement that stays does; by chance nothing."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    asked = ["predict", str(tmp_path / "config.json"), "--serve", "--engine", "gnomon", "--on", "2xcpu-process"]
    asked += ["--tp", "2", "--ep", "2"]
    asked += ["--input-len", "200", "--output-len", "8", "--concurrency", "4", "--num-requests", "4", "--json"]
    said = {}
    for follows in (True, False):
        file = tmp_path / f"{follows}.npz"
        save_paths(recorded(follows), file)
        assert main([*asked, "--router", str(file), "--expert-copies", "2"]) == 0
        said[follows] = " ".join(json.loads(capsys.readouterr().out)["assumptions"])
    assert "2 copies a device of experts that are foreseen, by 6 iterations of" in said[True]
    gains = {follows: float(re.findall(r"gain (\S+)% of", one)[0]) for follows, one in said.items()}
    assert gains[True] > 10 > 1 > gains[False] >= 0
    assert main([*asked, "--router", str(file)]) == 0  # as a load
    assert "experts in order, as gnomon serve has them" in capsys.readouterr().out
    asked += ["--expert-copies", "2"]
    recorded_ = [*asked, "--router", str(file)]
    for wrong, why in (
        (
            ["2xh100-sxm" if w == "2xcpu-process" else "vllm" if w == "gnomon" else w for w in recorded_],
            "vllm has none",
        ),
        (asked, "--record-experts"),
        (["1" if before == "--ep" else w for before, w in pairwise(["", *recorded_])], "ep above 1"),
    ):
        assert main(wrong) == 2
        assert why in capsys.readouterr().err


def test_a_device_of_its_own_memory_hides_copies_behind_the_layer_before() -> None:
    """Over PCIe an expert of Mixtral takes 13 ms: experts of few tokens hide none of it, those of many all."""
    graph, cluster = model("mixtral-8x7b"), parse_cluster("8xh100-sxm")
    laid = Serving(tp=8, ep=8, max_model_len=1024)
    few, many = (costs_of(graph, cluster, laid, engine("vllm"), tokens) for tokens in (64.0, 200_000.0))
    assert few.fetch > 0 == many.fetch and few.touch == many.touch > 1
