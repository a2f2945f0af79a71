"""Tokenizers of GGUF files give the tokens that transformers' own reading of the same metadata gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gnomon.errors import InputError
from gnomon.formats.gguf import Gguf
from gnomon.formats.gguf_tokenizer import chat_template, ends, special_tokens, tokenizer_json

TEXTS = (
    "import argparse\n\n  def f(x):\n\treturn 12345.67 # don't", "  naïve café 北京 ٣٤٥ 🙂", "<tool>a<|end|> b", "",
    "   ", "I'LL we've\r\n\r\nA1b2 //x/\n", "lower lowest newer ",
)  # fmt: skip


def letters() -> dict[int, str]:
    """Bytes as GPT-2 spells them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(rest)}


def byte_level(pre: str, **more: Any) -> dict[str, Any]:
    merges = ["l o", "lo w", "e r", "Ġ n", "e w", "low er", "1 2", "12 3", "Ã ©", "' t", "r n", "Ġ Ġ", "t u", "tu rn"]
    tokens = [*letters().values(), *("".join(one.split()) for one in merges), "<|end|>", "<tool>"]
    types = [1] * (len(tokens) - 2) + [3, 4]
    return {
        "general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2, **more,
    }  # fmt: skip


def sentencepiece(**more: Any) -> dict[str, Any]:
    pieces = [
        "\u2581",
        *"abdefgilmnoprstuvwx",
        "lo",
        "low",
        "er",
        "\u2581n",
        "ew",
        "\u2581low",
        "\u2581\u2581",
        "ow",
        "wer",
    ]
    tokens = ["<unk>", "<s>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    scores = [0.0] * 259 + [-float(n) for n in range(len(pieces))]
    return {
        "general.architecture": "llama", "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types, "tokenizer.ggml.scores": scores, "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, **more,
    }  # fmt: skip


def read(metadata: dict[str, Any]) -> Gguf:
    return Gguf(path=Path("m.gguf"), metadata=metadata, entries={})


def theirs(metadata: dict[str, Any]) -> Any:
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    names = mapping.GGUF_TOKENIZER_MAPPING["tokenizer"]
    given = {name: metadata[f"tokenizer.{key}"] for key, name in names.items() if f"tokenizer.{key}" in metadata}
    return mapping.convert_gguf_tokenizer(metadata["general.architecture"], given)[0]


@pytest.mark.parametrize("kind", ["llama-bpe", "qwen2", "gpt-4o", "tekken", "gpt-2", "sentencepiece"])
def test_tokens_are_those_that_transformers_reads(kind: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    metadata = sentencepiece() if kind == "sentencepiece" else byte_level(kind)
    text = tokenizer_json(read(metadata))
    assert text is not None
    ours, other = tokenizers.Tokenizer.from_str(text), theirs(metadata)
    for one in TEXTS:
        ids = ours.encode(one, add_special_tokens=False).ids
        assert ids == other.encode(one, add_special_tokens=False).ids, one
        assert ours.decode(ids) == other.decode(ids)
    assert ours.get_vocab_size() == len(metadata["tokenizer.ggml.tokens"])


def test_digits_stand_alone_where_they_were_learnt_so() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    metadata = byte_level("smollm")
    ours = tokenizers.Tokenizer.from_str(str(tokenizer_json(read(metadata))))
    tokens = metadata["tokenizer.ggml.tokens"]
    assert [tokens[id] for id in ours.encode("123 low").ids] == ["1", "2", "3", "Ġ", "low"]


def test_what_begins_and_ends_a_text_is_put_there() -> None:
    tokenizers = pytest.importorskip("tokenizers")

    def ids(metadata: dict[str, Any]) -> list[int]:
        made: list[int] = tokenizers.Tokenizer.from_str(str(tokenizer_json(read(metadata)))).encode("er").ids
        return made

    plain = sentencepiece()
    assert ids(plain)[0] == 1 and ids({**plain, "tokenizer.ggml.add_bos_token": False})[0] != 1
    assert ids({**plain, "tokenizer.ggml.add_eos_token": True})[-1] == 2
    begins = {"tokenizer.ggml.bos_token_id": 3}
    assert ids(byte_level("llama-bpe", **begins))[0] == 3 and ids(byte_level("qwen2", **begins))[0] != 3
    said = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.chat_template": "{{ messages }}"}
    file = read({**plain, **said})
    assert special_tokens(file) == {"bos_token": "<s>", "eos_token": "<|end|>"}
    assert ends(file) == [2, 7] and chat_template(file) == "{{ messages }}"


def test_what_is_not_read_is_refused_by_name() -> None:
    assert tokenizer_json(read({"tokenizer.ggml.model": "no_vocab"})) is None
    whole = byte_level("qwen2")
    for given, says in (
        ({"tokenizer.ggml.model": "t5"}, "of the kind 't5'; gpt2 and llama are read: put the model's tokenizer.json"),
        ({"tokenizer.ggml.pre": "viking"}, "cuts texts into words as 'viking'"),
        ({"tokenizer.ggml.merges": None}, "without tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["l zz"]}, "has 'l zz', whose tokens it does not have"),
        ({"tokenizer.ggml.tokens": []}, "without tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "does not say a type of each of"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 9999}, "9999 is none of"),
    ):
        with pytest.raises(InputError, match=says):
            tokenizer_json(read({**whole, **given}))
    with pytest.raises(InputError, match="without a score of each token"):
        tokenizer_json(read({**sentencepiece(), "tokenizer.ggml.scores": [1.0]}))
