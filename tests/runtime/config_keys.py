"""Keys of config.json at unusual values, each model beside transformers': `cases()`, and `judge(case)` of one.

A case is one model type, tiny, with one key (or one block of rotary angles) changed: to every value of VALUES, to
values of its default's type, removed, or added where the class has no such key. transformers builds the model from it
with random weights in float64 and trains it (train mode, labels of -100 among others); ours reads the same file, and
what transformers writes for it. Both spellings must give transformers' loss to 1e-9 and gradients to 1e-8 of their
largest element, or be refused by an error of ours. Dropout, which the runtime leaves out and says so, is put to 0 in
their model, and the note must name its key. Leaves out weights in two formats, several processes and bfloat16.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from runtime.hf_models import CONFIGS, LLAMA3, YARN, Wide, quiet
from torch import Tensor

from gnomon.errors import GnomonError
from gnomon.formats.huggingface.known import RUNNABLE, layout
from gnomon.formats.huggingface.runnable import Runnable, read_runnable
from gnomon.runtime.module.one_process import OneProcess
from gnomon.runtime.parameters.weights import Folder, WeightReader, settled

ABSENT = "<absent>"
"""In place of a value: the file does not have the key."""
TOKENS, SEQUENCES, CLASSES = 24, 2, 5
MASKED = ("bert", "roberta", "xlm-roberta")
SEQ2SEQ = ("t5", "mt5")

ACTIVATIONS = "silu swish gelu relu gelu_new gelu_fast gelu_pytorch_tanh quick_gelu relu2 tanh mish sigmoid".split()
IDS = [None, 5, 95, -1]
FACTORS = [0.5, 2.0, 0.0]
EPSILONS = [1e-3, 0.1, 0.0]
ACTIVATION_KEYS = ("hidden_act", "activation", "activation_function", "hidden_activation", "mlp_hidden_act")
ACTIVATION_KEYS = (*ACTIVATION_KEYS, "mamba_hidden_act")
EPSILON_KEYS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
FACTOR_KEYS = tuple(
    "embedding_multiplier residual_multiplier attention_multiplier logits_scaling logit_scale routed_scaling_factor "
    "clip_qkv swiglu_limit swiglu_alpha moe_norm_min attn_logit_softcapping final_logit_softcapping "
    "embedding_fraction query_pre_attn_scalar".split()
)
SIZES = {"hidden_size": 40, "d_model": 40, "n_embd": 40, "num_hidden_layers": 3, "num_layers": 3, "n_layers": 3}
SIZES |= {"n_layer": 3, "vocab_size": 101}

VALUES: Mapping[str, list[Any]] = {
    **dict.fromkeys(ACTIVATION_KEYS, ACTIVATIONS),
    **dict.fromkeys(EPSILON_KEYS, EPSILONS),
    **dict.fromkeys(FACTOR_KEYS, FACTORS),
    **{key: [value] for key, value in SIZES.items()},
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), IDS),
    "decoder_start_token_id": [0, 5],
    "intermediate_size": [40, None],
    "num_attention_heads": [2, 8],
    "num_heads": [2, 8],
    "n_head": [2, 8],
    "n_heads": [2, 8],
    "num_key_value_heads": [1, 4, 3, None],
    "num_kv_heads": [1, 2, 4],
    "head_dim": [4, 16, None],
    "max_position_embeddings": [16, 24, 128],
    "n_positions": [16, 24, 128],
    "max_seq_len": [16, 24, 128],
    "original_max_position_embeddings": [8, 32],
    "sliding_window": [None, 4, 30, 0],
    "sliding_window_pattern": [1, 2, "LG", None],
    "_sliding_window_pattern": [2],
    "window_size": [3, 30],
    "max_window_layers": [0, 1],
    "use_sliding_window": [True],
    "layer_types": [
        ["full_attention"] * 2,
        ["sliding_attention"] * 2,
        ["full_attention", "sliding_attention"],
        ["full_attention"] * 4,
        ["full_attention", "sliding_attention"] * 2,
        ["sliding_attention"] * 6,
        ["chunked_attention"] * 2,
        None,
    ],
    "rope_theta": [500.0, 10000],
    "partial_rotary_factor": [0.5, 0.25, 1.0],
    "rotary_pct": [0.5, 1.0],
    "rotary_emb_base": [500],
    "rotary_dim": [4, 8, 2, None],
    "rope_local_base_freq": [77.0],
    "rope_interleave": [False, True],
    "no_rope_layers": [[1, 0], [0, 0], [1, 1, 1, 0], [0, 0, 1, 1], []],
    "no_rope_layer_interval": [1, 2],
    "mlp_only_layers": [[0], [1], []],
    "decoder_sparse_step": [2, 3],
    "num_experts_per_tok": [1, 3, 4],
    "num_local_experts": [2, 8],
    "num_experts": [2, 8],
    "moe_num_experts": [2, 8],
    "moe_k": [1, 3],
    "n_routed_experts": [16],
    "n_shared_experts": [0, 2, None],
    "moe_num_shared_experts": [0, 2],
    "first_k_dense_replace": [0, 2],
    "moe_layer_start_index": [0, 2],
    "moe_layer_end_index": [-1, 0, 1],
    "moe_layer_interval": [1, 2],
    "n_group": [1, 2, 4, None],
    "topk_group": [1, 2, None],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc"],
    "scoring_func": ["softmax", "sigmoid"],
    "norm_topk_prob": [True, False],
    "router_aux_loss_coef": [0.5, 0.0],
    "router_jitter_noise": [0.1],
    "q_lora_rank": [None, 8],
    "qk_head_dim": [12],
    "num_mtp_layers": [0, 2],
    "num_nextn_predict_layers": [0, 1],
    "time_step_limit": [[0.0, 0.5], [0.01, 0.1], [0.0, float("inf")]],
    "time_step_min": [0.01, 0.5],
    "time_step_max": [0.2],
    "time_step_floor": [0.01],
    "time_step_rank": ["auto", 4],
    "chunk_size": [4, 24, 256],
    "mamba_chunk_size": [4, 24],
    "n_groups": [1, 4],
    "mamba_n_groups": [2, 4],
    "expand": [4],
    "mamba_expand": [4],
    "attn_layer_indices": [[], [0], [0, 1], None],
    "layers_block_type": [["mamba", "attention"], ["full_attention", "linear_attention"], ["moe", "mlp"], None],
    "position_embedding_type": ["rope", "nope", "absolute", "relative_key"],
    "attention_types": [[[["global"], 2]], [[["local"], 2]], None],
    "attn_config": [
        {"alibi": False},
        {"softmax_scale": 0.3},
        {"clip_qkv": 0.05},
        {"qk_ln": True},
        {"alibi_bias_max": 4},
        {"prefix_lm": True},
        {"attn_type": "multiquery_attention"},
        {"attn_pdrop": 0.5},
        {"attn_impl": "torch"},
    ],
    "expansion_ratio": [2],
    "ffn_dim": [40],
    "ffn_hidden_size": [40],
    "n_inner": [40],
    "d_ff": [40],
    "d_kv": [4, 16],
    "word_embed_proj_dim": [16, 32],
    "feed_forward_proj": "relu gated-gelu gelu gated-silu silu gated-relu".split(),
    "dense_act_fn": ["relu", "silu", "gelu_new"],
    "is_gated_act": [True, False],
    "scale_decoder_outputs": [True, False],
    "relative_attention_num_buckets": [8],
    "relative_attention_max_distance": [20],
    "use_bidirectional_attention": [True, False],
    "norm_type": ["layernorm"],
    "num_ln_in_parallel_attn": [1, 2],
    "qk_norm_type": ["per_layer", "per_head"],
    "mlp_type": ["default", "gated"],
    "chunk_size_feed_forward": [0, 4],
    "problem_type": ["regression", None],
    "image_size": [6, [8, 8]],
    "patch_size": [4],
    "num_channels": [1],
    "type_vocab_size": [1, 3],
    "moe_latent_size": [8],
    "mamba_d_head": ["auto", 4],
    "mamba_conv_bias": [False],
    "num_logits_to_keep": [3],
}
"""Key -> values that are tried in every class that has it; others get values by the type of their default."""

YARN_32 = {**YARN, "factor": 4.0}
ROTARY: Mapping[str, Mapping[str, Any]] = {
    "theta": {"rope_type": "default", "rope_theta": 500.0},
    "partial": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "linear partial": {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {key: value for key, value in LLAMA3.items() if key != "rope_theta"},
    "yarn": {key: value for key, value in YARN.items() if key != "rope_theta"},
    "yarn, factor stated": {**YARN, "attention_factor": 0.7},
    "yarn, mscale": {**YARN, "mscale": 0.7},
    "yarn, mscale_all_dim": {**YARN, "mscale_all_dim": 0.8},
    "yarn, both": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    "yarn, both 1": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn, betas": {**YARN, "beta_fast": 8, "beta_slow": 2},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, no original": {"rope_type": "yarn", "factor": 4.0},
    "yarn, no factor": {"rope_type": "yarn", "original_max_position_embeddings": 16},
    "yarn, factor under 1": {**YARN, "factor": 0.5},
    "longrope": {
        "rope_type": "longrope",
        "long_factor": [1.0, 1.5, 2.0, 4.0],
        "short_factor": [1.0, 1.0, 1.25, 1.5],
        "original_max_position_embeddings": 16,
    },
    "longrope, short": {
        "rope_type": "longrope",
        "long_factor": [1.0, 1.5, 2.0, 4.0],
        "short_factor": [1.0, 1.0, 1.25, 1.5],
        "original_max_position_embeddings": 32,
        "factor": 2.0,
    },
    "proportional": {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    "by layer, equal": {
        "full_attention": {"rope_type": "default", "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
    "by layer": {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 77.0},
    },
    "by layer, yarn": {
        "full_attention": {**YARN, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
    "none": {},
}
"""Blocks of rotary angles, as rope_parameters and as rope_scaling (whose older word for the type is `type`)."""

FOREIGN = (*EPSILON_KEYS, *FACTOR_KEYS, *ACTIVATION_KEYS)
FOREIGN = (
    *FOREIGN,
    *"""
    rope_theta partial_rotary_factor rotary_pct rotary_emb_base rotary_dim rope_local_base_freq rope_interleave
    norm_topk_prob n_group topk_group topk_method scoring_func router_aux_loss_coef router_jitter_noise time_step_min
    time_step_limit sliding_window sliding_window_pattern _sliding_window_pattern use_sliding_window max_window_layers
    layer_types layer_norm_eps head_dim num_key_value_heads use_bidirectional_attention attention_bias mlp_bias qkv_bias
    use_bias bias use_qkv_bias use_qk_norm qk_layernorm use_parallel_residual alibi multi_query scale_decoder_outputs
    dense_act_fn is_gated_act original_max_position_embeddings chunk_size_feed_forward position_embedding_type
    num_nextn_predict_layers q_lora_rank qk_head_dim num_logits_to_keep add_cross_attention is_decoder
    tie_encoder_decoder tie_word_embeddings n_inner residual_in_fp32 initializer_range problem_type
    hidden_dropout embd_pdrop layerdrop attention_dropout hidden_dropout_prob moe_layer_freq mlp_only_layers
    decoder_sparse_step no_rope_layers attn_temperature_tuning output_router_logits type_vocab_size max_seq_len
    """.split(),
)
"""Keys that some class knows, given to all."""

FREE = frozenset(
    """
    transformers_version architectures output_hidden_states return_dict id2label label2id initializer_range
    initializer_factor use_cache model_type rope_parameters dtype torch_dtype
    """.split()
)
"""Keys of a class that are no cases of their own: names, initial weights, and rotary angles, which have ROTARY."""

NOT_TO_REMOVE = 512
"""A size that the class fills in above this is not left out: a large model would be built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One file."""

    kind: str
    """model_type."""
    changes: Mapping[str, Any]
    """Keys of the file and their values; ABSENT removes one."""

    def __str__(self) -> str:
        return f"{self.kind} {json.dumps(dict(self.changes))}"

    def values(self) -> dict[str, Any]:
        """The file."""
        changed = base(self.kind) | copy.deepcopy(dict(self.changes))
        return {"model_type": self.kind} | {key: value for key, value in changed.items() if value != ABSENT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Of one case."""

    what: Literal["equal", "refused", "silent", "crash", "theirs"]
    """theirs: transformers takes no such file, or it has a model too large, and ours was not judged."""
    message: str = ""


