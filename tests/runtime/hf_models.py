"""The models of transformers as an oracle: built tiny from a config, weights and gradients compared with ours.

`compare(kind, folder)` builds the model type with random weights in float64, saves it as a folder of safetensors, reads
that folder as `gnomon run --weights` does, and compares logits, loss and every gradient. Gradients go over by the same
way: saved in place of the weights. So layouts of files are under test together with the mathematics.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gnomon.errors import GnomonError
from gnomon.formats.huggingface.known import layout, numerics_of
from gnomon.formats.huggingface.parts import ReadOptions
from gnomon.formats.huggingface.read import read_hf_config
from gnomon.graph import Graph
from gnomon.graph.outputs import without_loss
from gnomon.models.numerics import with_numerics
from gnomon.runtime.module.one_process import OneProcess
from gnomon.runtime.parameters.weights import Folder, WeightReader, settled

VOCAB, TOKENS, SEQUENCES = 96, 24, 3
IDS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TEXT = {
    **IDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
}
PLAIN = {key: value for key, value in TEXT.items() if key not in ("head_dim", "num_key_value_heads")}
"""Of classes without grouped queries."""
NO_KEY_OF_DROPOUT = {key: value for key, value in TEXT.items() if key != "attention_dropout"}
"""Of classes that do not have it, and write what else they are given to their files."""
OWN_WIDTH = {key: value for key, value in PLAIN.items() if key != "intermediate_size"}
"""Of classes with a name of their own for the width of a feed-forward."""
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT = {**IDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_ctx": 64}
GPT |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPTJ = {**GPT, "rotary_dim": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
SHARED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    **SHARED,
    "n_group": 4,
    "topk_group": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
}
T5 = {**IDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
WINDOWED = {**TEXT, "sliding_window": 8}
FOUR = {**WINDOWED, "num_hidden_layers": 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": TEXT,
    "llama (llama3 rotary)": {**TEXT, "rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True},
    "llama (linear rotary, tied)": {
        **TEXT,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        "tie_word_embeddings": True,
    },
    "llama (yarn)": {**TEXT, "rope_parameters": YARN},
    "llama (dynamic)": {
        **TEXT,
        "max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    },
    "mistral": WINDOWED,
    "qwen2": TEXT,
    "qwen3": TEXT,
    "gemma": TEXT,
    "gemma2": {**WINDOWED, "query_pre_attn_scalar": 16},
    "gemma3_text": {**WINDOWED, "num_hidden_layers": 6},
    "phi3": WINDOWED,
    "phi3 (longrope)": {
        **WINDOWED,
        "original_max_position_embeddings": 16,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "long_factor": [1.0, 1.5, 2.0, 4.0],
            "short_factor": [1.0, 1.0, 1.25, 1.5],
            "original_max_position_embeddings": 16,
        },
    },
    "gpt2": GPT,
    "gpt_neox": PLAIN,
    "mixtral": {**TEXT, **LOCAL},
    "qwen3_moe": {**TEXT, **EXPERTS},
    "deepseek_v3": {**TEXT, **LATENT},
    "gpt_oss": {**WINDOWED, **LOCAL, "rope_parameters": {**YARN, "truncate": False}},
    "bert": {**PLAIN, **NO_DROPOUT},
    "t5": T5,
    "t5 (gated, untied)": {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "mt5": {**T5, "feed_forward_proj": "gated-gelu"},
    "vit": {**PLAIN, **NO_DROPOUT, "image_size": 8, "patch_size": 2, "num_labels": 5},
    "roberta": {**PLAIN, **NO_DROPOUT, "type_vocab_size": 1},
    "xlm-roberta": {**PLAIN, **NO_DROPOUT, "type_vocab_size": 1},
    "smollm3": {**TEXT, "num_hidden_layers": 4},
    "granite": {**TEXT, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    "olmo": TEXT,
    "olmo2": TEXT,
    "olmo3": FOUR,
    "stablelm": TEXT,
    "gemma4_text": {
        **WINDOWED,
        "num_hidden_layers": 6,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "attention_k_eq_v": True,
        "global_head_dim": 16,
        "num_global_key_value_heads": 2,
    },
    "cohere": TEXT,
    "cohere2": FOUR,
    "glm": TEXT,
    "glm4": TEXT,
    "seed_oss": {**TEXT, "residual_dropout": 0.0},
    "ernie4_5": NO_KEY_OF_DROPOUT,
    "exaone4": FOUR,
    "arcee": TEXT,
    "nemotron": TEXT,
    "ministral": WINDOWED,
    "ministral3": TEXT,
    "phi": {**PLAIN, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "starcoder2": {**WINDOWED, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "falcon": {**OWN_WIDTH, "hidden_dropout": 0.0},
    "opt": {**OWN_WIDTH, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "bloom": {**IDS, "hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0},
    "gptj": GPTJ,
    "codegen": GPTJ,
    "gpt_bigcode": {key: value for key, value in GPT.items() if key != "n_ctx"},
    "gpt_neo": {
        **IDS,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
        "resid_dropout": 0.0,
        "embed_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "mpt": {**IDS, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    "olmoe": {**TEXT, "num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {**TEXT, **LATENT},
    "qwen2_moe": {**TEXT, **EXPERTS, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 1},
    "glm4_moe": {**TEXT, **SHARED},
    "dots1": {**TEXT, **SHARED, "sliding_window": None},
    "minimax_m2": {**TEXT, **LOCAL},
    "granitemoe": {**TEXT, **LOCAL},
    "phimoe": {**TEXT, **LOCAL},
    "ernie4_5_moe": {
        **NO_KEY_OF_DROPOUT,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 16,
        "moe_layer_start_index": 1,
        "moe_num_shared_experts": 1,
        "moe_layer_end_index": 1,
    },
    "mamba2": {
        **IDS,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 8,
        "n_groups": 2,
        "expand": 2,
        "chunk_size": 8,
    },
    "bamba": {**TEXT, **MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **TEXT,
        **MAMBA,
        **LOCAL,
        "mamba_expand": 2,
        "shared_intermediate_size": 24,
        "layer_types": ["mamba", "attention"],
    },
    "nemotron_h": {
        **IDS,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "ssm_state_size": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 24,
        "routed_scaling_factor": 2.5,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    },
    "llama4_text": {},
    "dbrx": {},
}
"""model_type, and in brackets a variant -> its config, where it differs from the class's. An empty one has no tiny
model here; its reader and refusal are tested with whole configs (tests/formats)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One model type against transformers."""

    kind: str
    refusal: str = ""
    """Why the runtime does not run it; then there are no numbers."""
    logits: float = 0.0
    """Largest difference, relative to the largest logit."""
    loss: float = 0.0
    """Relative difference."""
    gradient: float = 0.0
    """Largest difference in any parameter's gradient, relative to the largest element of that gradient."""
    where: str = ""
    """The parameter with it."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Constants in float64, and no warnings and progress bars."""
    logging.disable(logging.WARNING)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.set_default_dtype(before)
            logging.disable(logging.NOTSET)


