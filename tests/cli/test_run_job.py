"""Job files of trainers carried out by `gnomon run`: what of them is done, what is said, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gnomon.cli import main
from gnomon.cli.options.run import RunOptions
from gnomon.cli.run_job import is_job, planned_job
from gnomon.errors import InputError
from gnomon.formats import programs
from gnomon.runtime.data.chat import ChatTemplate

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 160,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
FACTORY = """
model_name_or_path: tiny
stage: sft
finetuning_type: lora
lora_rank: 4
lora_target: q_proj,v_proj
dataset: mine
cutoff_len: 64
packing: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
learning_rate: 3.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_steps: 7
bf16: true
enable_liger_kernel: true
"""
AXOLOTL = """
base_model: ./tiny
datasets:
  - path: mine.txt
    type: completion
sequence_len: 64
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 2
optimizer: adamw_bnb_8bit
lr_scheduler: linear
learning_rate: 0.0002
max_steps: 11
bf16: auto
adapter: qlora
load_in_4bit: true
lora_r: 4
lora_target_linear: true
gradient_checkpointing: true
"""
TRL = """python sft.py --model_name_or_path tiny --dataset_name mine.txt --max_length 64 \
--per_device_train_batch_size 2 --use_peft --lora_r 4 --lora_target_modules all-linear \
--max_steps 3 --seed 5 --lr_scheduler_type constant
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "mine.txt").write_text("the sum of two and two is four. " * 400)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"mine": {"file_name": "../mine.txt"}}))
    return tmp_path


def put(folder: Path, name: str, text: str) -> RunOptions:
    (folder / name).write_text(text)
    assert is_job(str(folder / name))
    return RunOptions(plan=str(folder / name))


def test_a_yaml_of_llama_factory(folder: Path) -> None:
    file, options, unlike = planned_job(put(folder, "job.yaml", FACTORY))
    assert file.model == f"{folder}/tiny+lora4:q_proj,v_proj" and file.on == "local:1"
    assert (file.workload.seq_len, file.workload.global_batch_size) == (64, 4)
    assert (options.lr, options.lr_schedule, options.warmup_steps, options.packing) == (3e-4, "cosine", 7, "stream")
    assert Path(str(options.data)).resolve() == (folder / "mine.txt").resolve()
    assert any("num_train_epochs = 3.0" in line for line in unlike)
    assert any("enable_liger_kernel" in line for line in unlike)


def test_what_the_command_says_holds(folder: Path) -> None:
    options = put(folder, "job.yaml", FACTORY)
    asked = RunOptions(plan=options.plan, lr=0.5, steps=9, lr_schedule="wsd", data="other.txt")
    _, told, unlike = planned_job(asked)
    assert (told.lr, told.steps, told.lr_schedule, told.data) == (0.5, 9, "wsd", "other.txt")
    assert not any("epochs" in line for line in unlike)


def test_a_yaml_of_axolotl(folder: Path) -> None:
    file, options, unlike = planned_job(put(folder, "job.yml", AXOLOTL))
    assert file.model.endswith("/tiny+qlora4") and file.plan.saved.preset == "full"
    assert (options.steps, options.lr_schedule, options.packing) == (11, "linear", "documents")
    assert any("adamw_bnb_8bit: states are trained in" in line for line in unlike)
    assert file.plan.precision.states != "int8"


def test_a_script_of_trl(folder: Path) -> None:
    file, options, _ = planned_job(put(folder, "job.sh", TRL))
    assert file.model.endswith("/tiny+lora4")
    assert (options.steps, options.seed, options.packing, options.lr_schedule) == (3, 5, "padded", "constant")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (FACTORY.replace("stage: sft", "stage: dpo"), "stage = dpo: gnomon run trains on text"),
        (FACTORY.replace("dataset: mine", "dataset: theirs"), "the data set theirs is not here; give --data"),
        (FACTORY.replace("cosine", "inverse_sqrt"), "lr_scheduler_type|inverse_sqrt"),
        (FACTORY.replace("model_name_or_path: tiny", "model_name_or_path: a/b"), "not known here"),
        (AXOLOTL + "rl: dpo\n", "rl = dpo"),
    ],
)
def test_what_is_not_trained_is_refused_by_its_line(text: str, said: str, folder: Path) -> None:
    with pytest.raises(InputError, match=said):
        planned_job(put(folder, "job.yaml", text))


