"""A tiny model behind a server of its own process, and the client of OpenAI to ask it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from runtime.hf_models import CONFIGS, build, quiet
from safetensors.torch import save_file

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_model(folder: Path, kind: str = "llama") -> None:
    """Random weights, and a tokenizer whose tokens are bytes, with a chat template."""
    config = {**CONFIGS[kind], "vocab_size": 259, "max_position_embeddings": 256, "eos_token_id": 257}
    with quiet():
        build(kind, {**config, "bos_token_id": 256, "pad_token_id": 258}).float().save_pretrained(folder)
    write_words(folder)


def write_words(folder: Path) -> None:
    """A tokenizer whose tokens are bytes, and a chat template."""
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made = tokenizers.Tokenizer(tokenizers.models.BPE({letter: at for at, letter in enumerate(sorted(letters))}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<bos>", "<eos>", "<pad>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def write_adapter(
    folder: Path, weights: Mapping[str, torch.Tensor], seed: int, **config: Any
) -> dict[str, torch.Tensor]:
    """In PEFT's layout, with random matrices for modules with these weights; what each weight becomes by it, which is
    W + alpha / r B A."""
    folder.mkdir()
    rank, generator = config.get("r", 3), torch.Generator().manual_seed(seed)
    tensors, merged = {}, {}
    factor = config.get("lora_alpha", 6) / (rank**0.5 if config.get("use_rslora") else rank)
    for name, weight in weights.items():
        out, inner = weight.shape
        a, b = (torch.randn(shape, generator=generator) * 0.3 for shape in ((rank, inner), (out, rank)))
        tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
        merged[name] = weight + factor * b @ a
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, **config}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return merged


@dataclass(frozen=True, slots=True)
class Server:
    """One that runs."""

    url: str
    process: subprocess.Popen[str]

    def client(self, **more: Any) -> Any:
        """OpenAI's."""
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, **more})


@contextlib.contextmanager
def serving(folder: Path, *options: str) -> Iterator[Server]:
    """`gnomon serve`, until it answers; ended after."""
    command = [sys.executable, "-m", "gnomon", "serve", str(folder), "--port", "0", "--dtype", "fp32", *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stderr is not None
        try:
            said = []
            for line in process.stderr:
                said.append(line)
                if found := re.search(r"on (http://\S+)", line):
                    yield Server(found[1], process)
                    return
            raise AssertionError("".join(said))
        finally:
            process.terminate()
            process.wait(60)


def workers(pid: int) -> list[int]:
    """Processes that have the model, by rank: children of the fork server that a server starts them by."""
    [forks] = [child for child in children(pid) if b"forkserver" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return sorted(children(forks))


def children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
