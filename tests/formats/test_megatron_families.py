"""Megatron-LM's other entry points, and the sizes of the vocabularies that its scripts name.

Parameters are counted by hand from the published shapes; the allocation of hybrid layers is held to a brute force of
its rule: no layer of a kind is further than one place from where its share would put it.
"""

from __future__ import annotations

import pytest

from gnomon.errors import InputError
from gnomon.formats.job import Job
from gnomon.formats.megatron.families import allocated
from gnomon.formats.megatron.read import read_megatron
from gnomon.formats.tokenizers import rows_of
from gnomon.plans import check

RUN = "--micro-batch-size 4 --global-batch-size 32 --bf16 --lr 1e-4 --train-iters 100"
BERT = f"pretrain_bert.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 \
--max-position-embeddings 512 --tensor-model-parallel-size 2 {RUN}"
T5 = f"pretrain_t5.py --encoder-num-layers 12 --decoder-num-layers 12 --hidden-size 768 --num-attention-heads 12 \
--kv-channels 64 --ffn-hidden-size 3072 --encoder-seq-length 512 --decoder-seq-length 128 --vocab-extra-ids 100 \
--max-position-embeddings 512 --tokenizer-type BertWordPieceCase {RUN}"
HYBRID = f"pretrain_mamba.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 \
--group-query-attention --num-query-groups 8 --max-position-embeddings 2048 --position-embedding-type none \
--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 \
--hidden-dropout 0 {RUN}"
LLAMA = f"pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --swiglu \
--max-position-embeddings 2048 --position-embedding-type rope --normalization RMSNorm --disable-bias-linear \
--attention-dropout 0 --hidden-dropout 0 {RUN}"
IMAGES = LLAMA.replace("pretrain_gpt.py", "pretrain_vlm.py") + " --img-h 336 --img-w 336 --patch-dim 14"


def job(command: str) -> Job:
    return read_megatron(f"torchrun --nproc_per_node 8 {command}")


def test_bert_is_read_with_its_file_of_words() -> None:
    """BERT-large: 24 x 12 h^2 and biases; 30,524 words (two are added) in multiples of 128 x 2."""
    read = job(BERT)
    rows = -(-30524 // 256) * 256
    layers = 24 * (12 * 1024**2 + 13 * 1024)
    embeds = (rows + 512 + 2) * 1024 + 2 * 1024
    head = 1024**2 + 3 * 1024 + rows
    assert read.graph().num_parameters() == layers + embeds + head
    assert not check(read.plan, read.graph(), workload=read.workload)
    assert any("next sentence" in str(listed) for listed in read.unexpressed)


def test_t5_has_two_lengths() -> None:
    read = job(T5)
    assert (dict(read.workload.sizes), read.workload.seq_len) == ({"enc_seq": 512}, 128)
    rows = -(-(28996 + 2 + 100) // 128) * 128
    assert read.graph().num_parameters() == pytest.approx(rows * 768 + 12 * 12 * 768**2 + 12 * 16 * 768**2, rel=1e-3)
    with pytest.raises(InputError, match="encoder and a decoder over several pipeline ranks"):
        job(f"{T5} --pipeline-model-parallel-size 2")


@pytest.mark.parametrize(("layers", "attention", "mlp"), [(24, 0.08, 0.5), (56, 0.08, 0.5), (10, 0.2, 0.3), (9, 0, 0)])
def test_layers_of_a_hybrid_by_their_shares(layers: int, attention: float, mlp: float) -> None:
    letters = allocated(layers, attention, mlp)
    assert len(letters) == layers and letters.count("*") == round(layers * attention)
    assert letters.count("-") == round(layers * mlp)
    gaps = [len(part) for part in letters.split("*")]
    assert max(gaps) - min(gaps) <= 1


def test_a_hybrid_is_read_by_shares_or_by_its_pattern() -> None:
    shares = job(f"{HYBRID} --hybrid-attention-ratio 0.08 --hybrid-mlp-ratio 0.5 --vocab-size 32000")
    pattern = job(f"{HYBRID} --hybrid-override-pattern {allocated(24, 0.08, 0.5)} --vocab-size 32000")
    assert shares.graph().num_parameters() == pattern.graph().num_parameters()
    assert {block.name for block in shares.graph().blocks} >= {"embed", "head"}
    with pytest.raises(InputError, match="23 layers in the pattern, and num_layers = 24"):
        job(f"{HYBRID} --hybrid-override-pattern {'M' * 23} --vocab-size 32000")
    with pytest.raises(InputError, match="'x' is no layer"):
        job(f"{HYBRID} --hybrid-override-pattern {'x' * 24} --vocab-size 32000")


def test_images_join_the_text_and_their_tower_is_listed() -> None:
    read = job(IMAGES)
    assert read.workload.seq_len == 2048 + (336 // 14) ** 2 + 1
    assert any("the tower that turns an image into 577 tokens" in str(listed) for listed in read.unexpressed)
    with pytest.raises(InputError, match="freeze_LM"):
        job(f"{IMAGES} --freeze-LM")


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("tools/run_text_generation_server.py", "gnomon predict MODEL --serve --tp 8 --on"),
        ("examples/inference/gpt/gpt_dynamic_inference.py", "serves a trained model, no training"),
        ("tools/checkpoint/convert.py", "trains nothing; give the script that trains"),
        ("pretrain_ict.py", "trains a ict model; decoders, BERT, T5, Mamba hybrids"),
    ],
)
def test_a_program_that_is_no_training_says_what_it_is(program: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        job(f"{program} --tensor-model-parallel-size 8 --num-layers 8 --micro-batch-size 1 --hidden-size 1024")


@pytest.mark.parametrize(
    ("tokenizer", "rows"),
    [
        ("--tokenizer-type GPT2BPETokenizer", 50304),
        ("--tokenizer-type TikTokenizer --tiktoken-pattern v2 --tokenizer-model v.json", 131072),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/Qwen2.5-7B", 151680),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model ${ROOT}/Qwen3-8B", 151680),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Meta-Llama-3-8B", 128256),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model", 32000),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model deepseek-ai/DeepSeek-V3", 128896),
    ],
)
def test_a_named_tokenizer_says_its_vocabulary(tokenizer: str, rows: int) -> None:
    embed = job(f"{LLAMA} {tokenizer}").graph().block("embed")
    assert {dim.size for dim in embed.dims if dim.name == "vocab"} == {rows}


@pytest.mark.parametrize("name", ["", "tokenizer.model", "my_own_bpe.json", "/data/tok"])
def test_another_tokenizer_is_not_guessed(name: str) -> None:
    assert rows_of(name) is None
    with pytest.raises(InputError, match="--vocab-size"):
        job(f"{LLAMA} --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model {name or 'x'}")
