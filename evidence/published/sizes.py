"""Sizes of a model that its row leaves out: known by its name, by MaxText's one scale, or by custom.

`with_sizes(row)` returns the row with layers, hidden, heads, feed-forward and vocabulary filled in where they follow,
and notes. A size that a row gives is never changed. Leaves out models that no name settles.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from evidence.published.row import Row

KNOWN = (
    (r"distill[- _]?llama[- _]?8b", (32, 4096, 32, 8, "14336", 128_256, None, None)),
    (r"distill[- _]?qwen[- _]?7b", (28, 3584, 28, 4, "18944", 152_064, None, None)),
    (r"distill[- _]?qwen[- _]?1\.5b", (28, 1536, 12, 2, "8960", 151_936, None, None)),
    (r"tiny[- _]?llama[- _]?1\.1b", (22, 2048, 32, 4, "5632", 32_000, None, None)),
    (r"code[- _]?llama[- _]?7b", (32, 4096, 32, 32, "11008", 32_016, None, None)),
    (r"code[- _]?llama[- _]?13b", (40, 5120, 40, 40, "13824", 32_016, None, None)),
    (r"code[- _]?llama[- _]?34b", (48, 8192, 64, 8, "22016", 32_000, None, None)),
    (r"llama[- _]?2[- _]?7b", (32, 4096, 32, 32, "11008", 32_000, None, None)),
    (r"llama[- _]?2[- _]?13b", (40, 5120, 40, 40, "13824", 32_000, None, None)),
    (r"llama[- _]?2[- _]?34b", (48, 8192, 64, 8, "22016", 32_000, None, None)),
    (r"llama[- _]?2[- _]?70b", (80, 8192, 64, 8, "28672", 32_000, None, None)),
    (r"llama[- _]?3(?:\.\d)?[- _]?8b", (32, 4096, 32, 8, "14336", 128_256, None, None)),
    (r"llama[- _]?3(?:\.\d)?[- _]?70b", (80, 8192, 64, 8, "28672", 128_256, None, None)),
    (r"llama[- _]?3(?:\.\d)?[- _]?405b", (126, 16384, 128, 8, "53248", 128_256, None, None)),
    (r"llama[- _]?3\.2[- _]?1b", (16, 2048, 32, 8, "8192", 128_256, None, None)),
    (r"llama[- _]?3\.2[- _]?3b", (28, 3072, 24, 8, "8192", 128_256, None, None)),
    (r"(?:llama|vicuna|alpaca)(?:[- _]?1)?[- _]?7b", (32, 4096, 32, 32, "11008", 32_000, None, None)),
    (r"(?:llama|vicuna|alpaca)(?:[- _]?1)?[- _]?13b", (40, 5120, 40, 40, "13824", 32_000, None, None)),
    (r"llama[- _]?(?:30|33)b", (60, 6656, 52, 52, "17920", 32_000, None, None)),
    (r"llama[- _]?65b", (80, 8192, 64, 64, "22016", 32_000, None, None)),
    (r"mistral[- _]?nemo", (40, 5120, 32, 8, "14336", 131_072, None, None)),
    (r"mistral[- _]?small.*24b", (40, 5120, 32, 8, "32768", 131_072, None, None)),
    (r"mistral[- _]?7b", (32, 4096, 32, 8, "14336", 32_000, None, None)),
    (r"mixtral[- _]?8[x×]7b", (32, 4096, 32, 8, "14336", 32_000, "8", 2)),
    (r"mixtral[- _]?8[x×]22b", (56, 6144, 48, 8, "16384", 32_768, "8", 2)),
    (r"qwen1\.5[- _]?0\.5b", (24, 1024, 16, 16, "2816", 151_936, None, None)),
    (r"qwen1\.5[- _]?1\.8b", (24, 2048, 16, 16, "5504", 151_936, None, None)),
    (r"qwen1\.5[- _]?4b", (40, 2560, 20, 20, "6912", 151_936, None, None)),
    (r"qwen1\.5[- _]?7b", (32, 4096, 32, 32, "11008", 151_936, None, None)),
    (r"qwen1\.5[- _]?14b", (40, 5120, 40, 40, "13696", 152_064, None, None)),
    (r"qwen1\.5[- _]?32b", (64, 5120, 40, 8, "27392", 152_064, None, None)),
    (r"qwen1\.5[- _]?72b", (80, 8192, 64, 64, "24576", 152_064, None, None)),
    (r"qwen2(?:\.5)?[- _]?0\.5b", (24, 896, 14, 2, "4864", 151_936, None, None)),
    (r"qwen2(?:\.5)?[- _]?1\.5b", (28, 1536, 12, 2, "8960", 151_936, None, None)),
    (r"qwen2\.5[- _]?3b", (36, 2048, 16, 2, "11008", 151_936, None, None)),
    (r"qwen2[- _]?7b", (28, 3584, 28, 4, "18944", 152_064, None, None)),
    (r"qwen2[- _]?72b", (80, 8192, 64, 8, "29568", 152_064, None, None)),
    (r"qwen2\.5[- _]?7b", (28, 3584, 28, 4, "18944", 152_064, None, None)),
    (r"qwen2\.5[- _]?14b", (48, 5120, 40, 8, "13824", 152_064, None, None)),
    (r"qwen2\.5[- _]?32b", (64, 5120, 40, 8, "27648", 152_064, None, None)),
    (r"qwen2\.5[- _]?72b", (80, 8192, 64, 8, "29568", 152_064, None, None)),
    (r"qwen3[- _]?0\.6b", (28, 1024, 16, 8, "3072", 151_936, None, None)),
    (r"qwen3[- _]?1\.7b", (28, 2048, 16, 8, "6144", 151_936, None, None)),
    (r"qwen3[- _]?4b", (36, 2560, 32, 8, "9728", 151_936, None, None)),
    (r"qwen3[- _]?8b", (36, 4096, 32, 8, "12288", 151_936, None, None)),
    (r"qwen3[- _]?14b", (40, 5120, 40, 8, "17408", 151_936, None, None)),
    (r"qwen3[- _]?32b", (64, 5120, 64, 8, "25600", 151_936, None, None)),
    (r"qwen3[- _]?30b", (48, 2048, 32, 4, "768 expert", 151_936, "128", 8)),
    (r"qwen3[- _]?235b", (94, 4096, 64, 4, "1536 expert", 151_936, "128", 8)),
    (r"gpt[- _]?oss[- _]?20b", (24, 2880, 64, 8, "2880 expert", 201_088, "32", 4)),
    (r"gpt[- _]?oss[- _]?120b", (36, 2880, 64, 8, "2880 expert", 201_088, "128", 4)),
    (r"deepseek[- _]?v2[- _]?lite", (27, 2048, 16, "MLA", "10944 dense / 1408 expert", 102_400, "64+2 shared", 6)),
    (r"deepseek[- _]?v2\b(?!\.5)", (60, 5120, 128, "MLA", "12288 dense / 1536 expert", 102_400, "160+2 shared", 6)),
    (r"deepseek[- _]?moe[- _]?16b", (28, 2048, 16, 16, "10944 dense / 1408 expert", 102_400, "64+2 shared", 6)),
    (r"deepseek[- _]?(?:llm[- _]?)?7b", (30, 4096, 32, 32, "11008", 102_400, None, None)),
    (r"deepseek[- _]?(?:llm[- _]?)?67b", (95, 8192, 64, 8, "22016", 102_400, None, None)),
    (r"moonlight", (27, 2048, 16, "MLA", "11264 dense / 1408 expert", 163_840, "64+2 shared", 6)),
    (r"kimi[- _]?k2", (61, 7168, 64, "MLA", "18432 dense / 2048 expert", 163_840, "384+1 shared", 8)),
    (r"olmoe", (16, 2048, 16, 16, "1024 expert", 50_304, "64", 8)),
    (r"grok[- _]?1\b", (64, 6144, 48, 8, "32768", 131_072, "8", 2)),
    (r"dbrx", (40, 6144, 48, 8, "10752", 100_352, "16", 4)),
    (r"llama[- _]?4[- _]?scout", (48, 5120, 40, 8, "8192 expert", 202_048, "16+1 shared", 1)),
    (r"deepseek[- _]?(?:v3|r1)\b", (61, 7168, 128, "MLA", "18432 dense / 2048 expert", 129_280, "256+1 shared", 8)),
    (r"nemotron[-_ ]v?3[-_ ]nano", (52, 2688, 32, 2, "1856 expert", 131_072, "128+1 shared", 6)),
    (r"nemotron[-_ ]3[-_.]5[-_ ]lightning", (52, 2688, 32, 2, "1856 expert", 131_072, "128+1 shared", 6)),
    (r"nemotron[-_ ]v?3[-_ ]super", (88, 4096, 32, 2, "2688 expert", 131_072, "512+1 shared", 22)),
    (r"nemotron[-_ ]v?3[-_ ]ultra", (108, 8192, 64, 2, "5120 expert", 131_072, "512+1 shared", 22)),
    (r"nemotron[-_ ]?h[-_ ]?8b", (52, 4096, 32, 8, "21504", 131_072, None, None)),
    (r"nemotron[-_ ]?4[-_ ]?15b", (32, 6144, 48, 8, "24576", 256_000, None, None)),
    (r"nemotron[-_ ]?4[-_ ]?340b", (96, 18432, 96, 8, "73728", 256_000, None, None)),
    (r"mamba[-_ ]?2[-_ ]?2\.7b", (64, 2560, 80, 80, "5120", 50_288, None, None)),
    (r"gemma[- _]?2[- _]2b", (26, 2304, 8, 4, "9216", 256_000, None, None)),
    (r"gemma[- _]?2[- _]9b", (42, 3584, 16, 8, "14336", 256_000, None, None)),
    (r"gemma[- _]?2[- _]27b", (46, 4608, 32, 16, "36864", 256_000, None, None)),
    (r"gemma[- _]?2b", (18, 2048, 8, 1, "16384", 256_000, None, None)),
    (r"gemma[- _]?7b", (28, 3072, 16, 16, "24576", 256_000, None, None)),
    (r"gemma[- _]?3[- _]?1b", (26, 1152, 4, 1, "6912", 262_144, None, None)),
    (r"gemma[- _]?3[- _]?4b", (34, 2560, 8, 4, "10240", 262_144, None, None)),
    (r"gemma[- _]?3[- _]?12b", (48, 3840, 16, 8, "15360", 262_144, None, None)),
    (r"gemma[- _]?3[- _]?27b", (62, 5376, 32, 16, "21504", 262_144, None, None)),
    (r"gemma[- _]?4[- _]?26b", (30, 2816, 16, 8, "704 expert", 262_144, "128+1 shared", 8)),
    (r"gemma[- _]?4[- _]?31b", (60, 5376, 32, 16, "21504", 262_144, None, None)),
    (r"gpt-?2[- _]?(?:1\.5b|1558m)", (48, 1600, 25, 25, "6400", 50_257, None, None)),
    (r"gpt-?2[- _]?(?:774m|762m)", (36, 1280, 20, 20, "5120", 50_257, None, None)),
    (r"gpt-?2[- _]?(?:355m|350m|345m)", (24, 1024, 16, 16, "4096", 50_257, None, None)),
    (r"gpt-?2(?:[- _]?(?:small|124m|117m|base))?$", (12, 768, 12, 12, "3072", 50_257, None, None)),
    (r"gpt-?2[- _]?xl", (48, 1600, 25, 25, "6400", 50_257, None, None)),
    (r"gpt-?2[- _]?large", (36, 1280, 20, 20, "5120", 50_257, None, None)),
    (r"gpt-?2[- _]?medium", (24, 1024, 16, 16, "4096", 50_257, None, None)),
    (r"gpt[- _]?3?[- _]?5b\b", (24, 4096, 32, 32, "16384", 51_200, None, None)),
    (r"gpt[- _]?3[- _]?125m\b", (12, 768, 12, 12, "3072", 51_200, None, None)),
    (r"gpt[- _]?3[- _]?350m\b", (24, 1024, 16, 16, "4096", 51_200, None, None)),
    (r"gpt[- _]?3[- _]?760m\b", (24, 1536, 16, 16, "6144", 51_200, None, None)),
    (r"gpt[- _]?3[- _]?1\.3b\b", (24, 2048, 16, 16, "8192", 51_200, None, None)),
    (r"gpt[- _]?3[- _]?2\.7b\b", (32, 2560, 32, 32, "10240", 51_200, None, None)),
    (r"gpt[- _]?3[- _]?6\.7b\b", (32, 4096, 32, 32, "16384", 51_200, None, None)),
    (r"gpt[- _]?3[- _]?13b\b", (40, 5120, 40, 40, "20480", 51_200, None, None)),
    (r"gpt[- _]?3[- _]?20b\b", (44, 6144, 48, 48, "24576", 51_200, None, None)),
    (r"gpt[- _]?3[- _]?175b", (96, 12288, 96, 96, "49152", 51_200, None, None)),
    (r"gpt[- _]?neox[- _]?20b", (44, 6144, 64, 64, "24576", 50_432, None, None)),
    (r"gpt[- _]?j\b", (28, 4096, 16, 16, "16384", 50_400, None, None)),
    (
        r"(?:mt[- _]?nlg|megatron[- _]?turing|turing[- _]?nlg).*530b",
        (105, 20480, 128, 128, "81920", 51_200, None, None),
    ),
    (r"turing[- _]?nlg", (78, 4256, 28, 28, "17024", 51_200, None, None)),
    (r"palm[- _]?8b", (32, 4096, 16, 1, "16384", 256_000, None, None)),
    (r"palm[- _]?62b", (64, 8192, 32, 1, "32768", 256_000, None, None)),
    (r"phi[- _]?1\.5", (24, 2048, 32, 32, "8192", 51_200, None, None)),
    (r"phi[- _]?2\b", (32, 2560, 32, 32, "10240", 51_200, None, None)),
    (r"phi[- _]?3[- _]?mini", (32, 3072, 32, 32, "8192", 32_064, None, None)),
    (r"phi[- _]?3[- _]?medium", (40, 5120, 40, 10, "17920", 32_064, None, None)),
    (r"phi[- _]?4\b", (40, 5120, 40, 10, "17920", 100_352, None, None)),
    (r"falcon[- _]?7b", (32, 4544, 71, 1, "18176", 65_024, None, None)),
    (r"falcon[- _]?40b", (60, 8192, 128, 8, "32768", 65_024, None, None)),
    (r"falcon[- _]?180b", (80, 14848, 232, 8, "59392", 65_024, None, None)),
    (r"mpt[- _]?7b", (32, 4096, 32, 32, "16384", 50_432, None, None)),
    (r"mpt[- _]?30b", (48, 7168, 64, 64, "28672", 50_432, None, None)),
    (r"opt[- _]?125m", (12, 768, 12, 12, "3072", 50_272, None, None)),
    (r"opt[- _]?1\.3b", (24, 2048, 32, 32, "8192", 50_272, None, None)),
    (r"opt[- _]?2\.7b", (32, 2560, 32, 32, "10240", 50_272, None, None)),
    (r"opt[- _]?6\.7b", (32, 4096, 32, 32, "16384", 50_272, None, None)),
    (r"opt[- _]?13b", (40, 5120, 40, 40, "20480", 50_272, None, None)),
    (r"opt[- _]?30b", (48, 7168, 56, 56, "28672", 50_272, None, None)),
    (r"opt[- _]?66b", (64, 9216, 72, 72, "36864", 50_272, None, None)),
    (r"opt[- _]?175b", (96, 12288, 96, 96, "49152", 50_272, None, None)),
    (r"bloom[- _]?560m", (24, 1024, 16, 16, "4096", 250_880, None, None)),
    (r"bloom[- _]?1b7", (24, 2048, 16, 16, "8192", 250_880, None, None)),
    (r"bloom[- _]?3b", (30, 2560, 32, 32, "10240", 250_880, None, None)),
    (r"bloom[- _]?7b", (30, 4096, 32, 32, "16384", 250_880, None, None)),
    (r"bloom(?:[- _]?176b)?$", (70, 14336, 112, 112, "57344", 250_880, None, None)),
    (r"pythia[- _]?160m", (12, 768, 12, 12, "3072", 50_304, None, None)),
    (r"pythia[- _]?410m", (24, 1024, 16, 16, "4096", 50_304, None, None)),
    (r"pythia[- _]?1b", (16, 2048, 8, 8, "8192", 50_304, None, None)),
    (r"pythia[- _]?1\.4b", (24, 2048, 16, 16, "8192", 50_304, None, None)),
    (r"pythia[- _]?2\.8b", (32, 2560, 32, 32, "10240", 50_304, None, None)),
    (r"pythia[- _]?6\.9b", (32, 4096, 32, 32, "16384", 50_432, None, None)),
    (r"pythia[- _]?12b", (36, 5120, 40, 40, "20480", 50_688, None, None)),
    (r"olmo[- _]?2[- _]7b", (32, 4096, 32, 32, "11008", 100_352, None, None)),
    (r"olmo[- _]?2[- _]13b", (40, 5120, 40, 40, "13824", 100_352, None, None)),
    (r"olmo[- _]?2[- _]32b", (64, 5120, 40, 8, "27648", 100_352, None, None)),
    (r"olmo[- _]?1b", (16, 2048, 16, 16, "8192", 50_304, None, None)),
    (r"olmo[- _]?7b", (32, 4096, 32, 32, "11008", 50_304, None, None)),
    (r"smollm\d?[- _]?135m", (30, 576, 9, 3, "1536", 49_152, None, None)),
    (r"smollm\d?[- _]?360m", (32, 960, 15, 5, "2560", 49_152, None, None)),
    (r"smollm\d?[- _]?1\.7b", (24, 2048, 32, 32, "8192", 49_152, None, None)),
    (r"starcoder[- _]?2[- _]3b", (30, 3072, 24, 2, "12288", 49_152, None, None)),
    (r"starcoder[- _]?2[- _]7b", (32, 4608, 36, 4, "18432", 49_152, None, None)),
    (r"starcoder[- _]?2[- _]15b", (40, 6144, 48, 4, "24576", 49_152, None, None)),
    (r"starcoder(?:base)?(?:[- _]?15b)?$", (40, 6144, 48, 1, "24576", 49_152, None, None)),
    (r"\byi[- _]?6b", (32, 4096, 32, 4, "11008", 64_000, None, None)),
    (r"\byi[- _]?34b", (60, 7168, 56, 8, "20480", 64_000, None, None)),
    (r"internlm[- _]?2(?:\.5)?[- _]7b", (32, 4096, 32, 8, "14336", 92_544, None, None)),
    (r"internlm[- _]?2(?:\.5)?[- _]20b", (48, 6144, 48, 8, "16384", 92_544, None, None)),
    (r"internlm[- _]?7b", (32, 4096, 32, 32, "11008", 103_168, None, None)),
    (r"internlm[- _]?20b", (60, 5120, 40, 40, "13824", 103_168, None, None)),
    (r"baichuan[- _]?2[- _]7b", (32, 4096, 32, 32, "11008", 125_696, None, None)),
    (r"baichuan[- _]?2[- _]13b", (40, 5120, 40, 40, "13696", 125_696, None, None)),
    (r"chatglm[23][- _]?6b", (28, 4096, 32, 2, "13696", 65_024, None, None)),
    (r"glm[- _]?4[- _]9b", (40, 4096, 32, 2, "13696", 151_552, None, None)),
    (r"bert[- _]?base", (12, 768, 12, 12, "3072", 30_522, None, None)),
    (r"bert[- _]?large", (24, 1024, 16, 16, "4096", 30_522, None, None)),
)
"""(pattern of names, layers, hidden, heads, kv heads, feed-forward, vocabulary, experts, experts a token) of the
models' own config.json on Hugging Face; Gemma: models.sizes; GPT-3: Brown et al. 2020, 5B and 20B as NeMo trains them
(NVIDIA/NeMo-Framework-Launcher launcher_scripts/conf/training/gpt3), 1.3B with Megatron-LM's 16 heads; Llama 2 34B:
fms-fsdp's config_utils.py; Turing-NLG, MT-NLG and PaLM: their papers (arXiv 1910.02054, 2201.11990, 2204.02311)."""