def test_a_job_is_trained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    options = put(folder, "job.yaml", FACTORY)
    assert main(["run", options.plan, "--steps", "2", "--warmup-steps", "1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "the adapters alone are trained" in said and "not as the file says" in said and "loss" in said


@pytest.mark.parametrize(
    ("text", "learn"),
    [
        (FACTORY, "answers"),
        (FACTORY + "train_on_prompt: true\n", "all"),
        (AXOLOTL, "answers"),
        (AXOLOTL + "train_on_inputs: true\n", "all"),
    ],
)
def test_what_is_learnt_is_what_the_program_learns(text: str, learn: str, folder: Path) -> None:
    (folder / "job.yaml").write_text(text)
    _, options, _ = planned_job(RunOptions(plan=str(folder / "job.yaml")))
    assert options.learn == learn


def test_trls_default_is_all_of_a_conversation(folder: Path) -> None:
    for more, learn in (("", "completions"), ("--assistant_only_loss true", "answers")):
        _, options, _ = planned_job(put(folder, "job.sh", TRL.rstrip("\n") + f" {more}\n"))
        assert options.learn == learn


def test_projected_gradients_and_pages_are_said_and_trained_without(folder: Path) -> None:
    text = FACTORY.replace("finetuning_type: lora", "finetuning_type: full\nuse_galore: true")
    file, _, unlike = planned_job(put(folder, "job.yaml", text))
    assert file.plan.optimizer.low_rank is None
    assert any("galore: moments are of whole gradients" in line for line in unlike)
    file, _, _ = planned_job(put(folder, "job.yml", AXOLOTL.replace("adamw_bnb_8bit", "paged_adamw_8bit")))
    assert not file.plan.optimizer.paged


def test_a_part_of_a_model_is_trained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    text = FACTORY.replace("finetuning_type: lora", "finetuning_type: freeze\nfreeze_trainable_layers: 1")
    assert main(["run", put(folder, "job.yaml", text).plan, "--steps", "2", "--warmup-steps", "1"]) == 0
    assert "billion parameters are trained, the others frozen" in " ".join(capsys.readouterr().out.split())


TURNS = (
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "V"},
    {"role": "assistant", "content": "B"},
)
CHATML = "<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n%s<|im_end|>\n"
HEADED = "<|start_header_id|>%s<|end_header_id|>\n\n%s<|eot_id|>"
PHI = "<|user|>\n%s<|end|>\n<|assistant|>\n%s<|end|>\n"
WRITTEN = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n" + CHATML % ("U", "A") + CHATML % ("V", "B"),
    "llama3": "<s>"
    + HEADED % ("system", "S")
    + HEADED % ("user", "U")
    + HEADED % ("assistant", "A")
    + HEADED % ("user", "V")
    + HEADED % ("assistant", "B"),
    "zephyr": "<|system|>\nS</s><|user|>\nU</s><|assistant|>\nA</s><|user|>\nV</s><|assistant|>\nB</s>",
    "phi": "<|system|>\nS<|end|>\n" + PHI % ("U", "A") + PHI % ("V", "B"),
}
"""Template of LLaMA-Factory -> a conversation by its slots, written out by hand."""


@pytest.mark.parametrize("name", WRITTEN)
def test_a_template_of_llama_factory_writes_its_slots_and_learns_whole_answers(name: str) -> None:
    pytest.importorskip("jinja2")
    learnt = programs.find("llama-factory").learnt
    assert learnt is not None and (file := learnt({"template": name}).template) is not None
    chat = ChatTemplate(file.read_text("utf-8"), {"bos_token": "<s>", "eos_token": "</s>"}, name)
    text, spans = chat.render(TURNS, "here")
    assert text == WRITTEN[name]
    end = {"chatml": "<|im_end|>\n", "llama3": "<|eot_id|>", "zephyr": "</s>", "phi": "<|end|>\n"}[name]
    assert [text[start:stop] for start, stop in spans] == [f"A{end}", f"B{end}"]
    assert chat.render(TURNS[1:3], "here")[0].count("<") < text.count("<")


def test_qwen_s_default_system_stands_where_a_conversation_has_none() -> None:
    pytest.importorskip("jinja2")
    learnt = programs.find("llama-factory").learnt
    assert learnt is not None and (file := learnt({"template": "qwen"}).template) is not None
    text, _ = ChatTemplate(file.read_text("utf-8"), {}, "qwen").render(TURNS[1:3], "here")
    system = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    assert text == f"<|im_start|>system\n{system}<|im_end|>\n" + CHATML % ("U", "A")


def test_a_template_is_used_where_there_is_a_tokenizer_and_named_where_it_is_not_known(folder: Path) -> None:
    _, options, unlike = planned_job(put(folder, "job.yaml", FACTORY + "template: nobody\n"))
    assert options.chat_template is None and any(
        "template = nobody: conversations are written" in line for line in unlike
    )
    (folder / "tiny" / "tokenizer.json").write_text("{}")
    _, options, unlike = planned_job(put(folder, "job.yaml", FACTORY + "template: qwen3_nothink\n"))
    assert str(options.chat_template).endswith("chatml.jinja") and not any("template" in line for line in unlike)
