"""Exact parameter counts of published models: every shape has to be right for these to hold.

Sources: the sum of the sizes in the published checkpoints (model cards, safetensors indices on the Hugging Face hub);
Pythia: Biderman et al. 2023, table 1 and its repository; DiT: Peebles and Xie 2023 (675 M with the fixed position
table, which is not trained and not counted here).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from gnomon.graph import Graph
from gnomon.models import bert, deepseek, dit, gemma, gpt, llama, mixtral, t5, unet, vit
from gnomon.models.presets import model
from gnomon.models.sizes import GRAPH_SIZES, LLAMA_SIZES

COUNTS: tuple[tuple[Graph, int], ...] = (
    (llama.llama(llama.llama3_1_8b()), 8_030_261_248),
    (llama.llama(llama.llama3_1_70b()), 70_553_706_496),
    (llama.llama(llama.llama3_1_405b()), 405_853_388_800),
    (llama.llama(llama.llama3_2_1b()), 1_235_814_400),
    (llama.llama(llama.llama2_7b()), 6_738_415_616),
    (llama.llama(llama.llama2_70b()), 68_976_648_192),
    (llama.llama(llama.mistral_7b()), 7_241_732_096),
    (llama.llama(llama.qwen2_5_7b()), 7_615_616_512),
    (llama.llama(llama.qwen3_8b()), 8_190_735_360),
    (gemma.gemma2(gemma.gemma2_2b()), 2_614_341_888),
    (gemma.gemma2(gemma.gemma2_9b()), 9_241_705_984),
    (gemma.gemma2(gemma.gemma2_27b()), 27_227_128_320),
    (mixtral.mixtral(mixtral.mixtral_8x7b()), 46_702_792_704),
    (mixtral.mixtral(mixtral.mixtral_8x22b()), 140_620_634_112),
    (mixtral.mixtral(mixtral.qwen3_30b_a3b()), 30_532_122_624),
    (mixtral.mixtral(mixtral.qwen3_235b_a22b()), 235_093_634_560),
    (deepseek.deepseek_v3(deepseek.deepseek_v3_671b()), 671_026_419_200),
    (gpt.gpt(gpt.gpt2()), 124_439_808),
    (gpt.gpt(gpt.gpt2_xl()), 1_557_611_200),
    (gpt.gpt_neox(gpt.gpt_neox_20b()), 20_554_567_680),
    (gpt.gpt_neox(gpt.pythia_1_4b()), 1_414_647_808),
    (bert.bert(bert.bert_base()), 109_482_240),
    (bert.bert(bert.bert_large()), 335_141_888),
    (t5.t5(t5.t5_small()), 60_506_624),
    (t5.t5(t5.t5_base()), 222_903_552),
    (t5.t5(t5.flan_t5_base()), 247_577_856),
    (vit.vit(vit.vit_b16()), 86_567_656),
    (vit.vit(vit.vit_l16()), 304_326_632),
    (dit.dit(dit.dit_xl_2()), 675_129_632 - 256 * 1152),
    (unet.unet(unet.ddpm_cifar10()), 35_746_307),
)


SIZES = {
    "llama-2-13b": 13_015_864_320,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "mistral-nemo-12b": 12_247_782_400,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_099_328,
    "gemma-3-12b": 11_765_788_416,
    "gemma-3-27b": 27_009_002_240,
    "gemma-4-26b-a4b": 25_232_800_000,  # by hand from MaxText's config; without scales of layers
    "gemma-4-31b": 30_697_345_280,  # by hand, the same
    "gpt-oss-20b": 20_914_757_184 - 24 * (32 * 3 * 2880 + 32 + 64),  # biases of experts and router, sinks
    "gpt-oss-120b": 116_829_156_672 - 36 * (128 * 3 * 2880 + 128 + 64),
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
}


@pytest.mark.parametrize("name", [*LLAMA_SIZES, *GRAPH_SIZES])
def test_further_sizes_are_exact(name: str) -> None:
    graph = model(name)
    assert (graph.name, graph.num_parameters()) == (name, SIZES[name])


@pytest.mark.parametrize(("graph", "count"), COUNTS, ids=lambda value: getattr(value, "name", ""))
def test_parameters_are_exact(graph: Graph, count: int) -> None:
    assert graph.num_parameters() == count


def test_gpt3_by_its_closed_form() -> None:
    h, layers, v, s = 12288, 96, 50257, 2048
    assert gpt.gpt(gpt.gpt3_175b()).num_parameters() == layers * (12 * h * h + 13 * h) + (v + s + 2) * h


def test_multi_token_prediction_adds_one_layer_and_a_join() -> None:
    plain = deepseek.deepseek_v3(deepseek.deepseek_v3_671b()).num_parameters()
    with_mtp = deepseek.deepseek_v3(deepseek.deepseek_v3_671b(mtp_modules=1))
    h, rank = 7168, 512
    attention = h * 1536 + 1536 + 1536 * 128 * 192 + h * (rank + 64) + rank + rank * 128 * 256 + 128 * 128 * h
    mixture = 257 * 3 * h * 2048 + 256 * h + 256
    assert with_mtp.num_parameters() - plain == attention + mixture + 2 * h + 2 * h * h + 3 * h


def test_the_bert_head_for_masked_words_is_tied() -> None:
    base = bert.bert(bert.bert_base()).num_parameters()
    mlm = bert.bert(replace(bert.bert_base(), head="mlm")).num_parameters()
    h, v = 768, 30522
    pooler = h * h + h
    assert mlm - base == (h * h + h + 2 * h + v) - pooler