FIELDS = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "experts", "topk")

MAXTEXT = r"maxtext[- _]\d+b"
"""Names of the models of MaxText's own pages, which are nothing but a number of parameters."""
MAXTEXT_ROWS = 32_000
"""vocab_size of MaxText's src/MaxText/configs/base.yml (read 2026-11-22), as are the next two."""
MAXTEXT_SEQ = 2048
"""max_target_length."""
MAXTEXT_BASE = {"hidden": 2048, "heads": 16, "ffn": 7168, "layers": 16}
"""base_emb_dim, base_num_query_heads, base_mlp_dim, base_num_decoder_layers; head_dim is 128 at every scale."""


def with_sizes(row: Row) -> tuple[Row, tuple[str, ...]]:
    """The row with the sizes that follow, and how."""
    if re.search("maxtext", row.framework.lower()):
        row, notes = _maxtext(row)
    else:
        notes = ()
    match = next((values for pattern, values in KNOWN if re.search(pattern, row.model.lower())), None)
    if match is not None and row.hidden in (None, match[1]) and row.layers in (None, match[0]):
        known = dict(zip(FIELDS, match, strict=True))
        if row.hidden is not None:  # of vocabularies, what the program pads or replaces goes first
            known.pop("vocab")
        filled = _filled(row, known)
        if filled != row:
            given = (
                "sizes" if row.hidden is None else ", ".join(n for n in FIELDS if getattr(filled, n) != getattr(row, n))
            )
            row, notes = filled, (*notes, f"{given} not in the row: those of {row.model}'s own config")
    return _implied(row, notes)