def base(kind: str) -> dict[str, Any]:
    """A tiny file of the type, with keys that its class has and no dropout."""
    values = copy.deepcopy(dict(CONFIGS[kind]))
    known = set(_defaults(kind)) | set(_class(kind).attribute_map)
    values = {key: value for key, value in values.items() if key in known or key in ("rotary_dim", "num_labels")}
    values |= {key: 0.0 for key, value in _defaults(kind).items() if _is_dropout(key, value)}
    more = {"deepseek_v3": {"routed_scaling_factor": 2.5}, "nemotron_h": {"num_experts_per_tok": 2}}
    more |= {
        "dots1": {"norm_topk_prob": False},
        **{kind: {"decoder_start_token_id": 0} for kind in SEQ2SEQ},
    }
    return values | more.get(kind, {})


def _is_dropout(key: str, value: Any) -> bool:
    return (
        ("drop" in key or key.endswith("_pdrop"))
        and isinstance(value, float)
        and not key.startswith(("classifier", "summary"))
    )


def _class(kind: str) -> Any:
    import transformers

    return transformers.CONFIG_MAPPING[kind]


@cache
def _defaults(kind: str) -> Mapping[str, Any]:
    """Every key of the class, with the value that it has where the file has none."""
    usual = _class(kind)().to_dict()
    return {field.name: usual.get(field.name, field.default) for field in dataclasses.fields(_class(kind))} | usual


