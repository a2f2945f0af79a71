"""The tokenizer that a GGUF file describes, as the text of a tokenizer.json: `tokenizer_json(file)`.

Byte-level BPE (`tokenizer.ggml.model` gpt2, cut into words as `tokenizer.ggml.pre` says) and SentencePiece's BPE
(llama), whose merges follow from the scores of its tokens. `special_tokens(file)` names what begins and ends a text,
and `chat_template(file)` is the file's own. Ways of cutting that are not in SPLITS are refused by name: other pieces
would be other tokens. Pure: no tokenizer is run here. Leaves out unigrams (T5), WordPiece (BERT) and Gemma's
SentencePiece.
Source: llama.cpp, docs of gguf and llama-vocab.cpp (which expressions a `pre` stands for, and where BOS is added).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gnomon.errors import InputError
from gnomon.formats.gguf import Gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of tokens."""
ENGLISH = r"'s|'t|'re|'ve|'m|'ll|'d"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SLASH_TAIL = TAIL.replace(r"[\r\n]*", r"[\r\n/]*")
LLAMA_3 = rf"(?i:{ENGLISH})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{TAIL}"
QWEN_2 = rf"(?i:{ENGLISH})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{TAIL}"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+{{0}}|[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*{{0}}"
TEKKEN = CASED.replace("{0}", "") + r"|\p{N}" + SLASH_TAIL
GPT_4O = CASED.replace("{0}", f"(?i:{ENGLISH})?") + r"|\p{N}{1,3}" + SLASH_TAIL
GPT_2, DIGITS = "GPT-2", "digits"
"""Expressions of the tokenizers package's own: GPT-2's, and the same with each digit alone."""
# Names and expressions as in llama.cpp's llama-vocab.cpp (llm_tokenizer_bpe), written for the tokenizers package's
# Oniguruma.
SPLITS: Mapping[str, str] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "dbrx", "smaug-bpe", "pixtral", "lfm2"), LLAMA_3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), QWEN_2),
    **dict.fromkeys(("gpt-4o", "llama4"), GPT_4O),
    "tekken": TEKKEN,
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jina-es", "jina-de", "roberta-bpe"), GPT_2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), DIGITS),
}
"""`tokenizer.ggml.pre` -> what texts are cut by before merges."""
WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "tekken")
"""Those that take a word which is a token as it is, before they merge, and that begin with BOS where the file does not
say."""
SPACE = "\u2581"
INSTEAD = "put the model's tokenizer.json beside the file, or name one with --tokenizer"


def tokenizer_json(file: Gguf) -> str | None:
    """None where the file has no vocabulary (`no_vocab`). InputError for a tokenizer that is not read or is damaged."""
    metadata, kind = file.metadata, file.metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return None
    # `bert`, `t5`, `rwkv`, `plamo2` cut texts in ways of their own.
    if kind not in ("gpt2", "llama"):
        raise InputError(f"{file.path} has a tokenizer of the kind {kind!r}; gpt2 and llama are read: {INSTEAD}")
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(one, str) for one in tokens):
        raise InputError(
            f"{file.path} has a tokenizer without tokenizer.ggml.tokens; fetch the file again, or {INSTEAD}"
        )
    if types is not None and (not isinstance(types, list) or len(types) != len(tokens)):
        raise InputError(
            f"{file.path}: tokenizer.ggml.token_type does not say a type of each of {len(tokens):,} tokens"
        )
    tokenizer = _byte_level(file, tokens) if kind == "gpt2" else _sentencepiece(file, tokens)
    # Added tokens are matched before anything is cut: control tokens must not be merged from parts of a user's text.
    tokenizer["added_tokens"] = [
        {
            "id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": what != USER_DEFINED,
        }
        for number, (token, what) in enumerate(zip(tokens, types or (), strict=False))
        if what in (CONTROL, USER_DEFINED) or (what == UNKNOWN and kind == "llama")
    ]  # fmt: skip
    tokenizer["post_processor"] = _around(file, tokens)
    return json.dumps({"version": "1.0", "truncation": None, "padding": None, **tokenizer}, ensure_ascii=False)


