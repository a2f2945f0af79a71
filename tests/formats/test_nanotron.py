"""nanotron: its tiny Llama example, and what its config classes refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from gnomon.errors import InputError
from gnomon.formats.given import ReadContext
from gnomon.formats.job import Job
from gnomon.formats.nanotron.read import read_nanotron, stages_of
from gnomon.models.llama import LlamaConfig
from gnomon.plans import check

FILE = Path(__file__).parent / "fixtures/nanotron/tiny_llama.yaml"


def job(*changes: tuple[str, str]) -> Job:
    text = FILE.read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return read_nanotron(text, context=ReadContext(strict=True))


def test_the_tiny_llama() -> None:
    result = read_nanotron(FILE)
    # Tied: V h + L (2 h² (1 + 2/16) + 3 h f + 2 h) + h.
    h, f, layers, vocab = 2048, 11008, 28, 128256
    assert result.graph().num_parameters() == vocab * h + layers * (2 * h * h + 2 * h * h // 8 + 3 * h * f + 2 * h) + h
    assert (result.devices, result.plan.mesh.dp_shard, result.plan.mesh.tp) == (8, 4, 2)
    assert result.workload.global_batch_size == 12 and result.workload.seq_len == 4096
    assert result.plan.layout.sequence_parallel and result.plan.precision.grad == "fp32"
    assert [u.field for u in result.unexpressed] == ["parallelism.tp_linear_async_communication"]
    check(result.plan, result.graph(), None, result.workload)


def test_the_default_engine_is_all_forward_all_backward() -> None:
    afab = job(("  pp_engine: 1f1b\n", ""), ("  pp: 1\n", "  pp: 2\n"))
    assert afab.plan.schedule.name == "gpipe" and afab.devices == 16
    assert job(("  pp: 1\n", "  pp: 2\n")).plan.schedule.name == "one_f_one_b"


def test_without_fp32_accumulation_the_update_is_on_the_parameters() -> None:
    precision = job(("accumulate_grad_in_fp32: true", "accumulate_grad_in_fp32: false")).plan.precision
    assert (precision.grad, precision.master, precision.states) == ("bf16", "none", "bf16")


def test_the_vocabulary_is_padded() -> None:
    result = job(("make_vocab_size_divisible_by: 1", "make_vocab_size_divisible_by: 1000"))
    assert result.model is not None and not isinstance(result.model, str)
    assert result.model.vocab_size == 130_000  # 128256 up to a multiple of 1000 x tp


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("zero_stage: 0", "zero_stage: 2", "stages 0 and 1"),
        ("  tp: 2", "  tp: 3", "heads = 16 is not divisible by parallelism.tp = 3; the nearest .* is 2"),
        ("  tp: 2", "  tp: 4", "num_key_value_heads = 2"),
        ("expert_parallel_size: 1", "expert_parallel_size: 2", "use 1"),
        ("is_llama_config: true", "is_mamba_config: true", "is_llama_config or is_qwen2_config"),
        ("pp_engine: 1f1b", "pp_engine: zb", "understood are 1f1b, afab"),
        ("  tp_mode: REDUCE_SCATTER", "  tp_modes: REDUCE_SCATTER", "did you mean 'parallelism.tp_mode'"),
        ("sequence_length: 4096", "sequence_length: 4097", "is not divisible by tp x cp"),
        ("  dp: 4", "", "missing key 'parallelism.dp'"),
    ],
)
def test_what_the_program_refuses_is_refused_with_the_fix(old: str, new: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        job((old + "\n", new + "\n"))


def test_stages_are_balanced_by_weights_and_the_head_counts() -> None:
    """16 layers of 16 h² and a head of 131072 h = 64 h² at h = 2048: the whole is 20 layers. Two stages: the first ends
    when it has reached 10, with layer 10. Four: they reach 5, 10 and 15 with the 5th, 10th and 15th layer."""
    model = LlamaConfig(
        name="llama-1.34b",
        num_layers=16,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=32,
        head_dim=64,
        ffn_size=8192,
        vocab_size=131072,
    )
    assert stages_of(model, 1) == ()
    assert stages_of(model, 2) == (10, 6)
    assert stages_of(model, 4) == (5, 5, 5, 1)
    # eight: 3 2 3 2 3 2 1 and the head on the seventh; the head goes to the last
    assert stages_of(model, 8) == (3, 2, 3, 2, 3, 2, 1, 0)
    # sixteen: the head on the fourteenth; stages left without layers take one each from those before
    assert stages_of(model, 16) == (2, *[1] * 14, 0)
