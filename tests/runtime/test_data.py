"""Corpora: every format gives the same documents, a batch follows from seed and step, damage is named with its line."""

from __future__ import annotations

import gzip
import json
import re
import struct
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")
tokenizers = pytest.importorskip("tokenizers")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

from gnomon.cli import main  # noqa: E402
from gnomon.errors import FormatError, GnomonError, InputError  # noqa: E402
from gnomon.plans import Lengths, Workload  # noqa: E402
from gnomon.runtime.data import Corpus, Encoder, Source, Tokens, Writer  # noqa: E402
from gnomon.runtime.data import documents as documents_  # noqa: E402
from gnomon.runtime.data.corpus import NOTHING, TRAINING, VALIDATION, Side, _packed  # noqa: E402
from gnomon.runtime.data.sequences import SequenceBatches  # noqa: E402

pytestmark = pytest.mark.torch

TEXTS = [f"document {i}: " + "the quick brown fox, and again. " * (1 + i % 5) for i in range(60)]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}[{{ m.role }}] {% if m.role == 'assistant' %}{% generation %}{{ m.content }}."
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %} {% endfor %}"
)
CHAT = [
    {"role": "user", "content": "the fox?"},
    {"role": "assistant", "content": "quick and brown"},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "the fox again"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BPE of its own, with ChatML's special tokens, in a folder as models have them."""
    folder = tmp_path_factory.mktemp("tokenizer")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS, trainer)
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": {"content": "<|endoftext|>"}, "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def source(path: Path, folder: Path, **more: Any) -> Source:
    return Source(path=path, cache=folder / "cache", **more)


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts_of(corpus: Corpus, encoder: Encoder) -> Counter[str]:
    """Documents of both sides, without their end."""
    return Counter(
        encoder.decode(corpus.ids[start : start + length - 1].tolist())
        for side in (corpus.training, corpus.validation)
        for start, length in zip(side.starts, side.lengths, strict=True)
    )