def special_tokens(file: Gguf) -> dict[str, str]:
    """What tokenizer_config.json says of a tokenizer: bos_token, eos_token …"""
    tokens, out = file.metadata.get("tokenizer.ggml.tokens", []), {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            out[f"{name}_token"] = str(tokens[number])
    return out


def ends(file: Gguf) -> list[int]:
    """Tokens after which an answer is over: of a text, of a turn, of a message."""
    found = (file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    return sorted({one for one in found if isinstance(one, int)})


def chat_template(file: Gguf) -> str | None:
    template = file.metadata.get("tokenizer.chat_template")
    return template if isinstance(template, str) and template else None


def _model(tokens: Sequence[str], merges: Sequence[tuple[str, str]], **options: Any) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": {token: number for number, token in enumerate(tokens)}, "merges": [list(one) for one in merges],
        **options,
    }  # fmt: skip


def _byte_level(file: Gguf, tokens: Sequence[str]) -> dict[str, Any]:
    merges_value, pre = file.metadata.get("tokenizer.ggml.merges"), str(file.metadata.get("tokenizer.ggml.pre"))
    if not isinstance(merges_value, list) or not all(
        isinstance(one, str) and one.count(" ") == 1 for one in merges_value
    ):
        raise InputError(f"{file.path} has a tokenizer of gpt2's kind without tokenizer.ggml.merges; {INSTEAD}")
    known = set(tokens)
    merges = [(left_part, right) for left_part, _, right in (one.partition(" ") for one in merges_value)]
    # The tokenizers package refuses such a merge too, but names no file.
    if odd := next((one for one in merges if not {*one, "".join(one)} <= known), None):
        raise InputError(f"{file.path}: tokenizer.ggml.merges has {' '.join(odd)!r}, whose tokens it does not have")
    if pre not in SPLITS:
        raise InputError(
            f"{file.path} cuts texts into words as {pre!r} (tokenizer.ggml.pre), which is not known here; "
            f"{', '.join(SPLITS)} are: {INSTEAD}"
        )
    by = SPLITS[pre]
    # Where the expression stands in front of it, ByteLevel must not cut by GPT-2's once more.
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": by in (GPT_2, DIGITS)}
    cut: dict[str, Any] = {"type": "Split", "pattern": {"Regex": by}, "behavior": "Isolated", "invert": False}
    if by == DIGITS:
        cut = {"type": "Digits", "individual_digits": True}
    return {
        "normalizer": None,
        "pre_tokenizer": level if by == GPT_2 else {"type": "Sequence", "pretokenizers": [cut, level]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        # Llama 3 has tokens that its own merges do not reach; llama.cpp takes a whole word first (ignore_merges).
        "model": _model(tokens, merges, ignore_merges=pre in WHOLE_WORDS),
    }


def _sentencepiece(file: Gguf, tokens: Sequence[str]) -> dict[str, Any]:
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise InputError(f"{file.path} has a tokenizer of llama's kind without a score of each token; {INSTEAD}")
    if file.metadata.get("general.architecture", "").startswith(("gemma", "phi3")):
        raise InputError(f"{file.path} is of a model whose SentencePiece is not read; {INSTEAD}")
    # Llama 2 puts a space before a text, so that its first word is the token it is elsewhere.
    prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    ]  # fmt: skip
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first" if prefix else "never",
            "split": False,
        },
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _model(tokens, _merges(tokens, scores), fuse_unk=True, byte_fallback=True),
    }  # fmt: skip


def _merges(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Two tokens that are one, those of the highest score first, as SentencePiece merges them."""
    # A GGUF file has scores and no merges; each pair of known parts whose whole is known is one, as transformers'
    # SentencePieceExtractor makes them.
    known = {token: number for number, token in enumerate(tokens)}
    found = []
    for token, number in known.items():
        for at in range(1, len(token)):
            left_part, right = token[:at], token[at:]
            if left_part in known and right in known:
                found.append((scores[number], len(left_part), number, left_part, right))
    # Stable: equal scores stay in the order of tokens.
    found.sort(key=lambda one: (-one[0], -one[1]))
    return [(left_part, right) for _, _, _, left_part, right in found]


def _around(file: Gguf, tokens: Sequence[str]) -> dict[str, Any]:
    """What is put before and after a text."""
    metadata, sentencepiece = file.metadata, file.metadata["tokenizer.ggml.model"] == "llama"
    # llama.cpp's defaults for files that leave add_bos_token out.
    by_default = sentencepiece or metadata.get("tokenizer.ggml.pre") in WHOLE_WORDS
    special: dict[str, Any] = {}

    def there(name: str, default: bool) -> list[dict[str, Any]]:
        number = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if not metadata.get(f"tokenizer.ggml.add_{name}_token", default) or number is None:
            return []
        if not isinstance(number, int) or not 0 <= number < len(tokens):
            raise InputError(
                f"{file.path}: tokenizer.ggml.{name}_token_id {number!r} is none of {len(tokens):,} tokens"
            )
        token = tokens[number]
        special[token] = {"id": token, "ids": [number], "tokens": [token]}
        return [{"SpecialToken": {"id": token, "type_id": 0}}]

    first, last = there("bos", by_default), there("eos", False)
    one, two = ({"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing", "single": [*first, one, *last], "pair": [*first, one, *last, *first, two, *last],
        "special_tokens": special,
    }  # fmt: skip
