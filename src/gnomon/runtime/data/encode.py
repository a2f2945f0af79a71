"""Text as token ids, and which of them are to be learnt: bytes, or a tokenizer of Hugging Face with its chat template.

`Encoder.open(path)` reads `tokenizer.json` and, beside it, the names of special tokens and the chat template;
`encode(documents)` yields for each document its ids and, where only a part is to be learnt, a mask. A text has its
end-of-text token after it, a conversation what the template writes. Leaves out tokenizers without `tokenizer.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import InputError
from gnomon.formats.learnt import Learn
from gnomon.runtime.data.chat import ChatTemplate, Spans
from gnomon.runtime.data.documents import Document, unreadable

BYTES = 256
"""Entries of the vocabulary of bytes; 0 is the end of a text."""
TOGETHER = 256
"""Documents that are encoded at once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Encoded:
    """Ids of a document, or of a piece of one."""

    ids: NDArray[np.int64]
    learn: NDArray[np.bool_] | None
    """Of each id whether it is to be predicted; None for all."""
    ends: bool


class Encoder:
    """Bytes, unless a tokenizer is given."""

    def __init__(self) -> None:
        self.tokenizer: Any = None
        self.chat: ChatTemplate | None = None
        self.end: int | None = 0
        self.vocab_size = BYTES
        self.name = "bytes"
        self.identity = "bytes"
        self.notes: tuple[str, ...] = ()
        self.learn: Learn = "answers"

    @staticmethod
    def open(path: Path | None, *, chat_template: Path | None = None, learn: Learn = "answers") -> Encoder:
        """Loads a tokenizer. path: a tokenizer.json or its folder; None for bytes. chat_template: a Jinja file, in
        place of the one next to the tokenizer. InputError for what cannot be read."""
        encoder = Encoder()
        encoder.learn = learn
        if path is None:
            if chat_template is not None:
                raise InputError("a chat template writes special tokens, so it wants a tokenizer too (--tokenizer)")
            return encoder
        file = path / "tokenizer.json" if path.is_dir() else path
        text = _read(file)
        encoder.tokenizer, encoder.name = _tokenizer(text, file), str(file)
        encoder.vocab_size = encoder.tokenizer.get_vocab_size(with_added_tokens=True)
        config = _config(file.parent)
        encoder.end = _end(encoder.tokenizer, config)
        if encoder.end is None:
            encoder.notes = (f"{file} names no end-of-text token, so none stands between texts",)
        template, where = _template(file.parent, config, chat_template)
        encoder.identity = sha256(f"{text}\0{encoder.end}\0{template}".encode()).hexdigest()[:16]
        if template:
            specials = {name: _content(value) for name, value in config.items() if name.endswith("_token")}
            encoder.chat = ChatTemplate(template, specials, where)
        return encoder

    def encode(self, documents: Iterable[Document]) -> Iterator[Encoded]:
        """Encodes documents in their order. InputError for text that is none, or conversations without a template."""
        if self.tokenizer is None:
            yield from map(self._bytes, documents)
            return
        source, starts = iter(documents), True
        while block := list(islice(source, TOGETHER)):
            plain = [(number, document) for number, document in enumerate(block) if not document.messages]
            encoded = dict(zip((number for number, _ in plain), self._texts(plain, starts=starts), strict=True))
            for number, document in enumerate(block):
                yield encoded[number] if number in encoded else self._conversation(document)
            # The next block begins a document only if this one's last is complete.
            starts = block[-1].ends

    def _bytes(self, document: Document) -> Encoded:
        if document.messages:
            raise InputError(f"{document.where}: a conversation wants a tokenizer with a chat template (--tokenizer)")
        prompt, completion = document.text, document.completion or b""
        raw = prompt + completion + (b"\0" if document.ends else b"")
        learn = None
        if document.completion is not None and self.learn != "all":
            learn = np.arange(len(raw)) >= len(prompt)
        return Encoded(ids=np.frombuffer(raw, np.uint8).astype(np.int64), learn=learn, ends=document.ends)

    def _texts(self, documents: Sequence[tuple[int, Document]], *, starts: bool) -> Iterator[Encoded]:
        """Special tokens of the tokenizer stand at the beginning of a document only."""
        texts = [_utf8(document, document.text) for _, document in documents]
        rests = [
            None if document.completion is None else _utf8(document, document.completion) for _, document in documents
        ]
        # Encoded together, as the model will meet them: a token may lie across the border, and is then learnt, since it
        # has a character of the completion.
        whole = [text + (rest or "") for text, rest in zip(texts, rests, strict=True)]
        # A document may come in pieces, also over two calls; only the first piece may get a beginning-of-text token.
        firsts = [starts, *(document.ends for _, document in documents[:-1])][: len(documents)]
        encodings = self.tokenizer.encode_batch(whole, add_special_tokens=True)
        later = [text for text, first in zip(whole, firsts, strict=True) if not first]
        bare = iter(self.tokenizer.encode_batch(later, add_special_tokens=False) if later else ())
        for (_, document), text, rest, first, encoding in zip(documents, texts, rests, firsts, encodings, strict=True):
            encoding = encoding if first else next(bare)
            ids = list(encoding.ids)
            whole_text = rest is None or self.learn == "all"
            learn = None if whole_text else [stop > len(text) for _, stop in encoding.offsets]
            if document.ends and self.end is not None:
                # The tokenizer may have put one there already: a document ends once.
                if ids[-1:] != [self.end]:
                    ids.append(self.end)
                    learn = None if learn is None else [*learn, True]
                elif learn is not None:
                    learn[-1] = True  # put there by the tokenizer, of no character
            mask = None if learn is None else np.asarray(learn, np.bool_)
            yield Encoded(ids=np.asarray(ids, np.int64), learn=mask, ends=document.ends)

    def _conversation(self, document: Document) -> Encoded:
        if self.chat is None:
            raise InputError(
                f"{document.where}: a conversation wants a chat template, and {self.name} has none beside it; give one "
                f"with --chat-template"
            )
        if self.learn == "answers":
            text, spans = self.chat.render(document.messages, document.where)
        else:
            text, spans = self.chat.text(document.messages, document.where), ()
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        learn = _within(encoding.offsets, spans) if self.learn == "answers" else None
        return Encoded(ids=np.asarray(encoding.ids, np.int64), learn=learn, ends=True)

    def ids(self, text: str, *, specials: bool = True) -> list[int]:
        """Encodes a text by the tokenizer. specials: whether with what it puts before and after."""
        # unlike `encode` it lets other threads run meanwhile, and leaves offsets out, which take most of its time
        [encoding] = self.tokenizer.encode_batch_fast([text], add_special_tokens=specials)
        ids: list[int] = encoding.ids
        return ids

    def prompt(self, text: str) -> list[int]:
        """Ids of the beginning of a text."""
        if self.tokenizer is None:
            return list(text.encode())
        ids = self.ids(text)
        # A prompt is to be continued, so an end that the tokenizer puts behind every text has no place in it.
        return ids[:-1] if len(ids) > 1 and ids[-1] == self.end else ids

    def decode(self, ids: Sequence[int], *, specials: bool = False) -> str:
        """Returns the text of ids. specials: with that of special tokens."""
        if self.tokenizer is None:
            return bytes(id for id in ids if id < BYTES).decode("utf-8", "replace")
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=not specials)
        return text


