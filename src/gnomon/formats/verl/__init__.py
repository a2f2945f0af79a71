"""verl's launch scripts: the update of the trained network in `main_ppo` and its like, and supervised training.

What a key means was read from verl-project/verl at commit 1dda039 (2026-08-22): verl/trainer/config/, verl/workers/
engine/{fsdp,megatron}/transformer_impl.py, verl/trainer/ppo/ray_trainer.py; scripts of 0.1 to 0.7 spell some keys
otherwise, and both are read. Leaves out generation, rewards, the critic and the reference model, which are listed, and
the engines VeOmni, torchtitan, Automodel and Megatron-lite, which are refused by name.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from gnomon.formats.format import Format, Sample
from gnomon.formats.given import Network, ReadContext
from gnomon.formats.job import Fields, Job, flatten, read_source
from gnomon.formats.launched import dashed, launched, overrides
from gnomon.formats.megatron.options import known_options
from gnomon.formats.megatron.read import job_of as megatron_job
from gnomon.formats.megatron_bridge.read import RENAMED
from gnomon.formats.shell import Launch
from gnomon.formats.trainer_words import flag, names_of
from gnomon.formats.trainers import AUTOCAST, BF16, Training, adapted, job_of, model_of
from gnomon.formats.yaml_file import read_yaml
from gnomon.plans import Layout
from gnomon.software import stack

IRRELEVANT = frozenset(
    """
    data* algorithm* trainer* reward* custom_reward_function* ray_kwargs* ray_init* hydra* checkpoint* global_profiler*
    actor_rollout_ref.rollout* actor_rollout_ref.ref* actor_rollout_ref.hybrid_engine critic* transfer_queue* rollout*
    *.optim.* *.use_kl_loss *.kl_loss* *.entropy_* *.clip_ratio* *.loss_* *.checkpoint* *.policy_loss* *.ppo_epochs
    *.shuffle *.data_loader_seed *.profiler* *.rollout_correction* *.tis_* *.freeze_vision_tower *.use_shm *.path
    *.trust_remote_code *.custom_chat_template *.external_lib *.tokenizer_path *.override_config* *.lora_alpha *.tau_*
    *.exclude_modules *.lora.* *.lora_adapter_path *.use_orig_params *.wrap_policy* *.use_torch_compile *.grad_clip
    *.dist_checkpointing* *.use_dist_checkpointing *.use_mbridge *.vanilla_mbridge *.use_remove_padding *.calculate_*
    *.load_weight *.nccl_timeout *.full_determinism *.strategy *.forward_prefetch *.ppo_infer* *.forward_max* *.*_infer
    optim.* async_training* distillation* *.mtp* *.router_replay* model_engine engine actor optim@* model@* model.path
    use_remove_padding *.use_prefix_grouper *.log_prob* *.forward_only *.attn_implementation *.kl_ctrl* *.dtype
    *.dist_ckpt* *.distrib_optim_* *.rollout_n *.bypass* *.pad_mode *.truncation *.balance_dp_token reward_model* nnodes
    n_gpus_per_node *.seed *.pad_* *.model_config* lora.* *.qat.* *.hf_config_path *ulysses_sequence_parallel_size
    """.split()
)

INEXPRESSIBLE = {
    "*.param_offload": "parameters are on the host while another phase runs: the transfers are not priced",
    "*.optimizer_offload": "states are on the host while another phase runs: the transfers are not priced",
    "*.use_liger": "Liger's fused kernels: a prediction without is too slow",
    "*.use_fused_kernels": "loss fused with the last linear: a prediction without is too large",
    "*.enable_activation_offload": "saved activations wait on the host: memory is too large",
    "*.tiled_mlp.enabled": "feed-forward by pieces of the sequence: memory is too large",
    "*.override_*_config.*": "an option of Megatron-Core that is not described here",
    "*.use_megatron_fsdp": "Megatron's FSDP in place of its distributed optimizer",
    "*.dynamic_context_parallel": "context parallelism that differs by sequence",
}

UPDATE = "reinforcement learning: generation, rewards, critic and reference model are not priced, only the update"
PACKED = "batches are packed by tokens; priced as {micro} sequences of {seq_len} tokens"
MEGATRON_NAMES = {"linear_qkv": ("q_proj", "k_proj", "v_proj"), "linear_proj": ("o_proj",)} | {
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Megatron's linears -> those of Hugging Face's models."""


class SettingsAt(NamedTuple):
    """The places of the trained network's settings in the file."""

    at: str
    model: str
    fsdp: str
    megatron: str


_AT = "actor_rollout_ref"
ACTOR = SettingsAt(f"{_AT}.actor", f"{_AT}.model", f"{_AT}.actor.fsdp_config", f"{_AT}.actor.megatron")
SUPERVISED = SettingsAt("engine", "model", "engine", "engine")


