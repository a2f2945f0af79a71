"""Scripts of Megatron-LM with what people write around the options, and options that only some programs take."""

from __future__ import annotations

from pathlib import Path

import pytest

from gnomon.errors import InputError
from gnomon.formats.given import ReadContext
from gnomon.formats.megatron.read import read_megatron

SIZES = """--num-layers {layers} --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 \\
  --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 64 --vocab-size 50304 --bf16"""
SCRIPT = f"""LOG_DIR=$SOMEWHERE/logs
TOKENIZER=`cat <<< /data/tokenizer`
torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py {SIZES} --save $LOG_DIR/ckpt --data-path $DATA/text \\
  --tokenizer-model $TOKENIZER --rampup-batch-size 16 16 1000 2>&1 | tee $LOG_DIR/log.txt
"""


def test_paths_redirections_and_a_ramp_of_the_batch() -> None:
    job = read_megatron(SCRIPT.format(layers=8))
    assert (job.devices, job.stated_devices, job.workload.global_batch_size) == (16, 16, 64)
    assert [entry.field for entry in job.unexpressed] == ["rampup_batch_size"]
    assert "final global batch, 64" in job.unexpressed[0].why


def test_a_multimodal_program_is_its_decoder_with_the_tokens_of_images() -> None:
    """Whose positions grow with them; the tower that makes them is said to be left out."""
    job = read_megatron(SCRIPT.format(layers=8).replace("pretrain_gpt", "pretrain_multimodal"))
    text = read_megatron(SCRIPT.format(layers=8)).workload.seq_len
    assert job.workload.seq_len > text
    assert any("tower" in str(entry) for entry in job.unexpressed)


def test_a_mixture_that_is_not_recomputed() -> None:
    job = read_megatron(SCRIPT.format(layers=8), context=ReadContext(settings={"moe_layer_recompute": "false"}))
    assert [entry.field for entry in job.unexpressed] == ["rampup_batch_size"]


def test_blooms_layers_and_its_embeddings_share_the_stages() -> None:
    more = "--deepspeed --pipeline-model-parallel-size 12 --pp-partition-method 'type:transformer|embedding'"
    job = read_megatron(f"deepspeed pretrain_gpt.py {SIZES.format(layers=70)} {more}", devices=24)
    assert job.plan.schedule.layers_per_stage == (5, *[6] * 10, 5)


@pytest.mark.parametrize(("group", "taken"), [(4, True), (8, True), (3, False), (128, False)])
def test_microbatches_in_a_row(group: int, taken: bool) -> None:
    text = f"""torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py {SIZES.format(layers=16)} \\
      --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2 \\
      --microbatch-group-size-per-virtual-pipeline-stage {group}"""
    if taken:
        assert read_megatron(text).plan.schedule.virtual_stages == 2
    else:
        with pytest.raises(InputError, match=r"takes 4 \(pipeline ranks\) to 32"):
            read_megatron(text)


def test_a_reader_of_images_says_what_it_leaves_open(tmp_path: Path) -> None:
    path = tmp_path / "sft.sh"
    words = "--num-layers 4 --hidden-size 64 --vision-model-type internvit --language-model-type qwen2.5_7B"
    path.write_text(f"torchrun --nproc_per_node 8 examples/multimodal/train.py {words}")
    with pytest.raises(InputError, match="missing key 'seq_length'"):
        read_megatron(path)
