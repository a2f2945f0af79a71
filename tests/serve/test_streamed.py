"""Layers that stay on a disk: the same answers, in a process whose memory does not hold them all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the engine's tests need it")
pytest.importorskip("transformers", reason="transformers, which writes the folders, is not installed")

from safetensors.torch import save_file  # noqa: E402
from serve.against_generate import config_of, served  # noqa: E402
from serve.divided import OPEN, RULES, asked  # noqa: E402

from gnomon.errors import InputError  # noqa: E402
from gnomon.serve.load import open_model  # noqa: E402
from gnomon.serving.streaming import staying  # noqa: E402

pytestmark = pytest.mark.torch
HIDDEN, FFN, LAYERS = 512, 1536, 16
IN_PROCESS = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import torch
from serve.divided import OPEN, RULES, asked
from gnomon.serve.load import open_model
def memory(name):
    return int(next(l for l in open("/proc/self/status") if l.startswith(name)).split()[1]) << 10
torch.set_num_threads(1)
open_model(Path(sys.argv[3]), RULES, **OPEN)  # what is loaded and compiled once
before = memory("VmRSS")
model = open_model(Path(sys.argv[1]), RULES, **{**OPEN, "dtype": "bf16"}, resident_bytes=20 << 20)
print(json.dumps([asked([model]), memory("VmHWM") - before, model.model.streams.streamed_bytes]))
"""


def test_layers_that_stay_are_spread_and_fit() -> None:
    assert staying(0, [10] * 6) == frozenset()
    assert staying(20, [10] * 6) == {2, 5} and staying(29, [10] * 6) == {2, 5}
    assert staying(60, [10] * 6) == frozenset(range(6))
    assert staying(15, [0, 10, 10, 0]) == {0, 2, 3}


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_layers_from_a_disk_answer_the_same(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one call of a kernel, and op by op: more layers than rooms, an odd number of them, all or some of them."""
    deep: dict[str, Any] = {"num_hidden_layers": 5}
    if kind == "gpt_oss":
        deep["layer_types"] = ["full_attention" if at % 2 else "sliding_attention" for at in range(5)]
    monkeypatch.setattr("serve.against_generate.config_of", lambda kind, size: {**config_of(kind, size), **deep})
    _, plain = served(kind, tmp_path)
    wanted = asked([open_model(tmp_path, RULES, **OPEN)])
    resident = 0
    for stay in (0, 1):
        ours = open_model(tmp_path, RULES, **OPEN, resident_bytes=resident)
        streams = ours.model.streams
        assert len(streams.order) == 5 - stay and streams.num_bytes <= resident and streams.streamed_bytes
        assert asked([ours]) == wanted and asked([ours]) == wanted
        resident = max(layer.nbytes for layer in streams.layers.values())
    with pytest.raises(InputError, match="fp32 or bf16"):
        open_model(tmp_path, RULES, **{**OPEN, "dtype": "fp64"}, resident_bytes=0)


def test_a_model_that_memory_does_not_hold_answers(tmp_path: Path) -> None:
    """109 MB of weights in less than half as much."""
    served("llama", tmp_path / "tiny")
    config = json.loads((tmp_path / "tiny" / "config.json").read_text())
    config |= {
        "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64,
    }  # fmt: skip
    shapes = {"q_proj": (512, HIDDEN), "k_proj": (128, HIDDEN), "v_proj": (128, HIDDEN), "o_proj": (HIDDEN, 512)}
    layer = {f"self_attn.{name}.weight": shape for name, shape in shapes.items()} | {
        "mlp.gate_proj.weight": (FFN, HIDDEN), "mlp.up_proj.weight": (FFN, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, FFN),
        "input_layernorm.weight": (HIDDEN,), "post_attention_layernorm.weight": (HIDDEN,),
    }  # fmt: skip
    every = {f"model.layers.{at}.{name}": shape for at in range(LAYERS) for name, shape in layer.items()}
    vocab = config["vocab_size"]
    every |= {"model.embed_tokens.weight": (vocab, HIDDEN), "model.norm.weight": (HIDDEN,)}
    every |= {} if config["tie_word_embeddings"] else {"lm_head.weight": (vocab, HIDDEN)}
    drawn = torch.Generator().manual_seed(1)
    tensors = {name: (0.05 * torch.randn(shape, generator=drawn)).bfloat16() for name, shape in every.items()}
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    wanted = asked([open_model(folder, RULES, **{**OPEN, "dtype": "bf16"})])
    tests = str(Path(__file__).parents[1])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), "GNOMON_DISK": str(tmp_path)}
    command = [sys.executable, "-c", IN_PROCESS, str(folder), tests, str(tmp_path / "tiny")]
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
    answers, grew, streamed = json.loads(told)
    size = (folder / "model.safetensors").stat().st_size
    assert answers == wanted and streamed > 0.7 * size and grew < size / 2, (grew, size)