def _accepts(launch: Launch) -> bool:
    keys = ("actor_rollout_ref.", "model.path=", "model.partial_pretrain=")
    return any(word.lstrip("+").startswith(keys) for word in launch.options)


def _looks(sample: Sample) -> bool:
    if sample.values:
        return sample.has("actor_rollout_ref")
    supervised = "verl" in sample.text and "sft_trainer" in sample.text
    return sample.path.suffix != ".py" and ("actor_rollout_ref." in sample.text or supervised)


def _engine(f: Fields, part: SettingsAt) -> str:
    """Reads the engine, fsdp or megatron. InputError for another."""
    keys = ("model_engine", "engine", "engine@engine", "actor@actor_rollout_ref.actor", f"{part.at}.strategy")
    named = next((str(f.peek(key)) for key in keys if f.peek(key)), "")
    f.ignore(*keys)
    if not named and any(name.startswith(f"{part.at}.megatron.") for name in f.names()):
        named = "megatron"
    kind = named.removesuffix("_actor") or "fsdp"
    if kind not in ("fsdp", "fsdp2", "dp", "megatron", "mcore"):
        f.fail("engine", f"verl's engine {kind!r} is not read, fsdp and megatron are: --set {keys[0]}=fsdp")
    return "megatron" if kind in ("megatron", "mcore") else "fsdp"


