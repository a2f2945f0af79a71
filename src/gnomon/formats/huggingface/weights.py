"""Where the weights of a Graph lie in a folder in Hugging Face's layout: names, and which part of which tensor.

`layout(graph, model_type)` returns, for each parameter of the Graph, the `Piece`s of file tensors that fill it: most
are one whole tensor of the same name; GPT-2's are transposed, Phi-3 joins q, k and v, and experts have a tensor each.
A piece is a view, so it is read and written by the same description. Pure: no tensors
(`gnomon.runtime.parameters.weights`). Source: the layouts that `save_pretrained` of transformers 5.23 writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from gnomon.formats.huggingface.pieces import (
    Parameter,
    Piece,
    Rule,
    Shape,
    alternating,
    channels,
    exactly,
    expert_each,
    experts_transposed,
    flat,
    half,
    led,
    of_each_group,
    of_each_head,
    part,
    projections,
    transposed,
    two_norms,
    whole,
)
from gnomon.graph import Graph, matrix_rows


def parameters_of(graph: Graph) -> dict[str, Parameter]:
    """Every parameter of the Graph, frozen weights too, by full name."""
    parameters: dict[str, Parameter] = {}
    for layer in graph.layers():
        block = graph.block(layer.call.block)
        matrices = {op.inputs[1]: op for op in block.ops if op.contracts and op.does != "multiplies activations"}
        apart = {name for op in block.ops if op.does == "multiplies rows" for name in op.inputs[2:]}
        for tensor in (*block.parameters, *block.frozen):
            name = layer.call.parameter_name(tensor.name, layer.index)
            atoms = tuple(dim.size or 0 for dim in tensor.atoms)
            op = matrices.get(tensor.name)
            if op is None or op.does == "convolves":
                joined = prod(atoms) if tensor.name.endswith(".bias") and tensor.name not in apart else None
                shape = (
                    (joined,) if joined is not None else tuple(prod(a.size or 0 for a in d.atoms) for d in tensor.dims)
                )
                rows = 0
            else:
                rows = sum(len(dim.atoms) for dim in tensor.dims[: matrix_rows(op, tensor.dims)])
                first = 1 if op.does == "multiplies rows" else 0
                shape = (*atoms[:first], prod(atoms[first:rows]), prod(atoms[rows:]))
            parameters.setdefault(name, Parameter(name=name, atoms=atoms, shape=shape, rows=rows))
    return parameters


def _joined(names: Mapping[str, str]) -> Callable[[Mapping[str, Parameter]], dict[str, tuple[str, Rule]]]:
    """Linears that a file has as one, one after the other: theirs by ours, `q_proj k_proj v_proj` -> `qkv_proj`."""

    def rules(parameters: Mapping[str, Parameter]) -> dict[str, tuple[str, Rule]]:
        made: dict[str, tuple[str, Rule]] = {}
        for ours, theirs in names.items():
            first, *others = ours.split()
            for name in parameters:
                head, middle, tail = name.rpartition(f".{first}.")
                if not middle:
                    continue
                parts = [f"{head}.{part}.{tail}" for part in (first, *others)]
                sizes = [parameters[part].shape[0] for part in parts]
                for index, name in enumerate(parts):
                    made[name] = f"{head}.{theirs}.{tail}", part(sum(sizes[:index]), sum(sizes))
        return made

    return rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What tells a model type's files from its Graph's names."""

    names: tuple[tuple[str, str], ...] = ()
    """Patterns of our names and what stands in their place, applied in this order."""
    rules: tuple[tuple[str, Rule], ...] = ()
    """Patterns of our names and how their pieces lie; the first that is found counts."""
    joined: Mapping[str, str] | None = None
    """Linears that are one in the file, one after the other."""
    together: tuple[Callable[[Mapping[str, Parameter]], dict[str, tuple[str, Rule]]], ...] = ()
    """Rules that look at all parameters: name -> (the file's, before `names`; how it lies there)."""
    ignored: tuple[str, ...] = ()
    """Patterns of tensors that some files have and no model reads: masks, tables of angles."""
    copies: tuple[tuple[str, str], ...] = ()
    """(their name, ours): second names of tied weights that some files have."""


