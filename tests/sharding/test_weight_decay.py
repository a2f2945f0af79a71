"""Which parameters take weight decay, by the ops that read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gnomon import schema
from gnomon.cli import main
from gnomon.formats.huggingface.runnable import read_runnable
from gnomon.plans import Plan, PlanFile, Workload
from gnomon.sharding.matrices import decaying

SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2}
OLMO2 = {**SIZES, "model_type": "olmo2", "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
OLMO2 |= {"attention_bias": True}
MAMBA2 = {**SIZES, "model_type": "mamba2", "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2}


def test_norms_over_all_heads_and_biases_of_two_dims_do_not_decay() -> None:
    decays = decaying(read_runnable(json.dumps(OLMO2), "it").graph)
    assert {name.partition(".0.")[2] or name for name, does in decays.items() if does and ".1." not in name} == {
        *(f"self_attn.{one}_proj.weight" for one in "qkvo"),
        *(f"mlp.{one}_proj.weight" for one in ("gate", "up", "down")),
        "model.embed_tokens.weight",
        "lm_head.weight",
    }
    assert not decays["model.layers.0.self_attn.q_norm.weight"] and not decays["model.layers.0.self_attn.q_proj.bias"]


def test_of_a_scan_only_matrices_decay() -> None:
    decays = decaying(read_runnable(json.dumps(MAMBA2), "it").graph)
    of_mixer = {name.removeprefix("model.layers.0.mamba.") for name, does in decays.items() if does and ".0." in name}
    assert of_mixer == {"in_proj.weight", "out_proj.weight", "conv1d.weight_x", "conv1d.weight_bc"}
    others = {name.rpartition(".mamba.")[2] for name, does in decays.items() if not does and ".0." in name}
    assert {"norm.weight", "conv1d.bias_x", "conv1d.bias_bc", "A_log", "D", "dt_bias"} <= others


def test_it_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    file = PlanFile(model="llama-tiny", on="local:1", workload=Workload(global_batch_size=1, seq_len=16), plan=Plan())
    schema.save_file(file, tmp_path / "plan.toml")
    assert main(["run", str(tmp_path / "plan.toml"), "--explain-optimizer"]) == 0
    decaying_lines, others = capsys.readouterr().out.split("no weight decay")
    assert "model.layers.*.self_attn.q_proj.weight (4)" in decaying_lines
    assert "model.layers.*.input_layernorm.weight (4)" in others
    assert main(["run", str(tmp_path / "plan.toml"), "--explain-optimizer", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "model.norm.weight" in told["does_not_decay"] and "lm_head.weight" in told["decays"]
