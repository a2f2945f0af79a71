"""Hugging Face `config.json` to a Graph.

`read_hf_config(text, name)` returns a `HfModel`: the Graph, and notes on what the file asks for that the Graph leaves
out. Absent keys mean what the `transformers` configuration classes (4.57) make of them, except that sizes which those
would fill with one particular model's are required here. A key that changes the mathematics and is not understood is an
error.
Leaves out: weights, tokenizers, model types not in READERS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from gnomon.errors import CatalogueError, GraphError, InputError, nearest
from gnomon.formats.given import setting_value
from gnomon.formats.huggingface.decoders import DECODERS
from gnomon.formats.huggingface.generic import SAME_KEYS, SHAPES, generic_decoder
from gnomon.formats.huggingface.hybrids import HYBRIDS
from gnomon.formats.huggingface.mixtures import MIXTURES
from gnomon.formats.huggingface.nested import language_model
from gnomon.formats.huggingface.numerics import numerics_of
from gnomon.formats.huggingface.older import OLDER
from gnomon.formats.huggingface.parts import (
    ACTIVATIONS,
    QUANTISED,
    SILU,
    Notes,
    Reader,
    Wanted,
    balance_loss,
    biases_of,
    cap,
    check_layer_types,
    deepseek_of,
    heads_of,
    only,
    optional_window,
    sizes_of,
)
from gnomon.formats.huggingface.quantised import is_packed
from gnomon.formats.keys import Keys, read_json
from gnomon.graph import Graph
from gnomon.models import bert, deepseek, gemma, gpt, llama, mixtral, t5, vit
from gnomon.models.balance import with_balance_loss
from gnomon.models.numerics import Numerics
from gnomon.models.presets import Config, build

HARMLESS = frozenset(
    """
    sparsity_config
    architectures auto_map _name_or_path name_or_path model_type transformers_version torch_dtype dtype _commit_hash
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id unk_token_id decoder_start_token_id
    tokenizer_class prefix task_specific_params finetuning_task use_cache initializer_range initializer_factor
    return_dict output_attentions output_hidden_states output_past gradient_checkpointing problem_type
    rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon rope_theta rope_scaling rope_parameters
    rope_interleave attn_implementation _attn_implementation _attn_implementation_autoset cache_implementation
    max_length min_length do_sample temperature top_k top_p num_beams suppress_tokens forced_eos_token_id
    early_stopping typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id diversity_penalty
    remove_invalid_values exponential_decay_length_penalty begin_suppress_tokens num_beam_groups id2label label2id
    torchscript use_bfloat16 tf_legacy_loss is_decoder cross_attention_hidden_size
    """.split()
)
"""Keys that change neither shapes nor work: names, token ids, labels, generation, initialisation, epsilons, rotary
angles. Files of older releases hold all keys of the base class, PretrainedConfig."""

EVERY_CLASS: Mapping[str, object] = {
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "chunk_size_feed_forward": 0,
    "pruned_heads": {},
}
"""Keys of the base class that would change the mathematics -> their value in a decoder or encoder as usual; a reader
that knows one asks for it itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HfModel:
    """A model read from a config.json."""

    graph: Graph
    """The model."""
    notes: tuple[str, ...]
    """What the file says that the graph leaves out, one sentence each."""
    config: Config | None = None
    """The config of a decoder; None for other families."""
    numerics: Numerics | str = ""
    """What its results depend on beside the graph, for the runtime; a sentence where it cannot be run."""


def _llama(k: Keys, name: str, wanted: Wanted, notes: Notes) -> llama.LlamaConfig:
    k.must_be("attention_dropout", 0.0, 0)
    k.must_be("pretraining_tp", 1, 2, 4, 8)  # splits matrices to reproduce rounding; same work
    k.ignore("max_position_embeddings")
    return llama.LlamaConfig(
        name=name,
        **sizes_of(k),
        **biases_of(k),
        activation=k.choice("hidden_act", ACTIVATIONS, "silu"),
    )