def _filled(row: Row, values: dict[str, Any]) -> Row:
    """The row with those of the values that it leaves out."""
    given: dict[str, Any] = {
        name: str(value) if name == "kv_heads" else value
        for name, value in values.items()
        if value is not None and getattr(row, name) is None
    }
    return replace(row, **given)


def _maxtext(row: Row) -> tuple[Row, tuple[str, ...]]:
    """MaxText's defaults, and its one scale: steps of two go to heads and feed-forward, then to the width, then to the
    number of layers (src/MaxText/configs/types.py get_individual_scales, read 2026-11-22)."""
    row = _filled(row, {"vocab": MAXTEXT_ROWS if re.match(MAXTEXT, row.model.lower()) else None})
    if re.match(MAXTEXT, row.model.lower()) and row.seq_len is None:
        row = replace(row, seq_len=MAXTEXT_SEQ)
    match = re.search(r'"global_parameter_scale": "(\d+)"', row.notes)
    scale = int(match[1]) if match else 0
    if scale < 1 or scale & (scale - 1) or row.layers is not None:
        return row, ()
    whole, rest = divmod(scale.bit_length() - 1, 3)
    steps = {"heads": whole + (rest > 0), "ffn": whole + (rest > 0), "hidden": whole + (rest > 1), "layers": whole}
    sizes: dict[str, Any] = {name: MAXTEXT_BASE[name] << step for name, step in steps.items()}
    sizes |= {"kv_heads": sizes["heads"], "ffn": str(sizes["ffn"])}
    return _filled(row, sizes), (f"sizes of MaxText at scale {scale}",)


