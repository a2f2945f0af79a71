"""OpenRLHF's launch scripts: the update of the trained network, by the DeepSpeed configuration that it builds.

What an option means was read from OpenRLHF/OpenRLHF at commit 3c3be62 (2026-08-13): openrlhf/cli/train_{sft,rm,dpo,
ppo_ray}.py, openrlhf/utils/deepspeed/deepspeed{,_utils}.py; scripts until 0.9 spell `--ds.zero_stage` `--zero_stage`,
and both are read. Leaves out generation, rewards, critic and reference model, which are listed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gnomon.formats.deepspeed import read as deepspeed
from gnomon.formats.format import Format, Sample
from gnomon.formats.given import Network, ReadContext
from gnomon.formats.job import Fields, Job, divides
from gnomon.formats.launched import dashed, launched
from gnomon.formats.shell import Launch
from gnomon.formats.trainer_words import flag, names_of
from gnomon.formats.trainers import adapted, model_of
from gnomon.plans import Saved

OLDER = {
    "pretrain": "model.model_name_or_path",
    "train_batch_size": "train.batch_size",
    "micro_train_batch_size": "train.micro_batch_size",
    "max_len": "data.max_len",
    "prompt_max_len": "data.prompt_max_len",
    "generate_max_len": "rollout.max_new_tokens",
    "zero_stage": "ds.zero_stage",
    "bf16": "ds.bf16",
    "param_dtype": "ds.param_dtype",
    "adam_offload": "ds.adam_offload",
    "zpg": "ds.zpg",
    "grad_accum_dtype": "ds.grad_accum_dtype",
    "overlap_comm": "ds.overlap_comm",
    "ring_attn_size": "ds.ring_attn_size",
    "ring_head_stride": "ds.ring_attn_head_stride",
    "ds_tensor_parallel_size": "ds.tensor_parallel_size",
    "packing_samples": "ds.packing_samples",
    "use_liger_kernel": "ds.use_liger_kernel",
    "deepcompile": "ds.deepcompile",
    "load_in_4bit": "ds.load_in_4bit",
    "lora_rank": "ds.lora.rank",
    "target_modules": "ds.lora.target_modules",
    "gradient_checkpointing": "model.gradient_checkpointing_enable",
    "actor_num_nodes": "actor.num_nodes",
    "actor_num_gpus_per_node": "actor.num_gpus_per_node",
    "use_dynamic_batch": "train.dynamic_batch_enable",
    "train_max_tokens_per_gpu": "train.max_tokens_per_gpu",
    "colocate_all_models": "train.colocate_all",
}
"""Names until 0.9 -> those since."""

IRRELEVANT = frozenset(
    """
    ckpt.* data.* eval.* logger.* adam.* muon.* rollout.* vllm.* algo.* critic.* reward.* ref.* actor.adam.* actor.lr*
    actor.min_lr* actor.eps* actor.dual_clip actor.entropy* actor.policy* actor.aux* actor.freeze* train.seed
    train.max_epochs train.num_episodes train.colocate* train.ema* train.enable_ema train.async* train.agent*
    local_rank train.force_on_policy train.full_determinism train.partial_rollout* lr_* min_lr_ratio max_norm use_ms
    use_wandb ds.attn_implementation ds.lora.alpha ds.lora.dropout ds.use_universal_ckpt ds.enable_sleep
    ds.value_head_prefix ds.experts_implementation model.beta model.ipo* model.label_smoothing model.nll* model.aux*
    model.pretrain_mode* *.gradient_checkpointing_reentrant model.loss_type model.compute* model.margin* wandb*
    actor.muon.* flash_attn save_* ckpt_* load_* logging_steps eval_* learning_rate l2 *dataset* *_key input_template
    apply_chat_template max_samples max_epochs seed vllm_* ref_* reward_* critic_* rollout_* colocate*
    *actor_learning_rate num_episodes init_kl_coef *normalize_reward advantage_estimator n_samples_per_prompt gamma
    lambd temperature top_p kl_* eps_clip* beta agent* use_tensorboard enforce_eager deepspeed_enable_sleep
    prompt_data* label_smoothing nll_loss_coef lora_alpha packing lora_dropout disable_fast_tokenizer adam_betas
    max_ckpt_* pretrain_data async* remote_rm_url warmup* lr_warmup_ratio multiturn use_kl_loss dynamic_filtering*
    overlong* stop_properly* value_* freezing* pretrain_mode tokenizer_chat_template
    """.split()
)

INEXPRESSIBLE = {
    "ds.use_liger_kernel": "Liger's fused kernels: a prediction without is too slow",
    "ds.deepcompile": "DeepSpeed's compiler: a prediction without is too slow",
    "ds.load_in_4bit": "frozen weights in four bits",
    "train.dynamic_batch_enable": "microbatches are packed by tokens; priced as microbatches of whole sequences",
}

UPDATE = "reinforcement learning: generation, rewards, critic and reference model are not priced, only the update"
PAIRS = "two answers a sample (and for DPO a reference model run forward) are not priced: one sequence a sample"


def _accepts(launch: Launch) -> bool:
    program = launch.program
    return program.startswith("openrlhf.cli.train") or "/train_" in program and program.endswith(".py")


def _looks(sample: Sample) -> bool:
    return not sample.values and sample.path.suffix != ".py" and "openrlhf.cli.train_" in sample.text


def _fields(path: Path, context: ReadContext) -> tuple[Fields, str, int | None]:
    """(fields by the newer names, program, devices that the launcher says)."""
    script = launched(path, context, _accepts, "a program of openrlhf.cli")
    values = {OLDER.get(name, name): value for name, value in dashed(script.launch.options).items()}
    options = {OLDER.get(name.lstrip("-"), name.lstrip("-")): text for name, text in script.options.items()}
    return script.fields(values, replace(context, settings=options)), script.launch.program, script.devices


def _model(f: Fields, context: ReadContext, part: str, folder: Path, assumed: list[str]) -> Network | str:
    named = next((key for key in (f"{part}.model_name_or_path", "model.model_name_or_path") if f.has(key)), "")
    network = model_of(f, named or f"{part}.model_name_or_path", context, folder, assumed)
    rank, four = f.integer("ds.lora.rank", 0, least=0), flag(f, "ds.load_in_4bit")
    targets = names_of(f.raw("ds.lora.target_modules"))
    if not rank:
        return network
    everything = () if "all-linear" in targets else targets
    return adapted(f, network, rank, everything, four_bits=four, named="ds.lora.target_modules")


def _config(f: Fields, part: str) -> dict[str, object]:
    """The DeepSpeed configuration that get_train_ds_config builds."""
    offload, dtype = flag(f, "ds.adam_offload"), str(f.raw("ds.param_dtype") or "bf16")
    f.ignore("ds.bf16")
    stage, zpg = f.integer("ds.zero_stage", 2, least=0), f.integer("ds.zpg", 1)
    kind = str(f.raw("optim") or f.raw(f"{part}.optim") or "adam")
    norm = f.raw("max_norm") if f.has("max_norm") else f.raw(f"{part}.max_norm")
    zero: dict[str, object] = {"stage": stage, "overlap_comm": flag(f, "ds.overlap_comm")}
    return {
        "optimizer": {"type": "Muon" if kind == "muon" else "AdamW", "params": {}},
        "zero_optimization": zero
        | ({"offload_optimizer": {"device": "cpu"}} if offload else {})
        | ({"zero_hpz_partition_size": zpg} if zpg > 1 else {}),
        dtype: {"enabled": True},
        "gradient_clipping": norm if isinstance(norm, (int, float)) else 1.0,
        "data_types": {"grad_accum_dtype": f.raw("ds.grad_accum_dtype")},
        "tensor_parallel": {"autotp_size": f.integer("ds.tensor_parallel_size", 1)},
        "train_micro_batch_size_per_gpu": f.integer("train.micro_batch_size", 8 if part == "model" else 1),
        "train_batch_size": f.integer("train.batch_size", 128),
    }


def _read(path: Path, context: ReadContext) -> Job:
    f, program, stated = _fields(path, context)
    learning = "ppo" in program
    part, assumed = ("actor" if learning else "model"), list[str]()
    if learning:
        stated = f.integer("actor.num_nodes", 1) * f.integer("actor.num_gpus_per_node", 8)
    seq_len = f.integer("data.max_len", 2048)
    if f.has("data.prompt_max_len") or f.has("rollout.max_new_tokens") and not f.has("data.max_len"):
        seq_len = f.integer("data.prompt_max_len", 1024) + f.integer("rollout.max_new_tokens", 1024)
    model = _model(f, context, part, path.resolve().parent, assumed)
    ring = f.integer("ds.ring_attn_size", 1)
    recompute = flag(f, f"{part}.gradient_checkpointing_enable") or flag(f, "model.gradient_checkpointing_enable")
    if not flag(f, "ds.packing_samples"):
        f.note_unpacked("ds.packing_samples", "false", seq_len)
    if learning:
        f.note_default("algorithm", program.rpartition(".")[2], UPDATE)
    elif "dpo" in program or "rm" in program:
        f.note_default("algorithm", program.rpartition(".")[2], PAIRS)
    values = _config(f, part)
    f.account(IRRELEVANT, INEXPRESSIBLE, ())
    devices = context.devices or stated
    if devices is not None:
        divides("devices", devices, "ds.ring_attn_size", ring)
        devices //= ring
    job = deepspeed.job_of(
        values,
        f"{path} (its DeepSpeed configuration)",
        context=replace(context, model=model, devices=devices, seq_len=context.seq_len or seq_len, settings={}),
        mixed_precision=None,
        saved=Saved(preset="full" if recompute else "none"),
    )
    mesh = replace(job.plan.mesh, cp=ring)  # ZeRO divides over the ranks of a ring too
    return replace(
        job,
        plan=replace(job.plan, mesh=mesh),
        devices=mesh.world_size,
        notes=(*f.notes, *job.notes),
        unexpressed=(*f.unexpressed, *job.unexpressed),
        assumed=(*assumed, *job.assumed),
        stated_devices=stated,
    )


FORMAT = Format(
    name="openrlhf",
    program="OpenRLHF/OpenRLHF 3c3be62",
    files="launch scripts of openrlhf.cli",
    looks=_looks,
    read=_read,
)