def _mistral(k: Keys, name: str, wanted: Wanted, notes: Notes) -> llama.LlamaConfig:
    window = optional_window(k, 4096)
    k.must_be("attention_dropout", 0.0, 0)
    k.ignore("max_position_embeddings")
    return llama.LlamaConfig(
        name=name,
        **sizes_of(k),
        window=window,
        activation=k.choice("hidden_act", ACTIVATIONS, "silu"),
    )


def _qwen_window(k: Keys, layers: int) -> tuple[int, int]:
    """(window, number of first layers without it) of Qwen2 and Qwen3; unused unless use_sliding_window."""
    used = k.flag("use_sliding_window", False)
    k.ignore("sliding_window", "max_window_layers")
    window = k.integer("sliding_window", 4096) if used else 0
    full = k.integer("max_window_layers", 28, least=0) if used else 0
    check_layer_types(k, [("sliding" if used and i >= full else "full") + "_attention" for i in range(layers)])
    return window, full


def _qwen(k: Keys, name: str, wanted: Wanted, notes: Notes, *, third: bool) -> llama.LlamaConfig:
    hidden, layers = k.integer("hidden_size"), k.integer("num_hidden_layers")
    heads = k.integer("num_attention_heads")
    kv_heads = k.integer("num_key_value_heads")
    head_dim = k.integer("head_dim", 128) if third else heads_of(k, hidden)[2]
    window, full = _qwen_window(k, layers)
    bias = k.flag("attention_bias", False) if third else False
    k.must_be("attention_dropout", 0.0, 0)
    k.ignore("max_position_embeddings", "use_mrope")
    return llama.LlamaConfig(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=k.integer("intermediate_size"),
        vocab_size=k.integer("vocab_size"),
        tied=k.flag("tie_word_embeddings", False),
        qkv_bias=bias if third else True,
        out_bias=bias,
        qk_norm=third,
        window=window,
        full_layers=full,
        activation=k.choice("hidden_act", ACTIVATIONS, "silu"),
    )


def _qwen2(k: Keys, name: str, wanted: Wanted, notes: Notes) -> llama.LlamaConfig:
    return _qwen(k, name, wanted, notes, third=False)


def _qwen3(k: Keys, name: str, wanted: Wanted, notes: Notes) -> llama.LlamaConfig:
    return _qwen(k, name, wanted, notes, third=True)


def _gemma2(k: Keys, name: str, wanted: Wanted, notes: Notes) -> Graph:
    layers = k.integer("num_hidden_layers")
    k.must_be("attention_bias", False)
    k.must_be("attention_dropout", 0.0, 0)
    k.choice("hidden_activation", {"gelu_pytorch_tanh": "gelu_tanh"}, "gelu_pytorch_tanh")
    k.must_be("hidden_act", "gelu_pytorch_tanh")
    k.must_be("use_bidirectional_attention", False)
    check_layer_types(k, [("full" if i % 2 else "sliding") + "_attention" for i in range(layers)])
    k.ignore("max_position_embeddings", "sliding_window_size")
    return gemma.gemma2(
        gemma.Gemma2Config(
            name=name,
            num_layers=layers,
            hidden_size=k.integer("hidden_size"),
            num_heads=k.integer("num_attention_heads"),
            num_kv_heads=k.integer("num_key_value_heads"),
            head_dim=k.integer("head_dim", 256),
            ffn_size=k.integer("intermediate_size"),
            query_scalar=k.number("query_pre_attn_scalar", 256),
            vocab_size=k.integer("vocab_size"),
            window=k.integer("sliding_window", 4096),
            attention_softcap=cap(k, "attn_logit_softcapping", 50.0),
            final_softcap=cap(k, "final_logit_softcapping", 30.0),
            tied=k.flag("tie_word_embeddings", True),
        )
    )


