"""Folders written as GGUF, and read back: each tensor as ggml's blocks say, under llama.cpp's names and in its order.

Oracle: blocks taken apart here by ggml-common.h; the same files were read bit-equal by gguf 0.19's own `dequantize`.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime.hf_models import CONFIGS, build, quiet  # noqa: E402

from gnomon.cli import main  # noqa: E402
from gnomon.errors import InputError  # noqa: E402
from gnomon.formats.gguf import read_gguf  # noqa: E402
from gnomon.formats.gguf_model import config_of  # noqa: E402
from gnomon.runtime.checkpoint.gguf_folder import folder_of  # noqa: E402
from gnomon.runtime.checkpoint.pretrained import load  # noqa: E402
from gnomon.runtime.parameters.packed import PackedFolder, open_folder  # noqa: E402

pytestmark = pytest.mark.torch

Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model"
    config = {**CONFIGS["llama"], "vocab_size": 256, "intermediate_size": 64, "hidden_size": 64, "head_dim": 16}
    torch.manual_seed(0)
    with quiet():
        build("llama", config).half().save_pretrained(path)
    return path


def by_blocks(kind: str, raw: bytes, shape: tuple[int, ...]) -> np.ndarray:
    """What ggml's blocks stand for."""
    if kind in ("F16", "F32"):
        return np.frombuffer(raw, {"F16": "<f2", "F32": "<f4"}[kind]).astype(np.float32).reshape(shape)
    size = {"Q4_0": 18, "Q8_0": 34}[kind]
    out = []
    for at in range(0, len(raw), size):
        scale = np.frombuffer(raw[at : at + 2], "<f2").astype(np.float32)[0]
        codes = np.frombuffer(raw[at + 2 : at + size], np.uint8)
        wide = codes.view(np.int8) if kind == "Q8_0" else np.concatenate([codes & 15, codes >> 4]).astype(np.int8) - 8
        out.append(wide.astype(np.float32) * scale)
    return np.concatenate(out).reshape(shape)


