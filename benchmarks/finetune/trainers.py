"""Fine-tuning of small models by the programs that people use, on this machine's CPU: predicted against measured.

    gnomon calibrate --processes 1                               # once, with the machine idle
    python benchmarks/finetune/trainers.py --peers FOLDER        # 24 jobs; the table is in results/finetune.md

Each job is one command of a script around transformers' Trainer, TRL's SFTTrainer or PEFT's LoRA. Its reader makes the
prediction (`--on local`), and the same settings train a model of that config.json for STEPS steps: the time of a step
is the median of those after WARM, in seconds of the processor (one thread, OMP_NUM_THREADS=1: other work on the machine
counts less), the memory the most bytes of storages alive at once in one step (a dispatch mode sees every op's outputs;
of views once). Predicted memory is without the allocator's rounding and what lies outside tensors. FOLDER holds trl,
peft, accelerate and datasets (`pip install --no-deps --target FOLDER …`), which Gnomon does not need; jobs of a program
that is not there are left out and said. Aimed at: time within 12 % and memory within 5 %, medians.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEPS, WARM = 6, 2
TILE = 64
"""Tokens whose logits TRL has at once. Its own number is larger than all of a step here, and without Triton a tile is
computed op by op, eleven tensors of logits: on a GPU a tile is a small part of a step, as this one is."""
VOCAB = 4096
DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}
MOE = {
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "head_dim": 64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job."""

    program: str
    """`trainer`, `trl` or `peft`."""
    model: str
    """`dense` or `moe`."""
    seq_len: int
    batch: int
    checkpointing: bool

    @property
    def name(self) -> str:
        again = ", checkpointing" if self.checkpointing else ""
        return f"{self.program}, {self.model}, {self.batch} x {self.seq_len}{again}"

    def command(self, folder: Path) -> str:
        """As somebody would start it on one device."""
        words = [
            f"python {'sft.py' if self.program == 'trl' else 'run_clm.py'} --model_name_or_path {folder}",
            f"--per_device_train_batch_size {self.batch} --gradient_accumulation_steps 1 --output_dir out",
            f"--gradient_checkpointing {self.checkpointing} --torch_dtype float32 --bf16 False --packing True",
            f"{'--max_length' if self.program == 'trl' else '--block_size'} {self.seq_len}",
            "--experts_implementation grouped_mm" if self.model == "moe" else "",
            "--loss_type chunked_nll" if self.program == "trl" else "",  # what TRL 1.16 computes, whatever is asked
        ]
        if self.program == "peft":
            words.append("--use_peft True --lora_r 8 --lora_target_modules q_proj,v_proj")
        return " ".join(word for word in words if word)


def jobs() -> Iterator[Job]:
    for program in ("trainer", "trl", "peft"):
        for model in ("dense", "moe"):
            for seq_len, batch in ((256, 4), (512, 2)):
                for checkpointing in (False, True):
                    yield Job(program=program, model=model, seq_len=seq_len, batch=batch, checkpointing=checkpointing)


def predicted(job: Job, folder: Path, on: str) -> tuple[float, float]:
    """(seconds, bytes of tensors) of a step."""
    from gnomon.formats import programs
    from gnomon.formats.given import ReadContext
    from gnomon.hardware import parse_cluster
    from gnomon.prediction import predict

    path = folder.parent / f"job-{abs(hash(job))}.sh"
    path.write_text(job.command(folder) + "\n")
    kind = programs.recognised(path)
    assert kind is not None, job.command(folder)
    read = kind.read(path, ReadContext(devices=1))
    made = predict(read.graph(), parse_cluster(on), read.plan, read.workload, read.stack)
    by_class = made.tightest.by_class
    tensors = sum(size for name, size in by_class.items() if name not in ("workspace", "overhead"))
    return made.step_s, float(tensors)