def _tried(key: str, kind: str) -> list[Any]:
    """Unusual values of a key."""
    if key in VALUES:
        return VALUES[key]
    usual, here = _defaults(kind).get(key), base(kind).get(key)
    value = here if here is not None else usual
    if isinstance(value, bool):
        return [not value, value]
    if _is_dropout(key, value):
        return [0.5]
    if isinstance(value, float):
        return [value * 2 + 0.05, 0.5]
    if isinstance(value, int):
        return [value * 2, max(1, value // 2)]
    if isinstance(value, str):
        return ["unusual"]
    return [True, 2] if value is None else []


def cases(kinds: tuple[str, ...] = tuple(RUNNABLE)) -> Iterator[Case]:
    """Every case of these model types, each once."""
    for kind in kinds:
        seen: set[str] = set()
        for changes in _changes(kind):
            case = Case(kind=kind, changes=changes)
            if str(case) not in seen:
                seen.add(str(case))
                yield case


def _changes(kind: str) -> Iterator[Mapping[str, Any]]:
    yield {}
    defaults, here = _defaults(kind), base(kind)
    keys = sorted(({*defaults, *here, *_class(kind).attribute_map, *FOREIGN}) - FREE)
    keys = [key for key in keys if not key.startswith("_") or key.startswith("_sliding")]
    for key in keys:
        for value in _tried(key, kind):
            if value != here.get(key, ABSENT):
                yield {key: value}
    for key in here:
        usual = defaults.get(key)
        if not (isinstance(usual, int) and not isinstance(usual, bool) and usual > NOT_TO_REMOVE):
            yield {key: ABSENT}
    for block in ROTARY.values():
        yield {"rope_parameters": block}
        older = {("type" if key == "rope_type" else key): value for key, value in block.items()}
        theta = older.pop("rope_theta", None)
        yield {"rope_parameters": ABSENT, "rope_scaling": older or None, "rope_theta": theta or 10000.0}
    yield {"rope_parameters": ABSENT}


def judge(case: Case) -> Verdict:
    """Both spellings of the file."""
    raw = case.values()
    top = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        with quiet(), Wide():
            return _judge(case.kind, raw, top)
    finally:
        shutil.rmtree(top, ignore_errors=True)


def _read(text: str) -> Runnable | Verdict:
    try:
        return read_runnable(text, "it")
    except GnomonError as error:
        return Verdict(what="refused", message=str(error))
    except Exception as error:  # what a reader must not let through
        return Verdict(what="crash", message=f"reading: {type(error).__name__}: {error}")


def _judge(kind: str, raw: Mapping[str, Any], top: Path) -> Verdict:
    read = [_read(json.dumps(raw))]
    try:
        config = config_of(kind, raw)
        saved = config.to_json_string()
    except Exception as error:  # whatever their validation raises
        if not isinstance(read[0], Runnable):
            return read[0]
        return Verdict(what="theirs", message=f"{type(error).__name__}: {error}")
    read.append(_read(saved))
    for one in read:
        if isinstance(one, Verdict) and one.what == "crash":
            return one
    runnable = [one for one in read if isinstance(one, Runnable)]
    if not runnable:
        return next(one for one in read if isinstance(one, Verdict))
    dropped = _without_dropout(config, json.loads(saved))
    for one in runnable:
        if dropped and not any("dropout" in note and "left out" in note for note in one.notes):
            return Verdict(what="silent", message=f"{', '.join(dropped)} left out without a note")
    graphs = [runnable[0]] if len(runnable) == 1 or runnable[0].graph == runnable[1].graph else runnable
    try:
        their = _Theirs(kind, config, raw, top)
    except Exception as error:
        return Verdict(what="theirs", message=f"{type(error).__name__}: {error}")
    found = [_compare(one, their) for one in graphs]
    order = ("crash", "silent", "equal", "refused")
    worst = min(found, key=lambda verdict: order.index(verdict.what))
    if worst.what == "equal" and len(runnable) < 2:
        refused = next(one for one in read if isinstance(one, Verdict))
        return Verdict(what="equal", message=f"one spelling is refused: {refused.message}")
    return worst


def _without_dropout(config: Any, values: Mapping[str, Any]) -> list[str]:
    """Puts every dropout of the config to 0; those that were on."""
    found = []
    for key, value in values.items():
        if _is_dropout(key, value) and value:
            found.append(key)
            setattr(config, key, 0.0)
    inner = getattr(config, "attn_config", None)
    if inner is not None and getattr(inner, "attn_pdrop", 0.0):
        found.append("attn_pdrop")
        inner.attn_pdrop = 0.0
    return found


def config_of(kind: str, raw: Mapping[str, Any]) -> Any:
    """transformers' config of a file."""
    return _class(kind).from_dict(copy.deepcopy(dict(raw)))


def their_model(kind: str, config: Any) -> Any:
    """transformers' model in float64, in train mode, with random weights everywhere: norms and biases too."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    if kind in MASKED:
        auto = transformers.AutoModelForMaskedLM
    elif kind in SEQ2SEQ:
        auto = transformers.AutoModelForSeq2SeqLM
    elif kind == "vit":
        auto = transformers.AutoModelForImageClassification
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation="eager").to(torch.float64).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.add_(torch.randn_like(buffer) * 0.1)
    return model


class _Theirs:
    """transformers' model: its loss and gradients, its weights and their gradients as folders."""

    def __init__(self, kind: str, config: Any, raw: Mapping[str, Any], top: Path) -> None:
        model = their_model(kind, config)
        vocab = raw.get("vocab_size", 96)
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(3, vocab, (SEQUENCES, TOKENS), generator=generator)
        labels = torch.randint(3, vocab, (SEQUENCES, TOKENS), generator=generator)
        ids[0, 4], ids[1, :3], labels[:, 2:4] = 5, 5, -100
        self.given: dict[str, Tensor] = {"input_ids": ids, "labels": labels}
        if kind == "vit":
            size = raw.get("image_size", 8)
            size = size if isinstance(size, list) else [size, size]
            image = torch.randn((SEQUENCES, raw.get("num_channels", 3), *size), generator=generator)
            classes = torch.randint(0, CLASSES, (SEQUENCES,), generator=generator)
            self.given = {"pixel_values": image, "image": image, "labels": classes}
            loss = model(pixel_values=image, labels=classes).loss
        elif kind in SEQ2SEQ:
            loss = model(input_ids=ids, labels=labels).loss
            self.given["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
        elif kind in MASKED:
            self.given["token_type_ids"] = torch.zeros_like(ids)
            loss = model(**self.given).loss
        else:
            loss = model(**self.given, use_cache=False).loss
            self.given["labels"] = torch.cat((labels[:, 1:], torch.full((SEQUENCES, 1), -100)), 1)
        if not bool(torch.isfinite(loss)):
            raise ValueError(f"their loss is {float(loss.detach())}")
        loss.backward()
        self.loss, self._model, self._top = float(loss.detach()), model, top
        model.save_pretrained(top / "weights")
        self._gradients: Path | None = None

    @property
    def weights(self) -> Path:
        """Folder of them."""
        return self._top / "weights"

    def gradients(self) -> Path:
        """Folder with every parameter's gradient in its place."""
        if self._gradients is None:
            self._gradients = self._top / "gradients"
            with torch.no_grad():
                for parameter in self._model.parameters():
                    parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
                for _, buffer in self._model.named_buffers():
                    buffer.zero_()
            self._model.save_pretrained(self._gradients)
        return self._gradients


def _compare(read: Runnable, their: _Theirs) -> Verdict:
    try:
        made = Folder.of(their.weights)
        where = settled(made, layout(read.graph, read.model_type))
        ours = OneProcess(read.graph, values=WeightReader(made, where), dtype=torch.float64)
        names = {tensor.name for tensor in read.graph.inputs}
        given = {name: value for name, value in their.given.items() if name in names}
        count = int((given["labels"] != -100).sum())
        loss = ours.loss(given, count=count)
    except GnomonError as error:
        return Verdict(what="refused", message=str(error))
    except Exception as error:
        return Verdict(what="crash", message=f"running: {type(error).__name__}: {error}")
    expected = WeightReader(Folder.of(their.gradients()), where)
    worst, name = 0.0, ""
    largest = max(float(expected(slot).abs().max()) for slot in ours.slots)
    for slot in ours.slots:
        wanted = expected(slot)
        off = float((ours.gradient(slot) - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6 * largest))
        if not off <= worst:
            worst, name = off, slot.name
    off = abs(loss / their.loss - 1)
    if off < 1e-9 and worst < 1e-8:
        return Verdict(what="equal")
    return Verdict(what="silent", message=f"loss off by {off:.1e}, gradient of {name} by {worst:.1e}")
