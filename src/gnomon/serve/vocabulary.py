"""Text and conversations as tokens and back, as a folder's own files say: `Vocabulary.open(folder, tokenizer)`.

Tokens that end an answer are those that generation_config.json and config.json name beside the tokenizer's. The chat
template is the folder's; none that a request bears is ever read. Leaves out models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gnomon.errors import InputError
from gnomon.runtime.data.encode import Encoder

OWN = frozenset("messages tools add_generation_prompt bos_token eos_token unk_token pad_token opens".split())
"""Variables of a template that are told in other ways."""
BROKEN = "\ufffd"
"""What bytes that are no whole letter decode to."""
SHORT = 1 << 16
"""Letters of a text that is split into tokens whatever their number may be."""


def _byte_level() -> dict[str, int]:
    """Letters of byte-level pieces -> the byte that each stands for (GPT-2): printable ones of Latin-1 for themselves,
    the others in their order from letter 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}


BYTE_LEVEL = _byte_level()


class Vocabulary:
    """The vocabulary of a model that is served."""

    def __init__(self, encoder: Encoder, ends: frozenset[int]) -> None:
        """Takes ends, the tokens after which an answer is over."""
        self.encoder, self.ends = encoder, ends
        self.whole = False
        """Whether a prompt is a text of its own, which an answer does not go on from: of an encoder with a decoder."""
        self.vocab_size = encoder.vocab_size
        self.longest = 1 if encoder.tokenizer is None else max(map(len, encoder.tokenizer.get_vocab()))
        """Letters of the longest token, or more."""

    @staticmethod
    def open(folder: Path, tokenizer: Path | None) -> Vocabulary:
        """Opens a vocabulary. tokenizer: its file or folder; None: that in the model's folder, or bytes where there is
        none."""
        base = folder if folder.is_dir() else folder.parent
        if tokenizer is not None and not (tokenizer.is_file() or (tokenizer / "tokenizer.json").is_file()):
            raise InputError(f"{tokenizer} has no tokenizer.json; name the file or its folder")
        found = tokenizer or (base if (base / "tokenizer.json").is_file() else None)
        encoder = Encoder.open(found)
        ends = {encoder.end} if encoder.end is not None else set[int]()
        # Without a tokenizer tokens are bytes, and the ids in the model's files are of another vocabulary.
        if encoder.tokenizer is not None:
            for name in ("generation_config.json", "config.json"):
                ends |= _ends(base / name)
        return Vocabulary(encoder, frozenset(ends))

    def check(self, text: str, tokens: int) -> None:
        """InputError for a text that cannot be of so few tokens: splitting megabytes takes seconds."""
        most = max(SHORT, tokens * self.longest)
        if len(text) > most:
            raise InputError(
                f"a prompt of {len(text)} letters is more than the {most} that {tokens} tokens, which the model is "
                f"served with, can have; shorten it"
            )

    def prompt(self, text: str) -> list[int]:
        """Ids of a text, with what the tokenizer puts before it."""
        return self.text(text) if self.whole else self.encoder.prompt(text)

    def text(self, text: str) -> list[int]:
        """Ids of a whole text, with what the tokenizer puts before and after it."""
        if self.encoder.tokenizer is None:
            return list(text.encode())
        return self.encoder.ids(text)

    def pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Ids of two texts as one, and of which of them each is: 0 or 1."""
        if self.encoder.tokenizer is None:
            ids, second_ids = list(first.encode()), list(second.encode())
            return ids + second_ids, [0] * len(ids) + [1] * len(second_ids)
        both = self.encoder.tokenizer.encode(first, second)
        return list(both.ids), list(both.type_ids)

    def conversation(self, text: str) -> list[int]:
        """Ids of what a chat template wrote, which has its special tokens."""
        if self.encoder.tokenizer is None:
            return list(text.encode())
        # With the tokenizer's own special tokens there would be two at the beginning: the template has written its own.
        return self.encoder.ids(text, specials=False)

    def decode(self, ids: Sequence[int], *, specials: bool = False) -> str:
        """Returns the text of ids. specials: with that of special tokens."""
        return self.encoder.decode(ids, specials=specials)

    def raw(self, token: int, text: str) -> bytes:
        """Bytes of a token, which may be a part of a letter: then its text, of the token by itself, does not say them.
        Pieces are spelled as byte-level vocabularies and byte fallback spell them; of any other the text's bytes."""
        if BROKEN not in text:
            return text.encode()
        if self.encoder.tokenizer is None:
            return bytes([token]) if token < 256 else text.encode()
        piece = self.encoder.tokenizer.id_to_token(token) or text
        if fallback := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece):
            return bytes([int(fallback[1], 16)])
        spelled = [BYTE_LEVEL.get(letter, -1) for letter in piece]
        return text.encode() if -1 in spelled else bytes(spelled)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        opens: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """A conversation as the folder's template writes it, up to where the answer begins. opens: whether the turn of
        the answer is begun. variables: of the template; InputError for one that it does not read."""
        chat = self.encoder.chat
        if chat is None:
            raise InputError(
                f"{self.encoder.name} has no chat template, so conversations cannot be written as this model has them; "
                f"ask /v1/completions with a text, or put a chat_template.jinja beside the tokenizer"
            )
        variables_given = dict(variables or {})
        if unread := [name for name in variables_given if name in OWN or name not in chat.reads]:
            raise InputError(f"the chat template of {self.encoder.name} reads no {unread[0][:80]!r}; leave it out")
        return chat.prompt(messages, tools, opens=opens, **variables_given)


def _ends(file: Path) -> set[int]:
    try:
        value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return set()
    # The field is one id, a list of them, or null.
    return {one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int)}