class Wide(TorchFunctionMode):
    """float64 wherever transformers asks for float32: its norms, angles and softmax would round to 1e-7 otherwise."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*(torch.float64 if value is torch.float32 else value for value in args), **kwargs)


def build(kind: str, given: Mapping[str, Any] | None = None) -> Any:
    """The tiny model in float64, with random weights everywhere: norms and biases too, which begin as constants.
    given: its config; None for that of CONFIGS."""
    import transformers

    config = transformers.CONFIG_MAPPING[kind.partition(" ")[0]](**(CONFIGS[kind] if given is None else given))
    if "untied" in kind:  # the class ties weights whatever it is given
        config.tie_word_embeddings = False
    config._experts_implementation = "eager"
    auto = {
        "bert": transformers.AutoModelForMaskedLM,
        "roberta": transformers.AutoModelForMaskedLM,
        "xlm-roberta": transformers.AutoModelForMaskedLM,
        "t5": transformers.AutoModelForSeq2SeqLM,
        "mt5": transformers.AutoModelForSeq2SeqLM,
        "vit": transformers.AutoModelForImageClassification,
    }.get(config.model_type, transformers.AutoModelForCausalLM)
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation="eager").to(torch.float64).eval()
    if "untied" in kind:  # of T5, whose three tables are one in any case
        model.set_input_embeddings(model.shared)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.add_(torch.randn_like(buffer) * 0.1)
    return model


def inputs_of(graph: Graph) -> dict[str, Tensor]:
    """Random inputs by the graph's names."""
    generator = torch.Generator().manual_seed(1)
    sizes = {"batch": SEQUENCES, "seq": TOKENS, "enc_seq": TOKENS - 5}
    made = {}
    for tensor in graph.inputs:
        shape = [dim.size or sizes[dim.name] for dim in tensor.dims]
        if tensor.is_float:
            made[tensor.name] = torch.randn(shape, generator=generator, dtype=torch.float64)
        else:
            top = {"token_type_ids": 1, "labels": 5}.get(tensor.name, VOCAB) if "seq" not in str(tensor.dims) else VOCAB
            low = 0 if tensor.name == "token_type_ids" else 3
            made[tensor.name] = torch.randint(0 if top < VOCAB else low, top, shape, generator=generator)
    if "token_type_ids" in made:
        made["token_type_ids"] = torch.zeros_like(made["input_ids"])
    return made