def test_every_format_holds_the_same_documents(tmp_path: Path, tokenizer: Path) -> None:
    rows = [{"text": text, "id": i} for i, text in enumerate(TEXTS)]
    (tmp_path / "text").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / "text" / f"{i}.txt").write_text(text)
    jsonl(tmp_path / "corpus.jsonl", rows)
    with gzip.open(tmp_path / "corpus.jsonl.gz", "wt") as out:
        out.write((tmp_path / "corpus.jsonl").read_text())
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "corpus.parquet", row_group_size=7)
    saved = tmp_path / "saved" / "train"
    saved.mkdir(parents=True)
    with pyarrow.OSFile(str(saved / "data-00000-of-00001.arrow"), "wb") as file:
        with pyarrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=9)
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (saved.parent / "dataset_dict.json").write_text(json.dumps({"splits": ["test", "train"]}))
    encoder = Encoder.open(tokenizer)
    for name in ("text", "corpus.jsonl", "corpus.jsonl.gz", "corpus.parquet", "saved"):
        corpus = Corpus.open(source(tmp_path / name, tmp_path, tokenizer=tokenizer))
        assert texts_of(corpus, encoder) == Counter(TEXTS), name
        assert corpus.vocab_size == 400 or corpus.vocab_size == encoder.vocab_size
        if name == "saved":
            assert corpus.notes == (f"split 'train' of {tmp_path / 'saved'} is read, not test",)
    assert texts_of(Corpus.open(source(tmp_path / "text", tmp_path)), Encoder()) == Counter(TEXTS)
    status = main(
        ["data", str(tmp_path / "corpus.jsonl"), "--tokenizer", str(tokenizer), "--seq-len", "16"]
        + ["-o", str(tmp_path / "pair")]
    )
    assert status == 0
    assert texts_of(Corpus.open(Source(path=tmp_path / "pair")), encoder) == Counter(TEXTS)


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_a_batch_follows_from_seed_and_step_alone_and_an_epoch_reads_all(tmp_path: Path, packing: str) -> None:
    path = jsonl(tmp_path / "c.jsonl", [{"text": text} for text in TEXTS])
    given = source(path, tmp_path, packing=packing)
    one, other = Corpus.open(given), Corpus.open(given)
    size = {"sequences": 4, "seq_len": 48}
    late = other.batch(5, seed=1, **size)
    for name, ids in one.batch(5, seed=1, **size).items():
        assert ids.shape == (4, 48) and torch.equal(ids, late[name])
    assert not torch.equal(late["input_ids"], one.batch(6, seed=1, **size)["input_ids"])
    assert not torch.equal(late["input_ids"], one.batch(5, seed=2, **size)["input_ids"])
    halves = [one.batch(step, seed=1, sequences=2, seq_len=48)["input_ids"] for step in (9, 10)]
    assert torch.equal(torch.cat(halves), late["input_ids"]), "rows do not depend on how many make a step"
    rows = len(one.rows(TRAINING, 48))
    epoch = one.batch(1, seed=3, sequences=rows, seq_len=48)
    learnt = int((epoch["labels"] >= 0).sum())
    if packing == "documents":
        assert learnt == one.training.size - len(one.training.starts), "all but the first token of each document"
    else:
        assert learnt == rows * 48 > one.training.size - 1 - 48
    held_out = one.validation_batch(0, sequences=len(one.rows(VALIDATION, 48)), seq_len=48)
    seen = {text for text in TEXTS if text.encode() in bytes(epoch["input_ids"].flatten().tolist())}
    kept = {text for text in TEXTS if text.encode() in bytes(held_out["input_ids"].flatten().tolist())}
    assert not seen & kept


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=60), st.integers(2, 32))
def test_packing_places_every_token_once_and_close(lengths: list[int], seq_len: int) -> None:
    """Best fit decreasing needs no more rows than 11/9 of the least, and one."""
    sizes = np.asarray(lengths, np.int64)
    starts = np.concatenate(([0], np.cumsum(sizes)))[:-1]
    rows = _packed(Side(starts=starts, lengths=sizes), seq_len)
    predicted: list[int] = []
    for row in range(len(rows)):
        pieces = range(int(rows.first[row]), int(rows.first[row + 1]))
        assert sum(int(rows.lengths[p]) - 1 for p in pieces) <= seq_len
        predicted += [int(rows.starts[p]) + k for p in pieces for k in range(1, int(rows.lengths[p]))]
    want = [s + k for s, n in zip(starts.tolist(), lengths, strict=True) for k in range(1, n)]
    assert sorted(predicted) == want
    assert len(rows) <= -(-len(want) // seq_len) * 2 + 1


def test_what_the_assistant_says_is_learnt_and_nothing_else(tmp_path: Path, tokenizer: Path) -> None:
    path = jsonl(tmp_path / "chats.jsonl", [{"messages": CHAT}] * 30)
    (tmp_path / "marked.jinja").write_text(MARKED)
    encoder = Encoder.open(tokenizer)
    for template, want in (
        (None, ["quick and brown<|im_end|>\n", "the fox again<|im_end|>\n"]),
        (tmp_path / "marked.jinja", [" quick and brown.", " the fox again."]),
    ):
        corpus = Corpus.open(source(path, tmp_path, tokenizer=tokenizer, chat_template=template))
        assert corpus.packing == "documents"
        batch = corpus.batch(1, seed=0, sequences=1, seq_len=160)
        labels, ids = batch["labels"][0], batch["input_ids"][0]
        first = labels[batch["documents"][0] == 0]
        runs = "".join(chr(0) if label == NOTHING else chr(1) for label in first.tolist())
        message = [
            encoder.tokenizer.decode(first[run.start() : run.end()].tolist(), skip_special_tokens=False)
            for run in re.finditer("\x01+", runs)
        ]
        assert message == want
        own, after = first[:-1], ids[1 : len(first)]
        assert torch.equal(own[own >= 0], after[own >= 0])
    pairs = jsonl(tmp_path / "pairs.jsonl", [{"prompt": "the fox", "completion": " again."}] * 30)
    corpus = Corpus.open(source(pairs, tmp_path, tokenizer=tokenizer))
    learnt = [int(x) for x in corpus.batch(1, seed=0, sequences=1, seq_len=40)["labels"][0] if x >= 0]
    assert encoder.tokenizer.decode(learnt, skip_special_tokens=False).startswith(" again.<|endoftext|>")


@pytest.mark.parametrize("learn", ["answers", "completions", "all"])
def test_conversations_are_the_tokens_that_transformers_makes(tmp_path: Path, tokenizer: Path, learn: str) -> None:
    """As TRL's SFTTrainer asks for them: with the assistant's mask under assistant_only_loss, else all of them."""
    from transformers import PreTrainedTokenizerFast

    (tmp_path / "marked.jinja").write_text(MARKED)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer / "tokenizer.json"), eos_token="<|endoftext|>")
    theirs.chat_template = MARKED
    path = jsonl(tmp_path / "chats.jsonl", [{"messages": CHAT}, {"messages": CHAT[:2]}])
    encoder = Encoder.open(tokenizer, chat_template=tmp_path / "marked.jinja", learn=learn)  # type: ignore[arg-type]
    for document, messages in zip(documents_.documents(documents_.find(path)), (CHAT, CHAT[:2]), strict=True):
        want = theirs.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        [made] = encoder.encode([document])
        assert made.ids.tolist() == want["input_ids"]
        if learn == "answers":
            assert made.learn is not None and made.learn.tolist() == [bool(x) for x in want["assistant_masks"]]
        else:
            assert made.learn is None


