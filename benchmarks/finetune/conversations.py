"""Conversations as TRL's SFTTrainer makes them into tokens and labels, and as `gnomon run` does: are they the same?

    python benchmarks/finetune/conversations.py --peers FOLDER

FOLDER holds trl, accelerate and datasets (`pip install --no-deps --target FOLDER …`). A tokenizer of 400 entries, two
chat templates (one with `{% generation %}`, one without), two conversations, TRL's default and `assistant_only_loss`:
ids and labels of the trainer's own collator against those of `runtime.data.Encoder`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}<|im_start|>assistant\n{% generation %}"
    "{{ message['content'] }}<|im_end|>{% endgeneration %}\n{% else %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
)
CHAT = [
    {"role": "user", "content": "say the fox"},
    {"role": "assistant", "content": "quick and brown"},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "the fox again"},
]


def tokenizer(folder: Path) -> None:
    """Writes a small tokenizer.json."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["the quick brown fox and the other fox again"] * 50, trainer)
    made.save(str(folder / "tokenizer.json"))


def theirs(folder: Path, template: str, only: bool, rows: list[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
    """(ids, labels) of each conversation, by TRL."""
    import datasets.fingerprint  # type: ignore[import-not-found]
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]

    # functions are told apart by their place, since dill of these releases cannot pickle all that they hold
    plain = classmethod(lambda cls, value: hashlib.sha256(repr(id(value)).encode()).hexdigest()[:16])
    datasets.fingerprint.Hasher.hash = plain
    small = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=400
    )
    words = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    words.chat_template = template
    asked = SFTConfig(
        output_dir=str(folder / "out"), assistant_only_loss=only, report_to=[], use_cpu=True, bf16=False, max_length=512
    )
    trainer = SFTTrainer(
        model=LlamaForCausalLM(small), args=asked, train_dataset=Dataset.from_list(rows), processing_class=words
    )
    batch = trainer.data_collator([trainer.train_dataset[at] for at in range(len(rows))])
    sizes = [len(trainer.train_dataset[at]["input_ids"]) for at in range(len(rows))]
    return [
        (batch["input_ids"][at][:size].tolist(), batch["labels"][at][:size].tolist()) for at, size in enumerate(sizes)
    ]


def main() -> int:
    """Prints a line for each conversation, and returns 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--peers", type=Path, required=True)
    sys.path.insert(0, str(parser.parse_args().peers))
    from gnomon.runtime.data import Encoder, documents

    folder, rows, wrong = Path(tempfile.mkdtemp()), [{"messages": CHAT}, {"messages": CHAT[:2]}], 0
    tokenizer(folder)
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name, template, only in (("plain", CHATML, False), ("marked", MARKED, False), ("marked", MARKED, True)):
        (folder / "template.jinja").write_text(template)
        learn = "answers" if only else "completions"
        encoder = Encoder.open(folder, chat_template=folder / "template.jinja", learn=learn)  # type: ignore[arg-type]
        ours = encoder.encode(documents.documents(documents.find(folder / "chats.jsonl")))
        for at, ((ids, labels), made) in enumerate(zip(theirs(folder, template, only, rows), ours, strict=True)):
            kept = made.ids.tolist()
            want = [id if made.learn is None or made.learn[k] else -100 for k, id in enumerate(kept)]
            same = (ids == kept, labels == want)
            wrong += not all(same)
            how = "assistant_only_loss" if only else "default"
            print(f"{name:7} {how:20} conversation {at}: {len(ids)} ids equal {same[0]}, labels equal {same[1]}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
