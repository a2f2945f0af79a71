"""A GGUF file as what reads folders takes: `folder_of(file)`, and written as one in whole numbers: `from_gguf(…)`.

What a folder of Hugging Face's has beside its weights (config.json, the tokenizer, the chat template) is made from the
file's metadata and written into the user's cache, with a link to the file, whose weights are read where they lie. A
file of these names that stands beside the GGUF file is taken in its place. Leaves out files in parts.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from hashlib import sha256
from pathlib import Path

import numpy as np

from gnomon.compiler.build import cache_folder
from gnomon.errors import InputError
from gnomon.formats.gguf import Gguf, read_gguf
from gnomon.formats.gguf_model import config_of
from gnomon.formats.gguf_tokenizer import chat_template, ends, special_tokens, tokenizer_json
from gnomon.formats.huggingface.safetensors import header_of
from gnomon.runtime.checkpoint.compress import check_places
from gnomon.runtime.checkpoint.forms import WHOLE, ConversionReport
from gnomon.runtime.checkpoint.pretrained import CONFIG
from gnomon.runtime.parameters.packed import GgufFolder, open_folder
from gnomon.runtime.parameters.weights import SINGLE
from gnomon.storage.dense import Dense
from gnomon.storage.form import Shape

TOKENIZER, TEMPLATE = "tokenizer.json", "chat_template.jinja"
OWN = (CONFIG, TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", TEMPLATE)
"""Files beside the GGUF file that are taken in place of its metadata."""


def folder_of(file: Path, *, tokenizer: Path | None = None) -> Path:
    """Makes a folder of a GGUF file. tokenizer: one that is used instead, so that the file's own need not be known.
    InputError for a file that is no GGUF, or a model or tokenizer that is not read."""
    if not file.is_file():
        raise InputError(f"there is no file {str(file)!r}")
    companions = {
        name: (file.parent / name).read_text(encoding="utf-8") for name in OWN if (file.parent / name).is_file()
    }
    texts = _texts(read_gguf(file), skip={*companions, *([TOKENIZER] if tokenizer else [])}) | companions
    link = file.resolve()
    # The name follows from what the folder holds: an edited config.json makes another one, and weights are read by the
    # link.
    key = sha256(json.dumps([str(link), sorted(texts.items())]).encode()).hexdigest()[:16]
    base = cache_folder() / "gguf"
    base.mkdir(mode=0o700, exist_ok=True)
    cached = base / f"{file.stem}-{key}"
    if cached.is_dir():
        return cached
    here = Path(tempfile.mkdtemp(dir=base, prefix=".making-"))
    try:
        for name, text in texts.items():
            (here / name).write_text(text, encoding="utf-8")
        (here / "model.gguf").symlink_to(link)
        # Made under another name and renamed: who finds the folder finds it whole.
        os.rename(here, cached)
    except OSError:
        shutil.rmtree(here, ignore_errors=True)
        if not cached.is_dir():  # another process was not first
            raise
    return cached


def _texts(file: Gguf, skip: set[str]) -> dict[str, str]:
    """Files by their names."""
    out = {}
    if CONFIG not in skip:
        out[CONFIG] = json.dumps(config_of(file), indent=2)
    if TOKENIZER not in skip and (text := tokenizer_json(file)) is not None:
        out[TOKENIZER] = text
        out["tokenizer_config.json"] = json.dumps(special_tokens(file), ensure_ascii=False)
        if (template := chat_template(file)) is not None:
            out[TEMPLATE] = template
    if found := ends(file):
        out["generation_config.json"] = json.dumps({"eos_token_id": found})
    return out


def from_gguf(source: Path, target: Path, form: str) -> ConversionReport:
    """A folder with the file's model, tokenizer and weights, each number the same. form: of WHOLE. InputError as
    `folder_of`, and where numbers of that dtype would be others; nothing is left behind then."""
    if form not in WHOLE:
        raise InputError(
            f"a GGUF file is written as {', '.join(WHOLE)}, not as {form}; from fp32 gnomon compress goes on"
        )
    here = folder_of(source)
    check_places(here, target)
    folder = open_folder(here)
    assert isinstance(folder, GgufFolder)
    temporary = Path(tempfile.mkdtemp(dir=target.absolute().parent, prefix=f".{target.name}."))
    try:
        for name in OWN:
            if (here / name).is_file():
                shutil.copyfile(here / name, temporary / name)
        config = json.loads((temporary / CONFIG).read_text(encoding="utf-8"))
        dtype_name = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[form]
        (temporary / CONFIG).write_text(
            json.dumps({**config, "torch_dtype": dtype_name}, indent=2) + "\n", encoding="utf-8"
        )
        storages = _write_whole(folder, temporary / SINGLE, form)
        temporary.chmod(0o755)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return ConversionReport(
        layers=len(folder.entries), before="GGUF", storages=tuple(sorted(storages)),
        bytes_before=source.stat().st_size, bytes_after=(target / SINGLE).stat().st_size,
    )  # fmt: skip


def _write_whole(folder: GgufFolder, file: Path, form: str) -> set[str]:
    """One tensor after another; the names of their storages."""
    dense, storages = Dense(dtype=form), set()
    shapes = {name: (WHOLE[form], entry.shape) for name, (_, entry) in folder.entries.items()}
    first, header = header_of(shapes, {"format": "pt"})
    with file.open("wb") as out:
        out.write(first)
        for name, entry in header.entries.items():
            storage, arrays, _ = folder.stored(name)
            shape: Shape = (1, entry.shape[0]) if len(entry.shape) == 1 else (entry.shape[0], entry.shape[1])
            wide = storage.widen(arrays, shape)
            numbers = dense.narrow(wide)
            if not np.array_equal(dense.widen(numbers, shape), wide):
                raise InputError(
                    f"{folder.path}: {name} ({storage.name}): in {form} these would be other numbers; take fp32"
                )
            storages.add(storage.name)
            out.seek(entry.begin)
            out.write(np.ascontiguousarray(numbers["values"]).tobytes())
    return storages