def _batch(f: Fields, part: SettingsAt, seq_len: int, data: int, parallel: int) -> tuple[int, int]:
    """(sequences of a microbatch, of a step) on `data` ranks, whose sequences are divided between `parallel`."""
    if part is ACTOR:
        # verl counts prompts, of which each has n answers.
        total = f.integer(f"{part.at}.ppo_mini_batch_size", 256) * f.integer("actor_rollout_ref.rollout.n", 1)
        name, default = f"{part.at}.ppo_micro_batch_size_per_gpu", None
        dynamic, limit = flag(f, f"{part.at}.use_dynamic_bsz"), f.integer(f"{part.at}.ppo_max_token_len_per_gpu", 16384)
    else:
        total, name, default = f.integer("data.train_batch_size", 256), "data.micro_batch_size_per_gpu", 4
        newer = not f.has("model.partial_pretrain")  # until 0.5 nothing was packed
        dynamic, limit = flag(f, "data.use_dynamic_bsz", newer), f.integer("data.max_token_len_per_gpu", 8192)
    share, whole = max(1, total // data), name.removesuffix("_per_gpu")
    if dynamic:
        f.ignore(name, whole)
        # The limit is of a rank, and `parallel` ranks divide each sequence.
        fits = max(1, limit * parallel // seq_len)
        # 1 divides every share, so that there always is one.
        micro = max(n for n in range(1, min(share, fits) + 1) if share % n == 0)
        f.note_default("use_dynamic_bsz", "true", PACKED.format(micro=micro, seq_len=seq_len))
        return micro, total
    if f.has(whole) and not f.has(name):
        return max(1, f.integer(whole) // data), total
    if default is None and not f.has(name):
        f.fail(name, f"{name} is missing: --set {name}=1")
    return min(share, f.integer(name, default)), total


def _model(f: Fields, part: SettingsAt, context: ReadContext, folder: Path, assumed: list[str]) -> Network | str:
    """The network, with adapters where it has them."""
    at = part.model
    network = model_of(
        f, f"{at}.partial_pretrain" if f.has(f"{at}.partial_pretrain") else f"{at}.path", context, folder, assumed
    )
    f.ignore(f"{at}.path", f"{at}.target_modules", f"{at}.lora.target_modules")
    rank = f.integer(f"{at}.lora_rank", 0, least=0) or f.integer(f"{at}.lora.rank", 0, least=0)
    if not rank:
        return network
    target_names = names_of(f.raw(f"{at}.target_modules") or f.raw(f"{at}.lora.target_modules"))
    targets = tuple(name for one in target_names for name in MEGATRON_NAMES.get(one, (one,)))
    return adapted(
        f, network, rank, () if "all-linear" in targets else targets, four_bits=False, named=f"{at}.target_modules"
    )


def _fsdp(f: Fields, part: SettingsAt, context: ReadContext, model: Network | str, seq_len: int) -> Training:
    at, devices = part.fsdp, context.devices or 1
    places = (f"{part.at}.", f"{part.fsdp}.", "")  # the actor's is older, and goes before its engine's
    parallel = next((n for at in places if (n := f.integer(f"{at}ulysses_sequence_parallel_size", 1)) > 1), 1)
    micro, total = _batch(f, part, seq_len, max(1, devices // parallel), parallel)
    group = f.integer(f"{at}.fsdp_size", -1, least=-1)
    reduce = str(f.raw(f"{at}.mixed_precision.reduce_dtype") or "fp32")
    loaded = str(f.raw(f"{at}.model_dtype") or f.raw("model.fsdp_config.model_dtype") or "fp32")
    f.ignore(f"{at}.mixed_precision.param_dtype", f"{at}.mixed_precision.buffer_dtype", "model.fsdp_config.model_dtype")
    mixed = replace(AUTOCAST, reduce="bf16" if reduce in ("bf16", "bfloat16") else "fp32")
    return Training(
        model=model,
        micro=micro,
        total=total,
        seq_len=seq_len,
        zero=3 if flag(f, f"{at}.reshard_after_forward", True) else 2,
        replicas=max(1, devices // group) if 0 < group < devices else 1,
        cp=parallel,
        layout=Layout(context="ulysses"),
        offload=flag(f, f"{at}.offload_policy"),
        recompute=flag(f, f"{part.model}.enable_gradient_checkpointing", True),
        precision=BF16 if loaded in ("bf16", "bfloat16") else mixed,
    )


def _megatron(f: Fields, part: SettingsAt, context: ReadContext, model: Network | str, seq_len: int) -> Job:
    at = part.megatron
    values: dict[str, object] = {"bf16": True, "use_distributed_optimizer": True, "seq_length": seq_len}
    for name in f.names():
        inner = name.removeprefix(f"{at}.")
        key = inner.rpartition(".")[2]
        named = inner == key or inner.startswith(("override_transformer_config", "override_ddp_config"))
        key = RENAMED.get(key, key)
        if name != inner and named and key in known_options():
            values[key] = f.raw(name)
    tp, pp, cp = (
        int(str(values.get(f"{axis}_parallel_size") or 1)) for axis in ("tensor_model", "pipeline_model", "context")
    )
    values["sequence_parallel"] = flag(f, f"{at}.sequence_parallel", True) and tp > 1
    if values.get("recompute_granularity") is None:
        values = {key: value for key, value in values.items() if not key.startswith("recompute_")}
    elif values["recompute_granularity"] == "selective":
        values |= {"recompute_method": None, "recompute_num_layers": None}
    micro, total = _batch(f, part, seq_len, max(1, (context.devices or 1) // (tp * pp * cp)), cp)
    values |= {"micro_batch_size": micro, "global_batch_size": total}
    f.ignore(f"{part.model}.enable_gradient_checkpointing")
    job_context = replace(context, model=model, settings={}, seq_len=None)
    return megatron_job(Fields(values, "megatron"), context=job_context, name="verl-job", base=stack("megatron-lm"))


def _fields(path: Path, context: ReadContext) -> tuple[Fields, int | None]:
    """(fields, devices that the launcher says)."""
    if path.suffix.lower() in (".yaml", ".yml"):
        text, file = read_source(path)
        return Fields(flatten(read_yaml(text, file)), file, context), None
    script = launched(path, context, _accepts, "actor_rollout_ref.model.path or model.path")
    values = overrides(script.launch.options)
    if "megatron" in str(dashed(script.launch.options).get("config_name")):
        values.setdefault("model_engine", "megatron")
    return script.fields(values, replace(context, settings=script.options)), script.devices


def _devices(f: Fields) -> int | None:
    """Multiplies nodes by devices; None where the script takes one of them from elsewhere."""
    nodes, per_node = f.peek("trainer.nnodes") or 1, f.peek("trainer.n_gpus_per_node") or 8
    return nodes * per_node if isinstance(nodes, int) and isinstance(per_node, int) else None


def _read(path: Path, context: ReadContext) -> Job:
    f, stated = _fields(path, context)
    part = ACTOR if any(name.startswith("actor_rollout_ref.") for name in f.names()) else SUPERVISED
    assumed: list[str] = []
    if part is ACTOR:
        stated = _devices(f)
        seq_len = f.integer("data.max_prompt_length", 512) + f.integer("data.max_response_length", 512)
        f.note_default("algorithm", str(f.peek("algorithm.adv_estimator") or "gae"), UPDATE)
    else:
        seq_len = f.integer("data.max_length", 1024)
    context = replace(context, devices=context.devices or stated)
    engine, seq_len = _engine(f, part), context.seq_len or seq_len
    model = _model(f, part, context, path.resolve().parent, assumed)
    if engine == "fsdp":
        training = _fsdp(f, part, context, model, seq_len)
        f.account(IRRELEVANT, INEXPRESSIBLE, ())
        return job_of(f, context, training, assumed, stated)
    job = _megatron(f, part, context, model, seq_len)
    f.account(IRRELEVANT, INEXPRESSIBLE, ())
    return replace(
        job,
        notes=(*f.notes, *job.notes),
        unexpressed=(*f.unexpressed, *job.unexpressed),
        assumed=(*assumed, *job.assumed),
        stated_devices=stated,
    )


FORMAT = Format(
    name="verl",
    program="verl-project/verl 1dda039",
    files="launch scripts of main_ppo and sft_trainer",
    looks=_looks,
    read=_read,
)