def _within(offsets: Sequence[tuple[int, int]], spans: Spans) -> NDArray[np.bool_]:
    """Whether a token has a character in one of the spans."""
    at = np.asarray(offsets, np.int64).reshape(-1, 2)
    inside = np.zeros(len(at), np.bool_)
    for start, stop in spans:
        inside |= (at[:, 1] > start) & (at[:, 0] < stop)
    return inside


def _utf8(document: Document, text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        line = document.line + text[: error.start].count(b"\n")
        at = document.where if ":" in Path(document.where).name else f"{document.where}:{line}"
        raise InputError(f"{at}: byte {text[error.start]:#04x} is no UTF-8; a tokenizer wants text") from error


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except OSError as error:
        raise unreadable(error) from error
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is damaged: {error}") from error


def _tokenizer(text: str, file: Path) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise InputError("a tokenizer needs the package tokenizers, which is not installed: pip install gnomon[hf]") \
            from error  # fmt: skip
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the package raises nothing narrower
        raise InputError(f"{file} is no tokenizer.json: {str(error)[:200]}") from error


def _config(folder: Path) -> Mapping[str, Any]:
    """Names of special tokens and the chat template, of the files that lie beside a tokenizer."""
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            try:
                value = json.loads(_read(folder / name))
            except ValueError as error:
                raise InputError(f"{folder / name} is damaged: {error}") from error
            if isinstance(value, dict):
                config.update((key, entry) for key, entry in value.items() if entry is not None)
    return config


def _content(token: Any) -> str:
    """A special token is its text, or an object with it."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


def _end(tokenizer: Any, config: Mapping[str, Any]) -> int | None:
    """The end-of-text token that is named, or one by its usual name."""
    names = [_content(config["eos_token"])] if "eos_token" in config else ["<|endoftext|>", "</s>", "<|end_of_text|>"]
    ids = (tokenizer.token_to_id(name) for name in names)
    return next((id for id in ids if id is not None), None)


def _template(folder: Path, config: Mapping[str, Any], template_path: Path | None) -> tuple[str, str]:
    """(chat template, where it is from); empty for none."""
    if template_path is not None:
        return _read(template_path), str(template_path)
    if (folder / "chat_template.jinja").is_file():
        return _read(folder / "chat_template.jinja"), str(folder / "chat_template.jinja")
    named = config.get("chat_template", "")
    if isinstance(named, list):  # several by name
        named = next((template.get("template", "") for template in named if template.get("name") == "default"), "")
    return str(named), str(folder / "tokenizer_config.json")