def _gpt2(k: Keys, name: str, wanted: Wanted, notes: Notes) -> gpt.GptConfig:
    hidden = k.integer("n_embd")
    dropout, embed_dropout = k.number("resid_pdrop", 0.1), k.number("embd_pdrop", 0.1)
    if (dropout > 0) != (embed_dropout > 0):
        k.fail("embd_pdrop", f"embd_pdrop={embed_dropout} but resid_pdrop={dropout}: one on, one off is not described")
    k.must_be("scale_attn_weights", True)
    for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        k.must_be(key, False)
    k.ignore("n_ctx")
    k.ignore(*(f"summary_{part}" for part in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")))
    return gpt.GptConfig(
        name=name,
        num_layers=k.integer("n_layer"),
        hidden_size=hidden,
        num_heads=k.integer("n_head"),
        vocab_size=k.integer("vocab_size"),
        max_positions=k.integer("n_positions"),
        ffn_size=k.integer("n_inner", 4 * hidden),
        dropout=dropout,
        attention_dropout=k.number("attn_pdrop", 0.1),
        activation=k.choice("activation_function", ACTIVATIONS, "gelu_new"),
        tied=k.flag("tie_word_embeddings", True),
    )


def _gpt_neox(k: Keys, name: str, wanted: Wanted, notes: Notes) -> gpt.GptNeoxConfig:
    k.must_be("attention_bias", True)
    for key in ("attention_dropout", "hidden_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob"):
        k.must_be(key, 0.0, 0)
    k.ignore("max_position_embeddings", "rotary_emb_base", "classifier_dropout")
    rotary = k.number("rotary_pct", 0.25)
    k.must_be("partial_rotary_factor", rotary)  # the same by its newer name
    return gpt.GptNeoxConfig(
        name=name,
        num_layers=k.integer("num_hidden_layers"),
        hidden_size=k.integer("hidden_size"),
        num_heads=k.integer("num_attention_heads"),
        ffn_size=k.integer("intermediate_size"),
        vocab_size=k.integer("vocab_size"),
        rotary_fraction=rotary,
        parallel_residual=k.flag("use_parallel_residual", True),
        tied=k.flag("tie_word_embeddings", False),
        activation=k.choice("hidden_act", ACTIVATIONS, "gelu"),
    )


def _mixtral(k: Keys, name: str, wanted: Wanted, notes: Notes) -> mixtral.MixtralConfig:
    hidden = k.integer("hidden_size")
    heads, kv_heads, head_dim = heads_of(k, hidden)
    window = optional_window(k, 0)
    k.must_be("attention_dropout", 0.0, 0)
    k.must_be("router_jitter_noise", 0.0, 0)
    k.choice("hidden_act", SILU, "silu")
    k.ignore("max_position_embeddings")
    balance_loss(k, wanted, notes)
    return mixtral.MixtralConfig(
        name=name,
        num_layers=k.integer("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        num_experts=k.integer("num_local_experts"),
        experts_per_token=k.integer("num_experts_per_tok"),
        expert_ffn_size=k.integer("intermediate_size"),
        vocab_size=k.integer("vocab_size"),
        window=window,
        tied=k.flag("tie_word_embeddings", False),
    )


def _qwen3_moe(k: Keys, name: str, wanted: Wanted, notes: Notes) -> mixtral.MixtralConfig:
    hidden = k.integer("hidden_size")
    heads, kv_heads, head_dim = heads_of(k, hidden)
    bias = k.flag("attention_bias", False)
    k.must_be("attention_dropout", 0.0, 0)
    k.must_be("use_sliding_window", False)
    k.must_be("decoder_sparse_step", 1)
    k.must_be("mlp_only_layers", [])
    k.choice("hidden_act", SILU, "silu")
    k.ignore("sliding_window", "max_window_layers", "max_position_embeddings", "intermediate_size")  # no dense layers
    k.ignore("norm_topk_prob")
    balance_loss(k, wanted, notes)
    return mixtral.MixtralConfig(
        name=name,
        num_layers=k.integer("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        num_experts=k.integer("num_local_experts" if k.has("num_local_experts") else "num_experts"),  # since 5.0
        experts_per_token=k.integer("num_experts_per_tok"),
        expert_ffn_size=k.integer("moe_intermediate_size"),
        vocab_size=k.integer("vocab_size"),
        qk_norm=True,
        qkv_bias=bias,
        out_bias=bias,
        tied=k.flag("tie_word_embeddings", False),
        moe_path="mlp",
        expert_paths=("gate_proj", "up_proj", "down_proj"),
    )


def _deepseek_v3(k: Keys, name: str, wanted: Wanted, notes: Notes) -> deepseek.DeepseekConfig:
    k.must_be("num_key_value_heads", k.integer("num_attention_heads"))
    k.must_be("attention_bias", False)
    k.must_be("attention_dropout", 0.0, 0)
    k.must_be("moe_layer_freq", 1)
    k.must_be("scoring_func", "sigmoid")
    k.must_be("topk_method", "noaux_tc")
    k.must_be("tie_word_embeddings", False)
    k.must_be("pretraining_tp", 1)
    k.choice("hidden_act", SILU, "silu")
    k.ignore("max_position_embeddings", "norm_topk_prob", "routed_scaling_factor")
    k.ignore("aux_loss_alpha", "seq_aux", "ep_size", "qk_head_dim", "head_dim", "num_experts_per_token")
    balance_loss(k, wanted, notes, known=False)
    quantised = k.raw("quantization_config")
    if quantised is not None:
        notes.append(QUANTISED)
    predicted = k.raw("num_nextn_predict_layers")
    modules = max(k.integer("mtp_num_layers", 0, least=0), int(wanted.mtp))
    if predicted and not modules:
        notes.append(
            f"num_nextn_predict_layers={predicted}: the multi-token prediction module is left out, as in "
            f"transformers; add mtp_num_layers = {predicted} for it"
        )
    return replace(
        deepseek_of(k, wanted, name, num_dense_layers=k.integer("first_k_dense_replace", least=0)),
        num_groups=k.integer("n_group", 8),
        groups_per_token=k.integer("topk_group", 4),
        mtp_modules=modules,
        mtp_loss_factor=k.number("mtp_loss_scaling_factor", 0.1),
    )


def _roberta(k: Keys, name: str, wanted: Wanted, notes: Notes) -> Graph:
    """Its head has a GELU, whatever the layers have."""
    return _bert(k, name, wanted, notes, head_activation="gelu")


def _bert(k: Keys, name: str, wanted: Wanted, notes: Notes, *, head_activation: str = "") -> Graph:
    k.must_be("position_embedding_type", "absolute")
    k.must_be("is_decoder", False)
    k.must_be("add_cross_attention", False)
    k.must_be("tie_word_embeddings", True)
    k.ignore("classifier_dropout")
    k.ignore(*(f"pooler_{p}" for p in ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type")))
    k.ignore("directionality")
    if wanted.bert_head == "pooler":
        notes.append("the bare model with its pooler, without a loss; ask for the mlm head to train it")
    return bert.bert(
        bert.BertConfig(
            name=name,
            num_layers=k.integer("num_hidden_layers"),
            hidden_size=k.integer("hidden_size"),
            num_heads=k.integer("num_attention_heads"),
            ffn_size=k.integer("intermediate_size"),
            vocab_size=k.integer("vocab_size"),
            max_positions=k.integer("max_position_embeddings"),
            num_token_types=k.integer("type_vocab_size", 2),
            dropout=k.number("hidden_dropout_prob", 0.1),
            attention_dropout=k.number("attention_probs_dropout_prob", 0.1),
            activation=k.choice("hidden_act", ACTIVATIONS, "gelu"),
            head=wanted.bert_head,
            head_activation=head_activation,
        )
    )


def _mt5(k: Keys, name: str, wanted: Wanted, notes: Notes) -> Graph:
    return _t5(k, name, wanted, notes, multilingual=True)


def _t5(k: Keys, name: str, wanted: Wanted, notes: Notes, *, multilingual: bool = False) -> Graph:
    layers = k.integer("num_layers")
    gated = k.choice("feed_forward_proj", {"relu": "", "gated-gelu": "gated"}, "relu") == "gated"
    k.must_be("is_gated_act", gated)
    k.must_be("dense_act_fn", "gelu_new" if gated else "relu")
    k.must_be("is_encoder_decoder", True)
    k.ignore("n_positions", "classifier_dropout")
    tied = k.flag("tie_word_embeddings", True)
    k.ignore("scale_decoder_outputs")
    scaled = not multilingual and k.flag("scale_decoder_outputs", tied)
    return t5.t5(
        t5.T5Config(
            name=name,
            num_layers=layers,
            num_decoder_layers=k.integer("num_decoder_layers", layers),
            hidden_size=k.integer("d_model"),
            num_heads=k.integer("num_heads"),
            head_dim=k.integer("d_kv"),
            ffn_size=k.integer("d_ff"),
            vocab_size=k.integer("vocab_size"),
            gated=gated,
            tied=tied,
            scaled=scaled,
            buckets=k.integer("relative_attention_num_buckets", 32),
            max_distance=k.integer("relative_attention_max_distance", 128),
            dropout=k.number("dropout_rate", 0.1),
        )
    )


def _vit(k: Keys, name: str, wanted: Wanted, notes: Notes) -> Graph:
    labels = k.raw("id2label")
    only(k, wanted, "problem_type", "single_label_classification")
    k.ignore("label2id", "encoder_stride", "pooler_output_size", "pooler_act")
    if labels is not None and not isinstance(labels, Mapping):
        k.fail("id2label", f"expected an object, got {labels!r}")
    if labels is None and not k.has("num_labels"):
        k.fail("id2label", "no id2label or num_labels: the size of the classifier is not known")
    return vit.vit(
        vit.VitConfig(
            name=name,
            num_layers=k.integer("num_hidden_layers"),
            hidden_size=k.integer("hidden_size"),
            num_heads=k.integer("num_attention_heads"),
            ffn_size=k.integer("intermediate_size"),
            image_size=k.integer("image_size"),
            patch_size=k.integer("patch_size"),
            num_channels=k.integer("num_channels", 3),
            num_classes=k.integer("num_labels", len(labels) if labels is not None else None),
            qkv_bias=k.flag("qkv_bias", True),
            dropout=k.number("hidden_dropout_prob", 0.0),
            attention_dropout=k.number("attention_probs_dropout_prob", 0.0),
            activation=k.choice("hidden_act", ACTIVATIONS, "gelu"),
        )
    )


READERS: Mapping[str, Reader] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "bert": _bert,
    "roberta": _roberta,
    "xlm-roberta": _roberta,
    "t5": _t5,
    "mt5": _mt5,
    "vit": _vit,
    **DECODERS,
    **OLDER,
    **MIXTURES,
    **HYBRIDS,
}
"""model_type -> reader."""


NOT_DESCRIBED = {
    "qwen3_next": "three of four layers are gated DeltaNet, whose kernels have no price",
    "qwen3_5": "three of four layers are gated DeltaNet, whose kernels have no price",
    "kimi_linear": "its layers are Kimi delta attention, whose kernels have no price",
    "falcon_h1": "its layers run attention and Mamba side by side",
    "jamba": "its Mamba is the first version, whose scan has no price",
    "mamba": "its scan is Mamba's first version, which has no price",
    "zamba2": "its attention is one block that layers share",
    **dict.fromkeys(
        ("gemma3n", "gemma3n_text"),
        "each layer adds an embedding of its own to several residual streams, and layers share keys",
    ),
    "lfm2": "two of three layers are short convolutions between gates",
    "minimax": "seven of eight layers are lightning attention, whose kernels have no price",
    "deepseek_v32": "its attention chooses keys by an index of its own, which has no price",
    "glm_moe_dsa": "its attention chooses keys by an index of its own, which has no price",
    "deepseek_v4": "its attention reads compressed keys, chosen by an index that has no price",
    "longcat_flash": "a layer has two attentions, and experts beside them that compute nothing",
    "apertus": "its feed-forward's activation (xIELU) has no price",
    "mllama": "its language model attends to the image in layers of their own",
}
"""model_type -> why there is no reader, for models that people ask for."""


def from_hf_config(
    values: Mapping[str, object], name: str, wanted: Wanted | None = None, *, strict: bool = False
) -> HfModel:
    """The model that a parsed config.json describes, called `name`; a key that no reader knows is noted.

    Raises CatalogueError for a model_type without a reader; InputError, with the path, for a key that is missing, of
    the wrong type, or changes the mathematics in a way not understood, for sizes that do not fit together, and when
    strict for a key that is not known.
    """
    kind = values.get("model_type")
    if not isinstance(kind, str):
        raise InputError(f"{name}: a config.json names its model_type; got {kind!r}", "$.model_type")
    reader = READERS.get(SAME_KEYS.get(kind, kind))
    if reader is None and kind in SHAPES:
        reader = partial(generic_decoder, shape=SHAPES[kind])
    if reader is None:
        if (inside := language_model(values, READERS)) is not None:
            model = from_hf_config(inside[0], name, wanted, strict=strict)
            return replace(model, notes=(*inside[1], *model.notes))
        if kind in NOT_DESCRIBED:
            raise CatalogueError(f"{name}: model_type {kind!r} has no reader: {NOT_DESCRIBED[kind]}")
        known = sorted({*READERS, *SHAPES, *SAME_KEYS})
        raise CatalogueError(
            f"{name}: model_type {kind!r} has no reader{nearest(kind, known)}, and its keys alone do not say its "
            f"network; gnomon.capture takes its PyTorch module (docs/capture.md); known: {', '.join(known)}"
        )
    keys, notes = Keys(values, name), Notes()
    try:
        read = reader(keys, name, wanted or Wanted(), notes)
        graph = read if isinstance(read, Graph) else build(read)
        if notes.balance and any(block.does("routes") for block in graph.blocks):
            graph = with_balance_loss(graph, notes.balance)
    except GraphError as error:
        raise InputError(f"{name}: {error}", "$") from error
    for key, usual in EVERY_CLASS.items():
        if not keys.asked(key):
            keys.must_be(key, usual)
    if strict:
        keys.finish(HARMLESS | ({"quantization_config"} if _is_widened(values) else set()))
    if quantised := values.get("quantization_config"):
        notes += [QUANTISED] if quantised and QUANTISED not in notes else []
    notes += [
        f"{key} = {str(value)[:60]}: no reader knows this key; not accounted for"
        for key, value in keys.left(HARMLESS | {"quantization_config"})
    ]
    config = None if isinstance(read, Graph) or notes.balance else read  # of which the graph is no more
    return HfModel(graph=graph, notes=tuple(notes), config=config, numerics=numerics_of(values))


def _is_widened(values: Mapping[str, object]) -> bool:
    """Whether weights are stored as their reader makes them whole: as bitsandbytes has them, which `four_bits` checks,
    or packed by compressed-tensors."""
    said = values.get("quantization_config")
    if not isinstance(said, Mapping):
        return False
    return said.get("quant_method", "bitsandbytes") == "bitsandbytes" or is_packed(values)


def read_hf_config(
    text: str,
    name: str,
    wanted: Wanted | None = None,
    *,
    settings: Mapping[str, str] | None = None,
    strict: bool = False,
) -> HfModel:
    """The model that the text of a config.json describes; errors as in `from_hf_config` and `read_json`. settings: keys
    in place of the file's; `bert_head` and `mtp` say what no file does."""
    values = dict(read_json(text, f"config {name!r}", infinite=True))
    given = {key: setting_value(word) for key, word in (settings or {}).items()}
    if (head := given.pop("bert_head", None)) is not None:
        if head not in ("pooler", "mlm"):
            raise InputError(f"bert_head={head!r}: it is pooler or mlm", "--set")
        wanted = replace(wanted or Wanted(), bert_head=head)
    if (mtp := given.pop("mtp", None)) is not None:
        wanted = replace(wanted or Wanted(), mtp=mtp is True or mtp == 1)
    return from_hf_config(values | given, name, wanted, strict=strict)
