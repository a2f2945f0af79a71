"""Quantised folders in another program's form mean the same number by number, and are read by what reads folders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch", reason="safetensors, which reads the folders, is not installed")
from gnomon.cli import main  # noqa: E402
from gnomon.errors import InputError  # noqa: E402
from gnomon.formats.huggingface import quantised  # noqa: E402
from gnomon.runtime.checkpoint.compress import compress  # noqa: E402
from gnomon.runtime.checkpoint.forms import convert  # noqa: E402
from gnomon.runtime.checkpoint.pretrained import load  # noqa: E402
from gnomon.runtime.parameters.packed import PackedFolder, open_folder  # noqa: E402
from gnomon.storage.integers import Integers  # noqa: E402
from gnomon.storage.names import storage_of  # noqa: E402

pytestmark = pytest.mark.torch
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "float16", "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """int4 in groups of 32, as compressed-tensors has it, with scales in float16."""
    home = tmp_path_factory.mktemp("forms")
    whole = home / "whole"
    whole.mkdir()
    (whole / "config.json").write_text(json.dumps(CONFIG))
    rows = {"q_proj": 32, "k_proj": 16, "v_proj": 16, "o_proj": 32, "gate_proj": 64, "up_proj": 64, "down_proj": 32}
    tensors = {"model.embed_tokens.weight": (96, 32), "lm_head.weight": (96, 32), "model.norm.weight": (32,)}
    for layer in range(2):
        base = f"model.layers.{layer}"
        tensors |= {f"{base}.{name}.weight": (32,) for name in ("input_layernorm", "post_attention_layernorm")}
        for name, outputs in rows.items():
            part = "mlp" if name[0] in "gud" else "self_attn"
            tensors[f"{base}.{part}.{name}.weight"] = (outputs, 64 if name == "down_proj" else 32)
    made = {name: (torch.randn(shape) * 0.1).half() for name, shape in tensors.items()}
    safetensors.save_file(made, str(whole / "model.safetensors"))
    compress(whole, home / "small", storage_of("int4-g32"), "rtn")  # type: ignore[arg-type]
    return home / "small"


def meaning(path: Path) -> dict[str, np.ndarray]:
    folder = open_folder(path)
    return {name: folder.read(name).float().numpy() for name in folder.entries}


def same(one: Path, other: Path) -> None:
    before, after = meaning(one), meaning(other)
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)


def test_there_and_back_means_the_same(small: Path, tmp_path: Path) -> None:
    """compressed-tensors, GPTQ, AWQ, compressed-tensors; the last has the first's bytes, as zeros are the middle."""
    said = convert(small, tmp_path / "gptq", "gptq")
    assert (said.layers, said.before, said.storages) == (14, "compressed-tensors", ("int4-g32",))
    convert(tmp_path / "gptq", tmp_path / "awq", "awq")
    convert(tmp_path / "awq", tmp_path / "back", "compressed-tensors")
    for name in ("gptq", "awq", "back"):
        same(small, tmp_path / name)
    written = [safetensors.load_file(str(path / "model.safetensors")) for path in (small, tmp_path / "back")]
    assert written[0].keys() == written[1].keys()
    assert all(torch.equal(written[0][name], written[1][name]) for name in written[0])
    config = json.loads((tmp_path / "gptq" / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["bits"], config["group_size"], config["desc_act"]) == ("gptq", 4, 32, False)


def test_what_is_converted_runs_as_before(small: Path, tmp_path: Path) -> None:
    convert(small, tmp_path / "gptq", "gptq")
    convert(small, tmp_path / "fp32", "fp32")
    ids = torch.arange(12)[None] % 90
    losses = [
        float(load(path).output({"input_ids": ids[:, :-1], "labels": ids[:, 1:]}).detach())
        for path in (small, tmp_path / "gptq", tmp_path / "fp32")
    ]
    assert losses[0] == losses[1] == losses[2]


def test_zeros_of_groups_stay(small: Path, tmp_path: Path) -> None:
    """Zeros that are no middle are written as such by all three."""
    folder = open_folder(small)
    assert isinstance(folder, PackedFolder)
    storage = Integers(bits=4, group=32, zeros=True)
    weight = np.random.default_rng(0).uniform(-1, 3, (32, 64)).astype(np.float32)
    arrays = storage.narrow(weight)
    for write, config in (
        (quantised.gptq, quantised.gptq_config), (quantised.awq, quantised.awq_config),
        (quantised.packed, quantised.packed_config),
    ):  # fmt: skip
        method = quantised.method_of({"quantization_config": config(storage, ())})
        assert method is not None
        again, read, shape = quantised.stored(method, write(storage, arrays, (32, 64)))
        assert shape == (32, 64)
        np.testing.assert_array_equal(again.widen(read, shape), storage.widen(arrays, (32, 64)))


def test_a_folder_of_torchaos_packed_int4_is_read(tmp_path: Path) -> None:
    """Tiles that are filled up, with the shape that the file's metadata says; oracle: torchao's own dequantisation."""
    made = json.loads((Path(__file__).parents[1] / "formats" / "torchao_int4.json").read_text())["tiles"]
    tensors = {
        f"layer.{name}": torch.tensor(one["values"], dtype=getattr(torch, one["dtype"]))
        for name, one in made["tensors"].items()
    }
    file = tmp_path / "model.safetensors"
    safetensors.save_file(tensors, str(file), metadata={"layer.weight": json.dumps(made["metadata"])})
    packing = {"int4_packing_format": {"_data": "TILE_PACKED_TO_4D"}}
    said = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": packing}}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
    folder = open_folder(tmp_path)
    assert folder.entries.keys() == {"layer.weight"} and folder.entries["layer.weight"][1].shape == (5, 96)
    np.testing.assert_array_equal(folder.read("layer.weight").numpy(), np.array(made["dequantised"], np.float32))
    safetensors.save_file(tensors, str(file), metadata={"layer.weight": '{"_data": {"shape": [5, "96"]}}'})
    with pytest.raises(InputError, match="metadata of layer.weight says the shape"):
        open_folder(tmp_path)


def test_what_cannot_be_held_is_refused_by_name(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for form, why in (("bf16", "other numbers"), ("compressed-tensors", "already"), ("nf4", "are converted to")):
        with pytest.raises(InputError, match=why):
            convert(small, tmp_path / "out", form)
    storage = Integers(bits=8, group=32)
    arrays = storage.narrow(np.ones((32, 64), np.float32))
    with pytest.raises(InputError, match="codes of 4 bits"):
        quantised.awq(storage, arrays, (32, 64))
    with pytest.raises(InputError, match="float16"):
        scales = np.full((32, 2), 1 + 2**-20, np.float32)
        quantised.gptq(Integers(bits=4, group=32, scale="float32"), {**arrays, "scales": scales}, (32, 64))
    with pytest.raises(InputError, match="no multiple"):
        quantised.gptq(Integers(bits=4, group=0), storage.narrow(np.ones((12, 64), np.float32)), (12, 64))
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    assert main(["checkpoint", "convert", str(small), "-o", str(tmp_path / "out")]) == 2
    assert "one of them" in capsys.readouterr().err
    assert main(["checkpoint", "convert", str(small), "--to", "awq", "-o", str(tmp_path / "out")]) == 0
    assert "14 linears of compressed-tensors (int4-g32) as awq, each number the same" in " ".join(
        capsys.readouterr().out.split()
    )