EXPERTS = ((r"\.experts\.", expert_each),)
CONV1D = ((r"\.(c_attn|c_proj|c_fc)\.", transposed),)
TABLES = (r"rotary_emb\.inv_freq$", r"\.masked_bias$", r"\.attn(\.attention)?\.bias$", r"position_ids$")
"""What older releases wrote beside weights."""
HEAD = (("lm_head.weight", "model.embed_tokens.weight"),)

USUAL = Family(rules=EXPERTS, ignored=TABLES, copies=HEAD)
"""Of Llama and those that write as it does."""

FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(rules=CONV1D, ignored=TABLES, copies=(("lm_head.weight", "transformer.wte.weight"),)),
    "phi3": Family(
        joined={"q_proj k_proj v_proj": "qkv_proj", "gate_proj up_proj": "gate_up_proj"}, ignored=TABLES, copies=HEAD
    ),
    "glm": Family(joined={"gate_proj up_proj": "gate_up_proj"}, ignored=TABLES, copies=HEAD),
    "glm4": Family(
        names=(
            (r"\.post_attention_layernorm\.", ".post_self_attn_layernorm."),
            (r"\.pre_feedforward_layernorm\.", ".post_attention_layernorm."),
            (r"\.post_feedforward_layernorm\.", ".post_mlp_layernorm."),
        ),
        joined={"gate_proj up_proj": "gate_up_proj"},
        ignored=TABLES,
        copies=HEAD,
    ),
    "phi": Family(
        names=(
            (r"\.o_proj\.", ".dense."),
            (r"\.up_proj\.", ".fc1."),
            (r"\.down_proj\.", ".fc2."),
            (r"^model\.norm\.", "model.final_layernorm."),
        ),
        ignored=TABLES,
    ),
    "starcoder2": Family(
        names=((r"\.up_proj\.", ".c_fc."), (r"\.down_proj\.", ".c_proj.")), ignored=TABLES, copies=HEAD
    ),
    "gpt_oss": Family(
        names=(
            (r"\.mlp\.gate\.", ".mlp.router."),
            (r"\.experts\.w[13]\.weight$", ".experts.gate_up_proj"),
            (r"\.experts\.w[13]\.bias$", ".experts.gate_up_proj_bias"),
            (r"\.experts\.w2\.weight$", ".experts.down_proj"),
            (r"\.experts\.w2\.bias$", ".experts.down_proj_bias"),
        ),
        rules=(
            (r"\.experts\.w1\.", alternating(0)),
            (r"\.experts\.w3\.", alternating(1)),
            (r"\.experts\.w2\.weight", experts_transposed),
        ),
        ignored=TABLES,
    ),
    "bert": Family(
        ignored=(r"position_ids$", r"^bert\.pooler\.", r"^cls\.seq_relationship\."),
        copies=(
            ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
            ("cls.predictions.decoder.bias", "cls.predictions.bias"),
        ),
    ),
    "t5": Family(
        copies=(
            ("encoder.embed_tokens.weight", "shared.weight"),
            ("decoder.embed_tokens.weight", "shared.weight"),
            ("lm_head.weight", "shared.weight"),
        ),
        ignored=(r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",),
    ),
    "vit": Family(
        rules=(
            (r"patch_embeddings\.projection\.weight$", exactly),
            (r"cls_token$", led(1, 1)),
            (r"position_embeddings$", led(1)),
        ),
        ignored=(r"^vit\.pooler\.",),
    ),
    "roberta": Family(
        names=(
            (r"^cls\.predictions\.transform\.LayerNorm\.", "lm_head.layer_norm."),
            (r"^cls\.predictions\.transform\.", "lm_head."),
            (r"^cls\.predictions\.", "lm_head."),
            (r"^bert\.", "roberta."),
        ),
        ignored=(r"position_ids$", r"^roberta\.pooler\."),
        copies=(
            ("lm_head.decoder.weight", "bert.embeddings.word_embeddings.weight"),
            ("lm_head.decoder.bias", "cls.predictions.bias"),
        ),
    ),
    "falcon": Family(
        names=(
            (r"\.embed_tokens\.", ".word_embeddings."),
            (r"^model\.norm\.", "transformer.ln_f."),
            (r"^model\.", "transformer."),
            (r"\.layers\.", ".h."),
            (r"\.self_attn\.o_proj\.", ".self_attention.dense."),
            (r"\.self_attn\.", ".self_attention."),
            (r"\.up_proj\.", ".dense_h_to_4h."),
            (r"\.down_proj\.", ".dense_4h_to_h."),
        ),
        together=(of_each_group("q_proj k_proj v_proj", "query_key_value"), two_norms),
        copies=HEAD,
    ),
    "bloom": Family(
        names=(
            (r"\.embed_tokens\.", ".word_embeddings."),
            (r"\.embed_layernorm\.", ".word_embeddings_layernorm."),
            (r"^model\.norm\.", "transformer.ln_f."),
            (r"^model\.", "transformer."),
            (r"\.layers\.", ".h."),
            (r"\.self_attn\.o_proj\.", ".self_attention.dense."),
            (r"\.self_attn\.[qkv]_proj\.", ".self_attention.query_key_value."),
            (r"\.up_proj\.", ".dense_h_to_4h."),
            (r"\.down_proj\.", ".dense_4h_to_h."),
        ),
        rules=tuple((rf"\.{letter}_proj\.", of_each_head(index)) for index, letter in enumerate("qkv")),
        copies=HEAD,
    ),
    "mpt": Family(
        names=(
            (r"\.embed_tokens\.", ".wte."),
            (r"^model\.norm\.", "transformer.norm_f."),
            (r"^model\.", "transformer."),
            (r"\.layers\.", ".blocks."),
            (r"\.self_attn\.o_proj\.", ".attn.out_proj."),
            (r"\.self_attn\.", ".attn."),
            (r"\.input_layernorm\.", ".norm_1."),
            (r"\.post_attention_layernorm\.", ".norm_2."),
            (r"\.mlp\.", ".ffn."),
        ),
        joined={"q_proj k_proj v_proj": "Wqkv"},
        copies=HEAD,
    ),
    "minimax_m2": Family(
        names=(
            (r"\.mlp\.gate\.e_score", ".block_sparse_moe.e_score"),
            (r"\.mlp\.", ".block_sparse_moe."),
            (r"\.gate_proj\.", ".w1."),
            (r"\.up_proj\.", ".w3."),
            (r"\.down_proj\.", ".w2."),
        ),
        rules=EXPERTS,
        ignored=TABLES,
        copies=HEAD,
    ),
    "granitemoe": Family(
        names=(
            (r"\.mlp\.gate\.", ".block_sparse_moe.router.layer."),
            (r"\.mlp\.experts\.(gate|up)_proj\.", ".block_sparse_moe.input_linear."),
            (r"\.mlp\.experts\.down_proj\.", ".block_sparse_moe.output_linear."),
        ),
        rules=((r"\.gate_proj\.", half(0)), (r"\.up_proj\.", half(1))),
        ignored=TABLES,
        copies=HEAD,
    ),
    "ernie4_5_moe": Family(
        names=((r"\.mlp\.gate\.e_score", ".mlp.moe_statics.e_score"),),
        rules=((r"e_score_correction_bias$", led(1)), *EXPERTS),
        ignored=TABLES,
        copies=HEAD,
    ),
    "gpt_neo": Family(
        names=(
            (r"\.embed_tokens\.", ".wte."),
            (r"\.embed_positions\.", ".wpe."),
            (r"^model\.", "transformer."),
            (r"\.layers\.", ".h."),
            (r"\.self_attn\.o_proj\.", ".attn.attention.out_proj."),
            (r"\.self_attn\.", ".attn.attention."),
            (r"\.input_layernorm\.", ".ln_1."),
            (r"\.post_attention_layernorm\.", ".ln_2."),
            (r"\.up_proj\.", ".c_fc."),
            (r"\.down_proj\.", ".c_proj."),
            (r"^transformer\.norm\.", "transformer.ln_f."),
        ),
        ignored=TABLES,
        copies=(("lm_head.weight", "model.embed_tokens.weight"),),
    ),
    "opt": Family(
        names=(
            (r"^model\.norm\.", "model.final_layer_norm."),
            (r"^model\.", "model.decoder."),
            (r"\.o_proj\.", ".out_proj."),
            (r"\.input_layernorm\.", ".self_attn_layer_norm."),
            (r"\.post_attention_layernorm\.", ".final_layer_norm."),
            (r"\.mlp\.up_proj\.", ".fc1."),
            (r"\.mlp\.down_proj\.", ".fc2."),
        ),
        copies=HEAD,
    ),
    "gptj": Family(
        names=(
            (r"\.embed_tokens\.", ".wte."),
            (r"^model\.", "transformer."),
            (r"\.layers\.", ".h."),
            (r"\.self_attn\.o_proj\.", ".attn.out_proj."),
            (r"\.self_attn\.", ".attn."),
            (r"\.input_layernorm\.", ".ln_1."),
            (r"\.up_proj\.", ".fc_in."),
            (r"\.down_proj\.", ".fc_out."),
            (r"^transformer\.norm\.", "transformer.ln_f."),
        ),
        ignored=TABLES,
    ),
    "gpt_bigcode": Family(
        names=(
            (r"\.embed_tokens\.", ".wte."),
            (r"\.embed_positions\.", ".wpe."),
            (r"^model\.", "transformer."),
            (r"\.layers\.", ".h."),
            (r"\.self_attn\.o_proj\.", ".attn.c_proj."),
            (r"\.self_attn\.c_attn\.", ".attn.c_attn."),
            (r"\.input_layernorm\.", ".ln_1."),
            (r"\.post_attention_layernorm\.", ".ln_2."),
            (r"\.up_proj\.", ".c_fc."),
            (r"\.down_proj\.", ".c_proj."),
            (r"^transformer\.norm\.", "transformer.ln_f."),
        ),
        together=(of_each_group("q_proj k_proj v_proj", "c_attn"),),
        ignored=TABLES,
        copies=(("lm_head.weight", "model.embed_tokens.weight"),),
    ),
    "mamba2": Family(
        names=(
            (r"\.mamba_norm\.", ".norm."),
            (r"\.mamba\.", ".mixer."),
            (r"\.embed_tokens\.", ".embeddings."),
            (r"^model\.norm\.", "model.norm_f."),
            (r"^model\.", "backbone."),
        ),
        rules=((r"\.mamba\.norm\.weight$", flat),),
        copies=HEAD,
    ),
    "nemotron_h": Family(
        names=(
            (r"\.(mamba|self_attn|mlp|moe)_norm\.", ".norm."),
            (r"\.(mamba|self_attn|mlp|moe)\.", ".mixer."),
            (r"\.embed_tokens\.", ".embeddings."),
            (r"^model\.norm\.", "model.norm_f."),
            (r"^model\.", "backbone."),
        ),
        rules=((r"\.mamba\.norm\.weight$", flat), *EXPERTS),
        ignored=(*TABLES, r"^mtp\."),
        copies=HEAD,
    ),
    "bamba": Family(
        names=(
            (r"\.(mamba|self_attn)_norm\.", ".input_layernorm."),
            (r"\.mlp_norm\.", ".pre_ff_layernorm."),
            (r"\.mlp\.", ".feed_forward."),
            (r"^model\.norm\.", "model.final_layernorm."),
        ),
        rules=((r"\.mamba\.norm\.weight$", flat),),
        ignored=TABLES,
        copies=HEAD,
    ),
    "granitemoehybrid": Family(
        names=(
            (r"\.(mamba|self_attn)_norm\.", ".input_layernorm."),
            (r"\.(mlp|moe)_norm\.", ".post_attention_layernorm."),
            (r"\.moe\.gate\.", ".block_sparse_moe.router.layer."),
            (r"\.moe\.experts\.(gate|up)_proj\.", ".block_sparse_moe.input_linear."),
            (r"\.moe\.experts\.down_proj\.", ".block_sparse_moe.output_linear."),
            (r"\.(mlp|moe\.shared_experts)\.(gate|up)_proj\.", ".shared_mlp.input_linear."),
            (r"\.(mlp|moe\.shared_experts)\.down_proj\.", ".shared_mlp.output_linear."),
        ),
        rules=((r"\.mamba\.norm\.weight$", flat), (r"\.gate_proj\.", half(0)), (r"\.up_proj\.", half(1))),
        ignored=TABLES,
        copies=HEAD,
    ),
    "qwen2_moe": Family(
        names=((r"\.shared_experts\.", ".shared_expert."),), rules=EXPERTS, ignored=TABLES, copies=HEAD
    ),
}
"""model_type -> how its files differ; others are USUAL."""