def measured(job: Job, folder: Path) -> tuple[float, float]:
    """(seconds, bytes of tensors) of a step."""
    import torch
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    config.use_cache = False
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ids = torch.randint(0, VOCAB, (job.batch * (STEPS + 2), job.seq_len)).tolist()
    data = Dataset.from_dict({"input_ids": ids, "labels": ids, "attention_mask": [[1] * job.seq_len for _ in ids]})
    if job.program == "peft":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
        model.enable_input_require_grads()
    times: list[float] = []
    alive = Alive()

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if len(times) == STEPS - 1:
                alive.__enter__()
            self.began = time.process_time()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.process_time() - self.began)

    common = dict(
        output_dir=str(folder.parent / "out"),
        per_device_train_batch_size=job.batch,
        max_steps=STEPS,
        gradient_checkpointing=job.checkpointing,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
        bf16=False,
    )
    held = sum(t.untyped_storage().nbytes() for t in model.parameters())
    trained = sum(t.untyped_storage().nbytes() for t in model.parameters() if t.requires_grad)
    if job.program == "trl":
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import PreTrainedTokenizerFast
        from trl import SFTConfig, SFTTrainer
        from trl.trainer import utils

        utils._CHUNKED_LOGPROB_CHUNK_SIZE = TILE
        words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
        arguments = SFTConfig(**common, max_length=job.seq_len, dataset_kwargs={"skip_prepare_dataset": True})
        trainer = SFTTrainer(
            model=model, args=arguments, train_dataset=data, processing_class=tokenizer, callbacks=[Clock()]
        )
    else:
        trainer = Trainer(model=model, args=TrainingArguments(**common), train_dataset=data, callbacks=[Clock()])
    trainer.train()
    alive.__exit__(None, None, None)
    # What lives from step to step (parameters, two states) was there before; gradients are made within the step.
    return statistics.median(times[WARM:-1]), held + 2.0 * trained + alive.most


class Alive:
    """The most bytes of storages alive at once of those that ops make while it is on."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.mode: Any = None

    def __enter__(self) -> Alive:
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        seen: dict[int, int] = {}
        owner = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = func(*args, **(kwargs or {}))
                given = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
                for tensor in out if isinstance(out, (tuple, list)) else (out,):
                    if not isinstance(tensor, torch.Tensor):
                        continue
                    storage = tensor.untyped_storage()
                    key = storage._cdata
                    if key in seen or key in given:
                        continue
                    seen[key] = storage.nbytes()
                    owner.now += seen[key]
                    owner.most = max(owner.most, owner.now)
                    weakref.finalize(storage, owner.gone, seen, key)
                return out

        self.mode = Mode()
        self.mode.__enter__()
        return self

    def gone(self, seen: dict[int, int], key: int) -> None:
        self.now -= seen.pop(key, 0)

    def __exit__(self, *error: Any) -> None:
        if self.mode is not None:
            self.mode.__exit__(*error)
            self.mode = None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peers", help="folder with trl, peft, accelerate and datasets")
    parser.add_argument("--on", default="local", help="machine that is predicted")
    parser.add_argument("--only", default="", help="jobs whose name holds this")
    asked = parser.parse_args()
    if asked.peers:
        sys.path.append(asked.peers)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for job in jobs():
            if asked.only not in job.name:
                continue
            home = Path(folder) / job.model
            home.mkdir(exist_ok=True)
            (home / "config.json").write_text(json.dumps(DENSE if job.model == "dense" else MOE))
            try:
                said, held = predicted(job, home, asked.on)
                took, alive = measured(job, home)
            except ImportError as error:
                print(f"{job.name}: left out, {error}")
                continue
            rows.append((said / took - 1, held / alive - 1))
            print(
                f"{job.name:<40} {said * 1e3:8.1f} {took * 1e3:8.1f} ms {said / took - 1:+7.1%}"
                f" {held / 2**20:8.1f} {alive / 2**20:8.1f} MiB {held / alive - 1:+7.1%}",
                flush=True,
            )
    for what, errors in zip(("time", "memory"), zip(*rows, strict=True), strict=True) if rows else ():
        sizes = sorted(map(abs, errors))
        print(f"{what}: median {statistics.median(sizes):.1%}, worst {sizes[-1]:.1%} of {len(sizes)} jobs")
    print(f"{platform.machine()}, Python {platform.python_version()}")


if __name__ == "__main__":
    main()
