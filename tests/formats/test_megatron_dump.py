"""Arguments that a log prints: the same job as that of the command that they were given by."""

from __future__ import annotations

from pathlib import Path

import pytest

from gnomon.formats import programs
from gnomon.formats.given import ReadContext
from gnomon.formats.job import Job

GIVEN: dict[str, object] = {
    "num_layers": 24, "hidden_size": 2048, "ffn_hidden_size": 5632, "num_attention_heads": 16, "seq_length": 4096,
    "max_position_embeddings": 4096, "group_query_attention": True, "num_query_groups": 4, "swiglu": True,
    "normalization": "RMSNorm", "position_embedding_type": "rope", "untie_embeddings_and_output_weights": True,
    "micro_batch_size": 2, "global_batch_size": 64, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2,
    "sequence_parallel": True, "use_distributed_optimizer": True, "overlap_grad_reduce": True, "bf16": True,
    "recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"], "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}  # fmt: skip
"""Options of the command."""

DEFAULTS: dict[str, object] = {
    "num_experts": None, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.0, "multi_latent_attention": False,
    "kv_lora_rank": 32, "q_lora_rank": None, "fp8": None, "fp8_margin": 0, "context_parallel_size": 1,
    "expert_model_parallel_size": 1, "params_dtype": "torch.bfloat16", "world_size": 16, "data_parallel_size": 4,
    "padded_vocab_size": 32256, "vocab_size": 32000, "make_vocab_size_divisible_by": 128, "rank": 0,
    "virtual_pipeline_model_parallel_size": None, "apply_rope_fusion": True, "masked_softmax_fusion": True,
}  # fmt: skip
"""What Megatron-LM prints beside them."""


def read(path: Path, text: str) -> Job:
    path.write_text(text)
    kind = programs.recognised(path)
    assert kind is not None and kind.name == "megatron"
    return kind.read(path, ReadContext(devices=16))


def command() -> str:
    words = [
        "torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --disable-bias-linear --tokenizer-type NullTokenizer"
    ]
    for name, value in GIVEN.items():
        spelled = "" if value is True else " ".join(map(str, value)) if isinstance(value, list) else str(value)
        words.append(f"--{name.replace('_', '-')} {spelled}".rstrip())
    return " ".join([*words, "--vocab-size 32000 --make-vocab-size-divisible-by 256"])  # x tp: 32,256 rows


def printed(before: str = "") -> str:
    every = {**GIVEN, **DEFAULTS, "add_bias_linear": False, "tokenizer_type": "NullTokenizer"}
    lines = (f"{before}  {name} {'.' * max(3, 48 - len(name))} {every[name]}" for name in sorted(every))
    title = "------------------------ arguments ------------------------"
    return "\n".join(["using world size: 16, data-parallel size: 4", f"{before}{title}", *lines, "done in 3 s"])


def namespace() -> str:
    every = {**GIVEN, **DEFAULTS, "add_bias_linear": False}
    spelled = ", ".join(
        f"{name}={'torch.bfloat16' if name == 'params_dtype' else repr(every[name])}" for name in sorted(every)
    )
    return f"[2026-11-29 10:00:00] INFO Namespace({spelled})\nstarting (rank 0)\n"


@pytest.mark.parametrize("text", [printed(), printed("[default0]:"), namespace()])
def test_a_log_says_the_job_of_its_command(text: str, tmp_path: Path) -> None:
    asked, said = read(tmp_path / "run.sh", command()), read(tmp_path / "run.log", text)
    assert said.plan == asked.plan
    assert said.workload == asked.workload
    assert said.graph() == asked.graph()
    assert said.stack == asked.stack
    assert {str(one) for one in said.unexpressed} <= {str(one) for one in asked.unexpressed}


def test_values_that_python_cannot_read_hide_no_others(tmp_path: Path) -> None:
    """Megatron-LM's enumerations and objects, as `repr` and `str` print them; a long log behind is not read."""
    asked = read(tmp_path / "run.sh", command() + " --attention-backend unfused")
    objects = "attention_backend=<AttnBackend.unfused: 3>, model_type=<ModelType.encoder: 1>, f=<function f at 0x7>"
    log = "step 1 (loss) | took (1.2 s)\n" * 20_000
    for text in (
        namespace().replace("bf16=", f"{objects}, bf16=") + log,
        printed() + "\n  attention_backend ............................... AttnBackend.unfused\n",
    ):
        said = read(tmp_path / "run.log", text)
        assert said.plan == asked.plan and said.stack == asked.stack