FAMILIES = {**FAMILIES, "mt5": FAMILIES["t5"], "xlm-roberta": FAMILIES["roberta"]}


PREDICTORS = ("deepseek_v3", "glm4_moe")
"""Types whose files have a multi-token prediction module after the last layer, which is part of the model only where
its config says so (`mtp_num_layers`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where a Graph's weights lie."""

    pieces: Mapping[str, tuple[Piece, ...]]
    """By parameter of the Graph."""
    ignored: tuple[str, ...] = ()
    """As in `Family`."""
    copies: Mapping[str, str] | None = None
    """As in `Family`: their name -> the tensor that it is a copy of."""
    four_bits: Mapping[str, Shape] = field(default_factory=dict)
    """Parameters that a folder has in NF4 (`four_bits`) and the shape of their matrix: their pieces are scales, codes
    and what these mean."""

    def tensors(self) -> dict[str, Shape]:
        """Every tensor that a folder must have, with its shape."""
        return {piece.tensor: piece.shape for pieces in self.pieces.values() for piece in pieces}

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor of a file is one that no model reads."""
        return any(re.search(pattern, name) for pattern in self.ignored)


def layout(graph: Graph, model_type: str) -> Layout:
    """Of a Graph that was read from a config.json of this type."""
    family, known = FAMILIES.get(model_type, USUAL), parameters_of(graph)
    joined = (_joined(family.joined)(known) if family.joined else {}) | channels(known) | projections(known)
    for rules in family.together:
        joined |= rules(known)
    made: dict[str, tuple[Piece, ...]] = {}
    for name, parameter in known.items():
        theirs, rule = joined.get(name, (name, None))
        if rule is None:
            rule = next((rule for pattern, rule in family.rules if re.search(pattern, name)), whole)
        made[name] = tuple(rule(_renamed(theirs, family.names), parameter))
    copies = {theirs: made[ours][0].tensor for theirs, ours in family.copies if ours in made and theirs not in made}
    ignored = family.ignored
    if model_type in PREDICTORS:
        numbers = [int(match[1]) for name in made if (match := re.match(r"model\.layers\.(\d+)\.", name))]
        ignored = (*ignored, rf"^model\.layers\.{max(numbers, default=-1) + 1}\.")
        for name in [name for name in made if name.endswith(".enorm.weight")]:  # a module's embedding and head
            own = name.removesuffix("enorm.weight")
            copies |= {f"{own}embed_tokens.weight": "model.embed_tokens.weight"}
            copies |= {f"{own}shared_head.head.weight": "lm_head.weight"}
    return Layout(pieces=made, ignored=ignored, copies=copies)


def _renamed(name: str, names: Sequence[tuple[str, str]]) -> str:
    for pattern, other in names:
        name = re.sub(pattern, other, name)
    return name