@pytest.mark.parametrize(("bits", "kind"), [(4, "Q4_0"), (8, "Q8_0"), (0, "F16")])
def test_each_tensor_is_the_same_under_its_name_there(
    folder: Path, bits: int, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = folder, tmp_path / "out.gguf"
    if bits:
        source = tmp_path / "small"
        assert main(["compress", str(folder), "--bits", str(bits), "--group", "64", "-o", str(source)]) == 0
    assert main(["checkpoint", "convert", str(source), "--to", "gguf", "-o", str(target), "--json"]) == 0
    assert f'"{kind}"' in capsys.readouterr().out
    file, ours = read_gguf(target), open_folder(source)
    assert file.metadata["general.architecture"] == "llama" and file.metadata["llama.block_count"] == 2
    assert file.metadata["tokenizer.ggml.model"] == "no_vocab"
    names = {
        "blk.1.attn_q.weight": Q,
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
        "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    assert len(file.entries) == len(ours.entries)
    for theirs, name in names.items():
        entry = file.entries[theirs]
        size = int(np.prod(entry.shape)) * {"F32": 4, "F16": 2, "Q4_0": 18 / 32, "Q8_0": 34 / 32}[entry.kind]
        assert entry.begin % 32 == 0
        wide = by_blocks(entry.kind, target.read_bytes()[entry.begin :][: int(size)], entry.shape)
        wanted = ours.read(name).float().numpy()
        if name == Q:  # of 4 heads of 16 rows the r-th of a first half beside the r-th of the second
            wanted = np.stack([wanted[h * 16 + half * 8 + r] for h in range(4) for r in range(8) for half in range(2)])
            assert entry.kind == kind
        np.testing.assert_array_equal(wide, wanted, err_msg=name)


def test_what_the_file_cannot_hold_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(source: Path, says: str, name: str = "out.gguf") -> None:
        assert main(["checkpoint", "convert", str(source), "--to", "gguf", "-o", str(tmp_path / name)]) == 2
        assert says in " ".join(capsys.readouterr().err.split()) and not list(tmp_path.glob("*.gguf*"))

    refused(folder, "writes one file; name it out.gguf (-o)", "out")
    refused(tmp_path, "has no config.json")
    assert main(["compress", str(folder), "--bits", "4", "--group", "16", "-o", str(tmp_path / "16")]) == 0
    refused(tmp_path / "16", "a group that is a multiple of 32 can be written")
    for key, value, says in (
        ("model_type", "gemma", "is of type 'gemma'; llama, mistral, qwen2, qwen3 are written"),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 1e4}, "scales its rotary embeddings"),
    ):
        other = tmp_path / key
        shutil.copytree(folder, other)
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps({**config, key: value}))
        refused(other, says)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_file_is_read_as_the_folder_it_was_written_from(
    kind: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: transformers' model that the file was made of; in its dtype, and in four bits."""
    if kind == "qwen2":
        torch.manual_seed(0)
        folder = tmp_path / "qwen2"
        with quiet():
            build("qwen2", {**CONFIGS["qwen2"], "vocab_size": 256, "intermediate_size": 64}).half().save_pretrained(
                folder
            )
    file = tmp_path / "of.gguf"
    assert main(["checkpoint", "convert", str(folder), "--to", "gguf", "-o", str(file)]) == 0
    here = folder_of(file)
    assert here == folder_of(file)
    transformers = pytest.importorskip("transformers")
    ids = torch.arange(16)[None] * 11 % 256
    with torch.no_grad(), quiet():
        wanted = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
    made = load(here, logits=True).output({"input_ids": ids})
    assert isinstance(made, torch.Tensor)
    torch.testing.assert_close(made.detach(), wanted, rtol=1e-5, atol=1e-5)
    small, four = tmp_path / "small", tmp_path / "four.gguf"
    assert main(["compress", str(folder), "--bits", "4", "--group", "32", "-o", str(small)]) == 0
    assert main(["checkpoint", "convert", str(small), "--to", "gguf", "-o", str(four)]) == 0
    assert main(["checkpoint", "convert", str(four), "--to", "fp32", "-o", str(tmp_path / "whole")]) == 0
    packed, before, whole = open_folder(folder_of(four)), open_folder(small), open_folder(tmp_path / "whole")
    assert isinstance(packed, PackedFolder) and packed.stored(Q)[0].name == "int4-g32" and len(packed.packed) == 14
    for name in before.entries:
        for read in (packed, whole):
            np.testing.assert_array_equal(read.read(name).float(), before.read(name).float(), err_msg=name)
    if kind == "qwen2":
        return
    capsys.readouterr()
    assert main(["generate", str(four), "--prompt", "ab", "--count", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["ids"]
    assert main(["generate", str(small), "--prompt", "ab", "--count", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ids"] == told


def test_a_file_that_cannot_be_served_says_why(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "of.gguf"
    assert main(["checkpoint", "convert", str(folder), "--to", "gguf", "-o", str(file)]) == 0
    whole = read_gguf(file)
    for given, says in (
        ({"general.architecture": "gemma3"}, "architecture 'gemma3'; llama, qwen2, qwen3 are read"),
        ({"llama.expert_count": 8}, "has 8 experts"),
        ({"llama.rope.scaling.type": "yarn"}, r"scales its rotary embeddings \(yarn\)"),
        ({"llama.attention.head_count_kv": [2, 4]}, "not one whole number of all layers"),
        ({"llama.rope.dimension_count": 8}, "rotated dims of another width"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is None"),
    ):
        with pytest.raises(InputError, match=says):
            config_of(replace(whole, metadata={**whole.metadata, **given}))
    with pytest.raises(InputError, match="there is no file"):
        folder_of(tmp_path / "none.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGML" + bytes(64))
    with pytest.raises(InputError, match="is no GGUF file"):
        folder_of(tmp_path / "bad.gguf")
    (tmp_path / "two").mkdir()
    for name in ("a", "b"):
        shutil.copy(file, tmp_path / "two" / f"{name}.gguf")
    with pytest.raises(InputError, match="has 2 GGUF files"):
        open_folder(tmp_path / "two")
