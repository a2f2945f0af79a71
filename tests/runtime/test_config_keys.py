"""Keys of config.json at unusual values beside transformers: a sample of `python benchmarks/config_keys.py`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from runtime.config_keys import ABSENT, YARN, Case, base, cases, judge
from runtime.trained_alike import LIMIT, PLAN, trained

from gnomon.errors import GnomonError
from gnomon.formats.huggingface.runnable import read_runnable
from gnomon.plans import Saved, Schedule

pytestmark = pytest.mark.torch

EVERY = 601
"""One case of so many; a prime, so that all kinds of changes come up."""

RIGHT: tuple[tuple[str, dict[str, Any]], ...] = (
    ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    ("deepseek_v3", {"routed_scaling_factor": ABSENT}),
    ("deepseek_v2", {"rms_norm_eps": 0.1}),
    ("deepseek_v2", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}}),
    ("olmo3", {"rope_theta": 500.0}),
    ("gemma", {"hidden_act": "relu"}),
    ("llama", {"pad_token_id": 5}),
    ("llama", {"layer_norm_eps": 0.1}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}),
    ("falcon", {"multi_query": False}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("gpt_bigcode", {"multi_query": False}),
    ("mpt", {"attn_config": {"alibi": True, "softmax_scale": 0.3}}),
    ("minimax_m2", {"rotary_dim": 4, "head_dim": 8}),
    ("mamba2", {"time_step_limit": [0.01, 0.1]}),
    ("roberta", {"hidden_act": "relu"}),
    ("ernie4_5_moe", {"moe_norm_min": 2.0}),
    ("granitemoe", {"norm_topk_prob": False}),
    ("qwen2_moe", {"norm_topk_prob": True}),
    ("gptj", {"rope_theta": 500.0}),
)
"""What once trained another model without a word, and is computed now."""

NAMED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("olmo", {"clip_qkv": 0.05}, "clip_qkv=0.05 .* understood is null"),
    ("cohere", {"use_qk_norm": True}, "use_qk_norm"),  # norms with weights for every head
    ("mpt", {"attn_config": {"alibi": True, "clip_qkv": 0.05}}, "clip_qkv"),
    ("falcon", {"alibi": True}, "alibi"),
    ("bamba", {"hidden_act": "gelu"}, "hidden_act"),
    ("nemotron_h", {"n_group": 2, "topk_group": 1}, "n_group"),
    ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings"),
    ("gpt_neox", {"num_attention_heads": 8}, "rope_parameters"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 500.0}}}, "rope_parameters.full_attention"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
    ("qwen3", {"architectures": ["Qwen3ForTokenClassification"]}, "architectures"),
    ("mistral", {"sliding_window": 0}, "sliding_window"),
    ("bloom", {"slow_but_exact": True, "pretraining_tp": 2}, "slow_but_exact"),
)
"""What once did so, and is refused by the name of its key."""


@pytest.mark.parametrize(("kind", "changes"), RIGHT, ids=str)
def test_what_was_wrong_in_silence_is_computed(kind: str, changes: dict[str, Any]) -> None:
    verdict = judge(Case(kind=kind, changes=changes))
    assert verdict.what == "equal", verdict.message


@pytest.mark.parametrize(("kind", "changes", "named"), NAMED, ids=str)
def test_what_is_not_computed_is_refused_by_name(kind: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(GnomonError, match=named):
        read_runnable(json.dumps(Case(kind=kind, changes=changes).values()), "it")


def test_a_sample_of_all_keys_is_equal_or_refused() -> None:
    """Also: a file as its class has it is read in both spellings."""
    sample = [case for number, case in enumerate(cases()) if number % EVERY == 0]
    verdicts = {str(case): judge(case) for case in sample}
    wrong = {name: verdict for name, verdict in verdicts.items() if verdict.what in ("silent", "crash")}
    assert not wrong
    assert sum(verdict.what == "equal" for verdict in verdicts.values()) >= len(sample) // 8


def test_what_is_left_out_is_said() -> None:
    values = base("mixtral") | {"model_type": "mixtral", "router_aux_loss_coef": 0.02}
    assert any(
        "router_aux_loss_coef=0.02 adds nothing" in note for note in read_runnable(json.dumps(values), "it").notes
    )
    values = base("gpt2") | {"model_type": "gpt2", "attn_pdrop": 0.2}
    assert any("attn_pdrop=0.2" in note for note in read_runnable(json.dumps(values), "it").notes)
    values = base("llama") | {"model_type": "llama", "layer_norm_eps": 0.2}
    assert any("layer_norm_eps: its class" in note for note in read_runnable(json.dumps(values), "it").notes)


TRAINED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {}),
    ("llama", {"rope_parameters": YARN, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("olmo2", {"attention_bias": True}),
    ("gpt2", {"pad_token_id": None}),
    ("gpt_oss", {"swiglu_limit": 0.5}),
    ("mixtral", {"num_experts_per_tok": 1}),
    ("granite", {"residual_multiplier": 0.5, "logits_scaling": 3.0}),
    ("mamba2", {"time_step_limit": [0.0, 0.5]}),
    ("bert", {}),
    ("t5", {"feed_forward_proj": "gated-gelu"}),
    ("vit", {}),
)


@pytest.mark.parametrize(("kind", "changes"), TRAINED, ids=str)
def test_three_steps_of_adamw_are_those_of_transformers(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Two groups of parameters, clipped, rows with padding, labels of -100, microbatches of unequal labels."""
    apart = trained(Case(kind=kind, changes=changes), tmp_path)
    assert apart.worst < LIMIT, apart


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_packed_rows_train_as_in_transformers(kind: str, tmp_path: Path) -> None:
    apart = trained(Case(kind=kind, changes={}), tmp_path, packed=True)
    assert apart.worst < LIMIT, apart


PLANS = {
    "every layer recomputed": replace(PLAN, saved=Saved(preset="full")),
    "four microbatches": replace(PLAN, schedule=Schedule(num_microbatches=4)),
}


@pytest.mark.parametrize("plan", PLANS)
def test_plans_train_as_transformers_does(plan: str, tmp_path: Path) -> None:
    apart = trained(Case(kind="olmo2", changes={}), tmp_path, plan=PLANS[plan])
    assert apart.worst < LIMIT, apart