def theirs(model: Any, given: Mapping[str, Tensor]) -> Tensor:
    """Their logits; their classes' own losses shift labels and add losses of routers."""
    if "pixel_values" in given or "image" in given:
        return model(pixel_values=given.get("pixel_values", given.get("image"))).logits
    if "enc_ids" in given or "encoder_ids" in given or "decoder_input_ids" in given:
        return model(input_ids=given["input_ids"], decoder_input_ids=given["decoder_input_ids"]).logits
    more = {"token_type_ids": given["token_type_ids"]} if "token_type_ids" in given else {}
    return model(input_ids=given["input_ids"], **more, **({"use_cache": False} if not more else {})).logits


def compare(kind: str, folder: Path) -> Compared:
    """In float64."""
    if not CONFIGS[kind]:
        return Compared(kind=kind, refusal=str(numerics_of({"model_type": kind})))
    with quiet(), Wide():
        model = build(kind)
        model.save_pretrained(folder / "weights")
        text = (folder / "weights" / "config.json").read_text()
        try:
            read = read_hf_config(text, kind, ReadOptions(bert_head="mlm", complete=True))
            if isinstance(read.numerics, str):
                return Compared(kind=kind, refusal=read.numerics)
            graph = with_numerics(read.graph, read.numerics)
            made = Folder.of(folder / "weights")
            where = settled(made, layout(graph, kind.partition(" ")[0]))
            ours = OneProcess(graph, values=WeightReader(made, where), dtype=torch.float64)
        except GnomonError as error:
            return Compared(kind=kind, refusal=str(error))
        given = inputs_of(graph)
        logits = theirs(model, given)
        loss = functional.cross_entropy(logits.flatten(0, -2), given["labels"].flatten())
        loss.backward()
        own = ours.loss(given, count=given["labels"].numel())
        raw = OneProcess(without_loss(graph), values=WeightReader(made, where), dtype=torch.float64)
        with torch.no_grad():
            off = float((raw.output(given) - logits).abs().max() / logits.abs().max())
            for parameter in model.parameters():
                grad = parameter.grad
                parameter.copy_(torch.zeros_like(parameter) if grad is None else grad)
            for _, buffer in model.named_buffers():
                buffer.zero_()
        model.save_pretrained(folder / "gradients")
        expected = WeightReader(Folder.of(folder / "gradients"), where)
        worst, name = 0.0, ""
        largest = max(float(expected(slot).abs().max()) for slot in ours.slots)
        for slot in ours.slots:
            wanted = expected(slot)
            difference = float(
                (ours.gradient(slot) - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6 * largest)
            )
            if not difference <= worst:
                worst, name = difference, slot.name
    return Compared(kind=kind, logits=off, loss=abs(own / float(loss.detach()) - 1), gradient=worst, where=name)
