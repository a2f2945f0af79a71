"""Training scripts that are run up to their first step: what is read of them, and where they are refused.

Each script is one that a person would write, unchanged by us; what is expected of it is counted by hand from its text.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from gnomon.cli import main
from gnomon.cli.jobs import job_file
from gnomon.cli.options.job import TrainingOptions
from gnomon.cli.script import script_format
from gnomon.errors import InputError
from gnomon.formats.given import ReadContext
from gnomon.frontend.script.hub import PATCHES
from gnomon.frontend.script.seen import NotHere

LOOP = """
import argparse, os, torch, torch.distributed as dist, urllib.request
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--accumulate", type=int, default=1)
args = parser.parse_args()

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, 1000, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.down(F.gelu(self.up(x))))

try:
    urllib.request.urlopen("http://example.com")
except OSError as error:
    assert "no network" in str(error)
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = DDP(torch.compile(Net(args.width).to("cuda")), device_ids=[0])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with torch.no_grad():
    model.eval()
    print("loss before", model(torch.zeros(2, 8, dtype=torch.long, device="cuda")).mean().item())
model.train()
for step in range(1000):
    for micro in range(args.accumulate):
        ids = torch.randint(0, 1000, (4, 33)).pin_memory().to("cuda", non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), ids[:, 1:].reshape(-1))
        (loss / args.accumulate).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    open("reached", "w").close()
"""


def test_a_loop_of_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (script := tmp_path / "train.py").write_text(LOOP)
    # 4.2 million parameters: past what is kept with values, so that the step is one of shapes
    job = script_format("--width 400 --accumulate 3").read(script, ReadContext(devices=2))
    plan, graph = job.plan, job.graph()
    width = 400
    assert graph.num_parameters() == 2 * 1000 * width + 8 * width * width + 5 * width
    assert (plan.mesh.dp_shard, plan.optimizer.zero, plan.schedule.micro_batch_size) == (2, 0, 4)
    assert (job.workload.global_batch_size, job.workload.seq_len) == (4 * 2 * 3, 32)
    assert (plan.precision.param, plan.precision.compute, plan.optimizer.kind) == ("fp32", "bf16", "adamw")
    assert plan.optimizer.clip and job.stack.launch.launch_mode == "compiled"
    assert any("train.py" in line and "first step of AdamW" in line for line in job.assumed)
    assert not (tmp_path / "reached").exists()


def test_a_script_that_comes_to_no_step(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()")
    with pytest.raises(InputError, match="status 2 .*unrecognized arguments: --what 1"):
        script_format("--what 1").read(script, ReadContext(devices=1))


def test_a_model_that_is_not_here() -> None:
    class Config:
        @classmethod
        def get_config_dict(cls, name: str) -> object:
            raise OSError(f"no {name} in the cache")

    PATCHES["transformers.configuration_utils"](SimpleNamespace(PreTrainedConfig=Config))
    with pytest.raises(NotHere, match="hf download acme/none-7b config.json --local-dir none-7b"):
        Config.get_config_dict("acme/none-7b")
    known = Config.get_config_dict("Qwen/Qwen2.5-7B-Instruct")
    assert known[0]["model_type"] == "qwen2" and known[0]["hidden_size"] == 3584  # type: ignore[index]
    with pytest.raises(OSError, match="cache"):
        Config.get_config_dict("./folder/that/is/not")


def test_a_script_is_run_only_where_arguments_are_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (script := tmp_path / "train.py").write_text("open('ran', 'w')")
    with pytest.raises(InputError, match=r'--args "…" \(--args "" for none\)'):
        job_file(TrainingOptions(model=str(script)))
    with pytest.raises(InputError, match="arguments of a script"):
        job_file(TrainingOptions(model="llama-3.1-8b", arguments="--lr 1"))
    assert not Path("ran").exists()
    assert main(["predict", "llama-3.1-8b", "--args", "--lr", "--on", "1xh100-sxm"]) == 2
    assert "arguments of a script" in capsys.readouterr().err  # `--lr` is the value of --args


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 704,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096, "dtype": "float32",
}  # fmt: skip

TRAINER = """
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
tokenizer = AutoTokenizer.from_pretrained("acme/small")
data = load_dataset("acme/nowhere", split="train").map(lambda x: tokenizer(x["text"]), batched=True)
Trainer(model=AutoModelForCausalLM.from_pretrained("acme/small"), args=args, train_dataset=data).train()
"""

SFT = """
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

SFTTrainer(
    model="acme/small",
    args=SFTConfig(output_dir="out", max_length=256, packing=True, per_device_train_batch_size=2),
    train_dataset=load_dataset("acme/nowhere", split="train"),
    peft_config=LoraConfig(r=8, target_modules="all-linear"),
).train()
"""


SLOTH = """
from unsloth import FastLanguageModel, is_bfloat16_supported
from unsloth.chat_templates import get_chat_template
from datasets import load_dataset
from transformers import TrainingArguments
from trl import SFTTrainer

model, tokenizer = FastLanguageModel.from_pretrained("acme/small", max_seq_length=256, load_in_4bit=False)
model = FastLanguageModel.get_peft_model(model, r=8)
SFTTrainer(
    model=model,
    tokenizer=get_chat_template(tokenizer, chat_template="chatml"),
    train_dataset=load_dataset("acme/nowhere", split="train"),
    dataset_text_field="text",
    max_seq_length=256,
    args=TrainingArguments(output_dir="out", per_device_train_batch_size=2, bf16=is_bfloat16_supported()),
).train()
"""


@pytest.mark.parametrize(
    ("text", "needs"),
    [
        (SLOTH, ("trl", "peft", "datasets", "accelerate")),
        (TRAINER, ("accelerate", "datasets")),
        (SFT, ("trl", "peft", "datasets", "accelerate")),
    ],
)
def test_a_script_of_hugging_face(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, needs: tuple[str, ...]
) -> None:
    if absent := [name for name in needs if importlib.util.find_spec(name) is None]:
        pytest.skip(f"without {', '.join(absent)}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(LLAMA))
    (script := tmp_path / "train.py").write_text(text)
    given = "--output_dir out --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --bf16 --fsdp full_shard"
    job = script_format(given if text == TRAINER else "").read(script, ReadContext(devices=2, seq_len=256))
    layer = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 704 + 2 * 256
    adapters = 8 * (2 * 2 * 256 + 2 * (256 + 128) + 3 * (256 + 704))
    whole = 2 * 4096 * 256 + 4 * layer + 256
    assert job.plan.schedule.micro_batch_size == 2
    if text == TRAINER:
        assert job.graph().num_parameters() == whole
        assert (job.workload.global_batch_size, job.plan.optimizer.zero) == (2 * 2 * 4, 3)
        assert job.plan.precision.compute == "bf16"
    else:
        assert (job.graph().num_parameters(), job.graph().num_frozen()) == (4 * adapters, whole)
        assert (job.workload.seq_len, job.plan.saved.preset) == (256, "full")
        assert bool(job.plan.saved.rules) == (text == SLOTH)  # checkpoints on the host are Unsloth's default