def _implied(row: Row, notes: tuple[str, ...]) -> tuple[Row, tuple[str, ...]]:
    """The feed-forward of a dense model: four times the width, as GPT has it (Radford et al. 2019, Brown et al. 2020),
    of one that is called after Llama and its kin 8/3 of it in whole 256 (Touvron et al. 2023); heads of 128, or of 64
    where the model is narrow (Brown et al. 2020, table 2.1)."""
    if row.hidden is None:
        return row, notes
    if row.ffn is None and row.experts is None and row.arch != "moe":
        gated = re.search(LLAMAS, row.model.lower()) is not None
        width = -(-8 * row.hidden // 3 // 256) * 256 if gated else 4 * row.hidden
        row = replace(row, ffn=str(width))
        notes = (*notes, f"feed-forward not in the row: {'8/3 of' if gated else 'four times'} the width")
    width = 128 if (hidden := row.hidden or 0) >= 2048 else 64
    keys = int(row.kv_heads) if row.kv_heads is not None and row.kv_heads.isdigit() else 1
    if row.heads is None and hidden // width % keys and hidden % keys == 0:
        width = hidden // keys  # every head has keys of its own
    if row.heads is None and hidden % width == 0:
        row = replace(row, heads=hidden // width)
        notes = (*notes, f"heads not in the row: taken as {width} wide")
    return row, notes


LLAMAS = r"llama|mistral|qwen|yi\b|internlm|baichuan|deepseek|olmo|vicuna|alpaca"
