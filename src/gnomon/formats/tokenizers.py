"""How many tokens a tokenizer has that everybody downloads, by its name: the rows of an embedding before padding.

`rows_of(name)` takes a hub id, a path to the tokenizer's folder or file, or a name of tiktoken. `rows_of_type(kind)` is
for Megatron-LM's classes of tokenizers whose vocabulary is one file for everybody. Counts are `len(tokenizer)` of the
published files, which may be fewer than the rows of the model's own embedding. Leaves out tokenizers that somebody has
trained, and padding (each program's reader).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

BERT_CASED, BERT_UNCASED = 28_996, 30_522
GPT2 = 50_257

TYPES: Mapping[str, int] = {
    "GPT2BPETokenizer": GPT2,
    "BertWordPieceLowerCase": BERT_UNCASED + 2,
    "BertWordPieceCase": BERT_CASED + 2,
    "Llama2Tokenizer": 32_000,
    "Llama3Tokenizer": 128_256,
    "MistralTokenizer": 32_000,
    "TikTokenizer": 131_072,
}
"""Megatron-LM's --tokenizer-type -> its tokens: GPT-2's merges; BERT's files of the large models with [BOS] and [EOS],
which it adds; what CustomTikTokenizer takes without --vocab-size (DEFAULT_TIKTOKEN_MAX_VOCAB, 2^17)
(megatron/training/tokenizer/tokenizer.py, 00ee966)."""

NAMED: tuple[tuple[str, int], ...] = (
    (r"o200k|gpt-?oss", 200_019),
    (r"cl100k|gpt-?4\b|gpt-?3\.5", 100_277),
    (r"p50k", 50_281),
    (r"r50k|(^|/)gpt-?2|gpt2", GPT2),
    (r"llama-?3", 128_256),
    (r"code-?llama", 32_016),
    (r"qwen-?3(?!\.)", 151_669),
    (r"qwen-?2\.?5?|qwq", 151_665),
    (r"qwen-?1\.?5|qwen-", 151_646),
    (r"deepseek-?v[23]\.?\d?|deepseek-?r1(?!-distill)", 128_815),
    (r"deepseek.*(llm|67b|7b-base)|deepseek-v2", 100_002),
    (r"mistral.*v0\.3|mixtral-8x22b", 32_768),
    (r"mistral-nemo|tekken", 131_072),
    (r"mi[sx]tral|llama|tinyllama|vicuna|alpaca", 32_000),
    (r"gemma-?3", 262_145),
    (r"gemma", 256_000),
    (r"neox|pythia|20b_tokenizer|\bmpt\b|olmo-?1", 50_277),
    (r"olmo-?2|dolma2", 100_278),
    (r"phi-?3", 32_011),
    (r"phi-?4", 100_352),
    (r"phi-", 50_295),
    (r"starcoder|santacoder|smollm", 49_152),
    (r"falcon-?3", 131_072),
    (r"falcon", 65_024),
    (r"bloom", 250_680),
    (r"yi-", 64_000),
    (r"baichuan-?2|baichuan2", 125_696),
    (r"baichuan", 64_000),
    (r"internlm-?2", 92_544),
    (r"nemotron-?3|nemotron-h", 131_072),
    (r"xlm-?r|xlm-roberta", 250_002),
    (r"roberta", 50_265),
    (r"bert.*uncased", BERT_UNCASED),
    (r"bert.*cased", BERT_CASED),
    (r"mt5|umt5", 250_100),
    (r"(flan-)?t5", 32_100),
)
"""Pattern in a name, small letters, the first that is found -> its tokens."""


def rows_of(name: str) -> int | None:
    """Tokens of the tokenizer that a name means; None where none is known."""
    plain = "/".join(name.rstrip("/").lower().replace("_", "-").split("/")[-3:])
    return next((rows for pattern, rows in NAMED if re.search(pattern.replace("_", "-"), plain)), None)


def rows_of_type(kind: str) -> int | None:
    """Tokens of Megatron-LM's tokenizers whose file is the same for everybody; None for those whose file decides."""
    return TYPES.get(kind)