def test_prompts_are_learnt_where_all_is(tmp_path: Path, tokenizer: Path) -> None:
    path = jsonl(tmp_path / "pairs.jsonl", [{"prompt": "the fox", "completion": " again."}])
    for learn, whole in (("answers", False), ("completions", False), ("all", True)):
        for folder in (tokenizer, None):
            encoder = Encoder.open(folder, learn=learn)  # type: ignore[arg-type]
            [made] = encoder.encode(documents_.documents(documents_.find(path)))
            assert (made.learn is None) == whole


GOOD = json.dumps({"text": "good"})
DAMAGED = {
    "not json": (f"{GOOD}\n{{oops\n", r"d\.jsonl:2: no JSON"),
    "no text": (f'{GOOD}\n\n{{"id": 3}}\n', r"d\.jsonl:3: no 'text', 'messages', or 'prompt' and 'completion' in it"),
    "no object": (f"{GOOD}\n[1]\n", r"d\.jsonl:2: a record is an object with a text, not list"),
    "no string": ('{"text": 7}\n', r"d\.jsonl:1: 'text' is int, and text is wanted"),
    "half a pair": ('{"text": "\\ud800"}\n', r"d\.jsonl:1: 'text' has half of a surrogate pair"),
    "no role": ('{"messages": [{"content": "x"}]}\n', r"d\.jsonl:1: message 1 has no role"),
    "cut off": (GOOD + "\n" + GOOD[:-4], r"d\.jsonl:2: no JSON"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_line_is_named(name: str, tmp_path: Path) -> None:
    content, message = DAMAGED[name]
    (tmp_path / "d.jsonl").write_text(content)
    with pytest.raises(InputError, match=message):
        Corpus.open(source(tmp_path / "d.jsonl", tmp_path))
    assert not list((tmp_path / "cache").iterdir()), "nothing half made is left"


def test_other_damage_is_named(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\nfine\nnot \xff fine\n")
    with pytest.raises(InputError, match=r"a\.txt:3: byte 0xff is no UTF-8"):
        Corpus.open(source(tmp_path / "a.txt", tmp_path, tokenizer=tokenizer))
    (tmp_path / "p.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(InputError, match=r"p\.parquet is damaged"):
        Corpus.open(source(tmp_path / "p.parquet", tmp_path))
    jsonl(tmp_path / "x.jsonl", [{"text": "x" * 50}])
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress((tmp_path / "x.jsonl").read_bytes())[:-9])
    with pytest.raises(InputError, match=r"x\.jsonl\.gz is damaged"):
        Corpus.open(source(tmp_path / "x.jsonl.gz", tmp_path))
    chats = jsonl(tmp_path / "chats.jsonl", [{"messages": CHAT}])
    with pytest.raises(InputError, match=r"chats\.jsonl:1: a conversation wants a tokenizer with a chat template"):
        Corpus.open(source(chats, tmp_path))
    (tmp_path / "evil.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InputError, match=r"chats\.jsonl:1: the chat template of .* refuses it: .*unsafe"):
        Corpus.open(source(chats, tmp_path, tokenizer=tokenizer, chat_template=tmp_path / "evil.jinja"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"is no tokenizer\.json"):
        Corpus.open(source(chats, tmp_path, tokenizer=tmp_path / "tokenizer.json"))


def broken(data: bytes, how: Random) -> bytes:
    """Cut off, with other bytes, with more of them, or all others."""
    at = how.randrange(len(data))
    return how.choice(
        (
            data[:at],
            data[:at] + how.randbytes(3) + data[at + 3 :],
            data[:at] + how.randbytes(50) + data[at:],
            how.randbytes(200),
            b"",
        )
    )


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.txt", "x.parquet", "x.bin", "x.idx"])
def test_a_broken_file_is_read_or_is_one_line(name: str, tmp_path: Path) -> None:
    """Never another error, whatever is in it."""
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)
    parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "x.parquet")
    with Writer(tmp_path / "x", np.dtype(np.uint16)) as made:
        for _ in range(9):
            made.add(np.arange(30))
            made.end()
        made.finish()
    (tmp_path / "x.jsonl").write_bytes(lines)
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "x.txt").write_text("".join(TEXTS))
    whole, how = (tmp_path / name).read_bytes(), Random(name)
    read = tmp_path / name.replace(".idx", ".bin")
    for attempt in range(25):
        (tmp_path / name).write_bytes(broken(whole, how))
        try:
            Corpus.open(Source(path=read, cache=tmp_path / f"cache-{attempt}"), lambda line: None).check(8)
        except GnomonError as error:
            assert "\n" not in str(error).strip()


def test_what_lies_beside_the_files_that_are_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    jsonl(tmp_path / "data" / "a.jsonl", [{"text": text} for text in TEXTS])
    (tmp_path / "data" / "README.md").write_text("about it")
    corpus = Corpus.open(source(tmp_path / "data", tmp_path))
    assert corpus.notes == (f"1 text files in {tmp_path / 'data'} are not read beside the jsonl files",)


def test_long_files_are_read_piece_by_piece(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one document, with nothing left out and special tokens at its ends only."""
    (tmp_path / "long.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    want = Corpus.open(source(tmp_path / "long.txt", tmp_path / "one", tokenizer=tokenizer))
    monkeypatch.setattr(documents_, "PIECE_BYTES", 100)
    got = Corpus.open(source(tmp_path / "long.txt", tmp_path / "two", tokenizer=tokenizer))
    assert got.ids.tolist() == want.ids.tolist()
    assert (got.ids == 0).sum() == 1


def test_tokens_are_made_once_and_again_when_a_file_changes(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "c.jsonl", [{"text": text} for text in TEXTS])
    first = Corpus.open(source(path, tmp_path))
    Corpus.open(source(path, tmp_path))
    assert len(list((tmp_path / "cache").iterdir())) == 1
    jsonl(path, [{"text": text} for text in TEXTS[:-1]])
    later = Corpus.open(source(path, tmp_path))
    assert len(list((tmp_path / "cache").iterdir())) == 2
    assert first.identity != later.identity


def test_megatrons_header_is_as_documented_and_damage_is_found(tmp_path: Path) -> None:
    """Magic, version 1, code 8 for uint16, 2 sequences, 3 entries of the table of documents."""
    writer = Writer(tmp_path / "t", np.dtype(np.uint16))
    writer.add([1, 2, 3])
    writer.end()
    writer.add([4000, 5])
    writer.finish()
    raw = (tmp_path / "t.idx").read_bytes()
    assert raw[:9] == b"MMIDIDX\x00\x00"
    assert struct.unpack_from("<QBQQ", raw, 9) == (1, 8, 2, 3)
    assert struct.unpack_from("<2i2q3q", raw, 34) == (3, 2, 0, 6, 0, 1, 2)
    result = Tokens.open(tmp_path / "t")
    assert (result.ids.tolist(), result.starts.tolist(), result.lengths.tolist()) == (
        [1, 2, 3, 4000, 5],
        [0, 3],
        [3, 2],
    )
    for at, value, message in (
        (0, b"X", "is no index of Megatron-LM"),
        (9, b"\x02", "has version 2"),
        (17, b"\x06", "dtype 6"),
        (18, b"\x03", "its header asks for"),
        (34, b"\x04", "sequence 1 begins at byte 6, not 8"),
        (42, b"\x01", "sequence 0 begins at byte 1"),
        (66, b"\x07", "its table of documents does not go from 0 to 2"),
    ):
        (tmp_path / "t.idx").write_bytes(raw[:at] + value + raw[at + 1 :])
        with pytest.raises(FormatError, match=message):
            Tokens.open(tmp_path / "t")
    (tmp_path / "t.idx").write_bytes(raw)
    (tmp_path / "t.bin").write_bytes(b"1234")
    with pytest.raises(FormatError, match="t.bin has 4 bytes, and t.idx says 10"):
        Tokens.open(tmp_path / "t")


def test_a_negative_token_of_megatrons_is_named_with_its_place(tmp_path: Path) -> None:
    with Writer(tmp_path / "text", np.dtype(np.int32)) as writer:
        for ids in ([1, 2, 3], [4, -5, 6]):
            writer.add(ids)
            writer.end()
        writer.finish()
    with pytest.raises(InputError, match=r"text.bin has token -5 at place 4, and token ids count from 0"):
        Corpus.open(Source(path=tmp_path / "text"))


def test_a_single_file_is_divided_and_one_too_short_is_refused(tmp_path: Path) -> None:
    """Its last twentieth is held out."""
    (tmp_path / "input.txt").write_bytes(bytes(range(65, 91)) * 100)
    corpus = Corpus.open(source(tmp_path / "input.txt", tmp_path))
    assert (corpus.training.size, corpus.validation.size) == (2471, 130)
    with pytest.raises(InputError, match="a sequence takes 1001 tokens, but there are 130 held out; give more text"):
        corpus.check(1000)
    corpus.check(100)


def test_the_standard_library_is_text_that_every_machine_has(tmp_path: Path) -> None:
    result = documents_.find(Source().root)
    assert result.kind == "text" and len(result.files) > 500


def test_what_cannot_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "a.txt").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "picture.png").write_bytes(b"1234")
    for name, message in (
        ("nowhere", "does not exist; name a folder"),
        ("empty", r"no text in it; files that count end in \.py"),
        ("none", "no text in it; all its 1 files are empty"),
        ("other", "no text in it"),
    ):
        with pytest.raises(InputError, match=message):
            Corpus.open(source(tmp_path / name, tmp_path))

    def refused(*at: object) -> None:
        raise PermissionError(13, "Permission denied", str(at[0]))

    with monkeypatch.context() as patched:
        patched.setattr("os.scandir", refused)
        with pytest.raises(InputError, match="Permission denied"):
            Corpus.open(source(tmp_path / "none", tmp_path))
    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(InputError, match="a.txt': Permission denied; make it readable"):
        list(documents_.documents(documents_.find(tmp_path / "none")))


def test_sequences_of_several_lengths_are_documents_or_cut_from_a_stream(tmp_path: Path) -> None:
    """Of documents each as long as it is; of a stream as the workload says, no token of a step in two of them."""
    sizes = [5, 40, 9, 70, 3, 22, 31, 12, 6, 50] * 4
    texts = [json.dumps({"text": chr(97 + number % 26) * size}) for number, size in enumerate(sizes)]
    (tmp_path / "text.jsonl").write_text("\n".join(texts))
    work, longest = Workload(lengths=(30, 12, 18, 4)), 30
    batch = {"seed": 1, "sequences": 4, "seq_len": longest}
    whole = SequenceBatches(corpus=Corpus.open(Source(path=tmp_path, packing="documents")), workload=work)
    for step in (1, 2, 3):
        made = whole.batch(step, **batch)
        lengths = made["lengths"].tolist()
        assert len(lengths) == 4 and max(lengths) <= longest and len(made["input_ids"]) == sum(lengths)
        for ids, labels in zip(*(made[name].split(lengths) for name in ("input_ids", "labels")), strict=True):
            assert torch.equal(ids[1:], labels[:-1])
    stream = Corpus.open(Source(path=tmp_path, packing="stream"))
    cut = SequenceBatches(corpus=stream, workload=work)
    assert cut.batch(1, **batch)["lengths"].tolist() == [30, 12, 18, 4]
    drawn = Workload(global_batch_size=4, distribution=Lengths(values=(30, 4), weights=(1.0, 1.0)))
    draws = {
        tuple(SequenceBatches(corpus=stream, workload=drawn).batch(step, **batch)["lengths"]) for step in range(1, 9)
    }
    assert len(draws) > 1 and {int(n) for draw in draws for n in draw} == {30, 4}
    out = tmp_path / "lengths.txt"
    asked = ["--seq-len", "30", "--lengths", str(out), "--sequences", "6", "--packing", "documents"]
    assert main(["data", str(tmp_path / "text.jsonl"), *asked]) == 0
    written = [int(line) for line in out.read_text().split()]
    assert len(written) == 6 and written == sorted(written) and written[-1] == 30
