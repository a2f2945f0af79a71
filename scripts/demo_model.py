"""What `make demo` trains on and with: a tokenizer of its own, the config.json of a small Llama, and two texts.

`python scripts/demo_model.py FOLDER` writes FOLDER/model (config.json, tokenizer.json, tokenizer_config.json),
FOLDER/code (modules of Python's standard library) and FOLDER/prose.jsonl (the language reference that ships with Python
as `pydoc_data.topics`, an entry a line). Leaves out weights: `gnomon run --export` makes them.
"""

from __future__ import annotations

import json
import shutil
import sys
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PACKAGES = ("asyncio", "concurrent", "email", "http", "importlib", "json", "logging", "unittest", "urllib", "xml")
VOCABULARY = 1024
END = "<|endoftext|>"
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def write_texts(folder: Path) -> None:
    """Code as files, prose as JSONL."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for package in PACKAGES:
        shutil.copytree(
            stdlib / package, folder / "code" / package, ignore=shutil.ignore_patterns("__pycache__", "*.so")
        )
    with (folder / "prose.jsonl").open("w", encoding="utf-8") as out:
        for name, text in sorted(topics.items()):
            out.write(json.dumps({"name": name, "text": text}) + "\n")


def write_model(folder: Path) -> None:
    """A byte-level BPE of both texts, and the model's shape."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    code = [path.read_text(encoding="utf-8") for path in sorted((folder / "code").rglob("*.py"))]
    tokenizer.train_from_iterator([*topics.values(), *code], trainer)
    model = folder / "model"
    model.mkdir()
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    (model / "config.json").write_text(json.dumps(CONFIG, indent=1))


if __name__ == "__main__":
    write_texts(Path(sys.argv[1]))
    write_model(Path(sys.argv[1]))
