"""Where the weights of a Graph lie in a folder in Hugging Face's layout: names, and which part of which tensor.

`layout(graph, model_type)` returns, for each parameter of the Graph, the `Piece`s of file tensors that fill it: most
are one whole tensor of the same name; GPT-2's are transposed, Phi-3 joins q, k and v, and experts have a tensor each.
A piece is a view, so it is read and written by the same description. Pure: no tensors (`gnomon.runtime.weights`).
Source: the layouts that `save_pretrained` of transformers 5.23 writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from gnomon.errors import FormatError
from gnomon.graph import Graph

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Part of a file's tensor that fills a range of a parameter's first dim, and all of its others."""

    tensor: str
    """In the folder."""
    shape: Shape
    """That the whole tensor has there."""
    view: Shape
    """The same elements with dims taken apart, so that the parameter's are among them."""
    pick: tuple[tuple[int, int], ...] = ()
    """Range of each dim of the view; (): all of it. A range of one is dropped where `order` leaves it out."""
    order: tuple[int, ...] = ()
    """Dims of the view in the order of the parameter's; (): as they are."""
    first: int = 0
    """Where in the parameter's first dim it begins."""

    @property
    def dims(self) -> Shape:
        """Sizes of the part, in the parameter's order."""
        picked = self.pick or tuple((0, n) for n in self.view)
        return tuple(picked[i][1] - picked[i][0] for i in (self.order or range(len(self.view))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """What is known of one parameter before its model type is asked."""

    name: str
    """In the Graph."""
    atoms: Shape
    """Its dims with products taken apart, as the runtime stores it."""
    shape: Shape
    """That a PyTorch module would give it: out dims joined, in dims joined."""
    rows: int
    """How many of `atoms` are out dims of a matrix; 0 for others."""


def parameters_of(graph: Graph) -> dict[str, Parameter]:
    """Every parameter of the Graph, frozen weights too, by full name."""
    parameters: dict[str, Parameter] = {}
    for layer in graph.layers():
        block = graph.block(layer.call.block)
        matrices = {op.inputs[1]: op for op in block.ops if op.contracts and op.kind != "matmul"}
        apart = {name for op in block.ops if op.kind == "grouped_linear" for name in op.inputs[2:]}
        for tensor in (*block.parameters, *block.frozen):
            name = layer.call.parameter_name(tensor.name, layer.index)
            atoms = tuple(dim.size or 0 for dim in tensor.atoms)
            op = matrices.get(tensor.name)
            if op is None or op.kind == "conv2d":
                joined = prod(atoms) if tensor.name.endswith(".bias") and tensor.name not in apart else None
                shape = (
                    (joined,) if joined is not None else tuple(prod(a.size or 0 for a in d.atoms) for d in tensor.dims)
                )
                rows = 0
            else:
                rows = sum(atom.name not in op.contracts for atom in tensor.atoms)
                first = 1 if op.kind == "grouped_linear" else 0
                shape = (*atoms[:first], prod(atoms[first:rows]), prod(atoms[rows:]))
            parameters.setdefault(name, Parameter(name=name, atoms=atoms, shape=shape, rows=rows))
    return parameters


Rule = Callable[[str, Parameter], Sequence[Piece]]
"""(name that the file has for it, parameter) -> its pieces."""


def whole(name: str, p: Parameter) -> list[Piece]:
    """The tensor itself."""
    return [Piece(tensor=name, shape=p.shape, view=p.atoms)]


def transposed(name: str, p: Parameter) -> list[Piece]:
    """(in, out), as GPT-2's Conv1D has it."""
    if not p.rows:
        return whole(name, p)
    out, inner = p.atoms[: p.rows], p.atoms[p.rows :]
    order = (*range(len(inner), len(p.atoms)), *range(len(inner)))
    return [Piece(tensor=name, shape=p.shape[::-1], view=(*inner, *out), order=order)]


def expert_each(name: str, p: Parameter) -> list[Piece]:
    """A tensor for each expert, whose number stands after `experts`."""
    head, _, tail = name.partition(".experts.")
    return [
        Piece(tensor=f"{head}.experts.{e}.{tail}", shape=p.shape[1:], view=(1, *p.atoms[1:]), first=e)
        for e in range(p.atoms[0])
    ]


def part(begin: int, rows: int) -> Rule:
    """Rows from `begin` on of a tensor that has `rows` of them (out elements)."""

    def make(name: str, p: Parameter) -> list[Piece]:
        step = prod(p.atoms[1 : p.rows or len(p.atoms)])
        view = (rows // step, *p.atoms[1:])
        pick = ((begin // step, begin // step + p.atoms[0]), *((0, n) for n in view[1:]))
        return [Piece(tensor=name, shape=(rows, *p.shape[1:]), view=view, pick=pick)]

    return make


def alternating(index: int) -> Rule:
    """Of experts (experts, in, 2 × out) in one tensor, gate and up in turns: 0 is the gate (GPT-OSS)."""

    def make(name: str, p: Parameter) -> list[Piece]:
        if len(p.atoms) == 2:  # a bias
            experts, out = p.atoms
            pick = ((0, experts), (0, out), (index, index + 1))
            return [Piece(tensor=name, shape=(experts, 2 * out), view=(experts, out, 2), pick=pick, order=(0, 1))]
        experts, out, inner = p.atoms
        shape, view = (experts, inner, 2 * out), (experts, inner, out, 2)
        ranges = ((0, experts), (0, inner), (0, out), (index, index + 1))
        return [Piece(tensor=name, shape=shape, view=view, pick=ranges, order=(0, 2, 1))]

    return make


def experts_transposed(name: str, p: Parameter) -> list[Piece]:
    """(experts, in, out) in one tensor."""
    experts, out, inner = p.atoms
    return [Piece(tensor=name, shape=(experts, inner, out), view=(experts, inner, out), order=(0, 2, 1))]


def exactly(name: str, p: Parameter) -> list[Piece]:
    """With every dim of its own, as a convolution's kernel."""
    return [Piece(tensor=name, shape=p.atoms, view=p.atoms)]


def led(*ones: int) -> Rule:
    """With dims of 1 before its own, as parameters that are added to a batch."""

    def make(name: str, p: Parameter) -> list[Piece]:
        return [Piece(tensor=name, shape=(*ones, *p.shape), view=p.atoms)]

    return make


def of_each_head(index: int) -> Rule:
    """Of q, k and v that stand side by side in every head (BLOOM)."""

    def make(name: str, p: Parameter) -> list[Piece]:
        heads, width, *inner = p.atoms
        view = (heads, 3, width, *inner)
        pick = ((0, heads), (index, index + 1), *((0, n) for n in view[2:]))
        order = (0, *range(2, len(view)))
        return [Piece(tensor=name, shape=(3 * p.shape[0], *p.shape[1:]), view=view, pick=pick, order=order)]

    return make


def flat(name: str, p: Parameter) -> list[Piece]:
    """One dim in the file."""
    return [Piece(tensor=name, shape=(prod(p.atoms),), view=p.atoms)]


def _channels(parameters: Mapping[str, Parameter]) -> dict[str, tuple[str, Rule]]:
    """Mamba-2's convolution: a file has x, B and C one after the other, and a dim of one for the input channel."""
    made: dict[str, tuple[str, Rule]] = {}
    for name in parameters:
        for what in ("weight", "bias"):
            head, middle, _ = name.rpartition(f".conv1d.{what}_x")
            if middle:
                x, bc = parameters[name], parameters[f"{head}.conv1d.{what}_bc"]
                theirs = f"{head}.conv1d.{what}"
                made[name] = theirs, _of_x(prod(bc.atoms[:3]))
                made[bc.name] = theirs, _of_bc(prod(x.atoms[:2]))
    return made


def _of_x(others: int) -> Rule:
    """others: channels of B and C."""

    def make(name: str, p: Parameter) -> list[Piece]:
        groups, width, *taps = p.atoms
        rows = groups * width + others
        shape = (rows, *([1] if taps else []), *taps)
        ranges = [((0, 1), (g * width, (g + 1) * width), *((0, n) for n in taps)) for g in range(groups)]
        return [Piece(tensor=name, shape=shape, view=(1, rows, *taps), pick=r, first=g) for g, r in enumerate(ranges)]

    return make


def _of_bc(before: int) -> Rule:
    """before: channels of x."""

    def make(name: str, p: Parameter) -> list[Piece]:
        two, groups, state, *taps = p.atoms
        rows = before + two * groups * state
        if before % state:  # a piece is a range of rows of so many
            raise FormatError(f"{name}: {before} channels of x are no whole number of states of {state}; not read yet")
        shape, view = (rows, *([1] if taps else []), *taps), (1, rows // state, state, *taps)
        starts = [before // state + index * groups for index in range(two)]
        ranges = [((0, 1), (a, a + groups), (0, state), *((0, n) for n in taps)) for a in starts]
        return [Piece(tensor=name, shape=shape, view=view, pick=r, first=i) for i, r in enumerate(ranges)]

    return make


def half(index: int) -> Rule:
    """Of a tensor (2 × out, in), for each expert where there are several: the gate's rows before those of up."""

    def make(name: str, p: Parameter) -> list[Piece]:
        *experts, out, inner = p.atoms
        pick = (*((0, n) for n in experts), (index, index + 1), (0, out), (0, inner))
        view, order = (*experts, 2, out, inner), (*range(len(experts)), len(experts) + 1, len(experts) + 2)
        return [Piece(tensor=name, shape=(*experts, 2 * out, inner), view=view, pick=pick, order=order)]

    return make


def _projections(parameters: Mapping[str, Parameter]) -> dict[str, tuple[str, Rule]]:
    """A Mamba-2 mixer's projection: a file has z of all groups of heads, then x, B, C and dt of all; ours has all of
    the first group, then of the second."""
    made: dict[str, tuple[str, Rule]] = {}
    for name in parameters:
        head, found, _ = name.rpartition(".in_proj.weight")
        if found and f"{head}.conv1d.weight_x" in parameters:
            groups, width = parameters[f"{head}.conv1d.weight_x"].atoms[:2]
            state, heads = parameters[f"{head}.conv1d.weight_bc"].atoms[2], parameters[f"{head}.D"].atoms[0]
            if groups > 1:
                made[name] = name, _by_group(groups, (width, width, state, state, heads // groups))
    return made


def _by_group(groups: int, widths: Sequence[int]) -> Rule:
    """widths: rows of one group in each part of the file's tensor."""

    def make(name: str, p: Parameter) -> list[Piece]:
        made = []
        for group in range(groups):
            for index, width in enumerate(widths):
                before = sum(widths[:index])
                start = groups * before + group * width
                made.append(
                    Piece(
                        tensor=name,
                        shape=p.shape,
                        view=p.atoms,
                        pick=((start, start + width), *((0, n) for n in p.atoms[1:])),
                        first=group * sum(widths) + before,
                    )
                )
        return made

    return make


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
    """Linears that are one in the file."""
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
        joined={"q_proj k_proj v_proj": "query_key_value"},
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
        joined={"q_proj k_proj v_proj": "c_attn"},
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

    def tensors(self) -> dict[str, Shape]:
        """Every tensor that a folder must have, with its shape."""
        return {piece.tensor: piece.shape for pieces in self.pieces.values() for piece in pieces}

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor of a file is one that no model reads."""
        return any(re.search(pattern, name) for pattern in self.ignored)


def layout(graph: Graph, model_type: str) -> Layout:
    """Of a Graph that was read from a config.json of this type."""
    family, known = FAMILIES.get(model_type, USUAL), parameters_of(graph)
    joined = (_joined(family.joined)(known) if family.joined else {}) | _channels(known) | _projections(known)
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
