"""Hugging Face `config.json` to a Graph.

`read_hf_config(text, name)` returns a `HfModel`: the Graph, and notes on what the file asks for that the Graph leaves
out. Absent keys mean what the `transformers` configuration classes (4.57) make of them, except that sizes which those
would fill with one particular model's are required here. A key that changes the mathematics and is not understood is an
error.
Leaves out: weights, tokenizers, model types that are not in TYPES (`known`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gnomon.errors import CatalogueError, GraphError, InputError, nearest
from gnomon.formats.given import setting_value
from gnomon.formats.huggingface.known import NOT_DESCRIBED, SAME_KEYS, TYPES, numerics_of
from gnomon.formats.huggingface.model_type import ModelType
from gnomon.formats.huggingface.nested import language_model
from gnomon.formats.huggingface.parts import (
    QUANTISED,
    Notes,
    ReadOptions,
)
from gnomon.formats.huggingface.quantised import method_of
from gnomon.formats.keys import Keys, read_json
from gnomon.graph import Graph
from gnomon.models.balance import with_balance_loss
from gnomon.models.numerics import Numerics
from gnomon.models.parts import with_attribute
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


def from_hf_config(
    values: Mapping[str, object], name: str, options: ReadOptions | None = None, *, strict: bool = False
) -> HfModel:
    """The model that a parsed config.json describes, called `name`; a key that no reader knows is noted.

    Raises CatalogueError for a model_type without a reader; InputError, with the path, for a key that is missing, of
    the wrong type, or changes the mathematics in a way not understood, for sizes that do not fit together, and when
    strict for a key that is not known.
    """
    kind = values.get("model_type")
    if not isinstance(kind, str):
        raise InputError(f"{name}: a config.json names its model_type; got {kind!r}", "$.model_type")
    known = TYPES.get(SAME_KEYS.get(kind, kind))
    if known is None:
        if (inside := language_model(values, TYPES)) is not None:
            model = from_hf_config(inside[0], name, options, strict=strict)
            return replace(model, notes=(*inside[1], *model.notes))
        if kind in NOT_DESCRIBED:
            raise CatalogueError(f"{name}: model_type {kind!r} has no reader: {NOT_DESCRIBED[kind]}")
        every = sorted({*TYPES, *SAME_KEYS})
        raise CatalogueError(
            f"{name}: model_type {kind!r} has no reader{nearest(kind, every)}, and its keys alone do not say its "
            f"network; gnomon.capture takes its PyTorch module (docs/capture.md); known: {', '.join(every)}"
        )
    keys, notes = Keys(values, name), Notes()
    try:
        read = known.reader(keys, name, options or ReadOptions(), notes)
        graph = read if isinstance(read, Graph) else build(read)
        if notes.balance and any(block.does("routes") for block in graph.blocks):
            graph = with_balance_loss(graph, notes.balance)
        if isinstance(read, Graph):
            graph = _as_it_runs(graph, known)
    except GraphError as error:
        raise InputError(f"{name}: {error}", "$") from error
    for key, usual in EVERY_CLASS.items():
        if not keys.is_read(key):
            keys.must_be(key, usual)
    if strict:
        keys.finish(HARMLESS | ({"quantization_config"} if _is_widened(values) else set()))
    if quantised := values.get("quantization_config"):
        notes += [QUANTISED] if quantised and QUANTISED not in notes else []
    notes += [
        f"{key} = {str(value)[:60]}: no reader knows this key; not accounted for"
        for key, value in keys.unread(HARMLESS | {"quantization_config"})
    ]
    config = None if isinstance(read, Graph) or notes.balance else read  # of which the graph is no more
    return HfModel(graph=graph, notes=tuple(notes), config=config, numerics=numerics_of(values))


def _as_it_runs(graph: Graph, known: ModelType) -> Graph:
    """The network with what the type's own modules do differently from others' where nothing stands in their place."""
    if known.wide_norm:
        graph = with_attribute(graph, "norm", "wide", True, fn="rms")
    if known.layer_norm:
        graph = with_attribute(graph, "norm", "fp32", known.layer_norm, fn="layer")
    if known.attention:
        graph = with_attribute(graph, "attention", "eager", known.attention)
    return graph


def _is_widened(values: Mapping[str, object]) -> bool:
    """Whether weights are stored as their reader makes them whole: as bitsandbytes has them, which `four_bits` checks,
    or packed by another program. InputError for a way that is not read."""
    quantization = values.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return False
    return quantization.get("quant_method", "bitsandbytes") == "bitsandbytes" or method_of(values) is not None


def read_hf_config(
    text: str,
    name: str,
    options: ReadOptions | None = None,
    *,
    settings: Mapping[str, str] | None = None,
    strict: bool = False,
) -> HfModel:
    """The model that the text of a config.json describes; errors as in `from_hf_config` and `read_json`. settings: keys
    in place of the file's; `bert_head` and `mtp` say what no file does."""
    values = dict(read_json(text, f"config {name!r}", infinite=True))
    settings_read = {key: setting_value(word) for key, word in (settings or {}).items()}
    if (head := settings_read.pop("bert_head", None)) is not None:
        if head not in ("pooler", "mlm"):
            raise InputError(f"bert_head={head!r}: it is pooler or mlm", "--set")
        options = replace(options or ReadOptions(), bert_head=head)
    if (mtp := settings_read.pop("mtp", None)) is not None:
        options = replace(options or ReadOptions(), mtp=mtp is True or mtp == 1)
    return from_hf_config(values | settings_read, name, options, strict=strict)
