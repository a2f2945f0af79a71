"""Networks of Megatron-LM's other entry points: BERT, T5, Mamba hybrids, decoders that read images; and what its
programs of inference and of data are.

`family_of(program, words)` says which network a program trains; `network_of(fields, …)` returns it as a Graph, with the
sizes that the program gives its parts beside the sequence's. Read from NVIDIA/Megatron-LM 00caa53: pretrain_bert.py,
pretrain_t5.py, pretrain_mamba.py, pretrain_vlm.py, megatron/core/ssm/mamba_hybrid_layer_allocation.py (_allocate_auto,
parse_hybrid_pattern), megatron/core/ssm/mamba_mixer.py (expand 2), examples/multimodal. Leaves out: vision
classification, ICT, RETRO, and the image tower, whose work is listed as not predicted.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Literal, NoReturn

from gnomon.errors import InputError
from gnomon.formats.given import GIVE_MODEL
from gnomon.formats.job import Fields
from gnomon.formats.megatron.model import scores_of, shape_of
from gnomon.graph import Graph
from gnomon.models.bert import BertConfig, bert
from gnomon.models.hybrid import HybridConfig, HybridMixture, Mamba2, hybrid
from gnomon.models.t5 import T5Config, t5

Family = Literal["decoder", "bert", "t5", "hybrid", "images"]

NAMES: tuple[tuple[str, Family], ...] = (
    (r"bert", "bert"),
    (r"(?<![a-z])t5", "t5"),
    (r"mamba|hybrid", "hybrid"),
    (r"vlm|multimodal|llava", "images"),
)
"""Part of a program's name -> what it trains; else a decoder, as pretrain_gpt.py does."""

OTHERS = r"(?<![a-z])(vit|vision|ict|retro|inpaint|dino|realm|biencoder)(?![a-z])"
"""Parts of the names of programs that take options of pretrain_gpt.py and train a network that is not here."""

IMAGES = frozenset({"--vision-model-type", "--language-model-type", "--img-h", "--patch-dim"})
"""Options of programs that train a reader of images with a decoder."""

SERVES = "|".join(
    r"text_generation_server text_generation_cli generate_samples _inference\b inference_performance run_inference "
    r"batch_inference generate_text".split()
)
"""Programs that answer requests with a trained model."""

PREPARES = "|".join(
    "preprocess_ checkpoint/convert checkpoint_util convert_checkpoint merge_datasets merge_mp_partitions hf2mcore "
    "hf2megatron mcore2hf saver_ loader_".split()
)
"""Programs that prepare data, or turn a checkpoint into another."""


def trains(program: str) -> bool:
    """Whether a program is one that trains, by its name."""
    return re.search(f"{SERVES}|{PREPARES}", program) is None


def refuse_other(program: str, words: Collection[str], tensor: str, pipeline: str) -> None:
    """InputError for a program that trains nothing, with what to ask in its place."""
    if re.search(SERVES, program):
        layout = "".join(f" --{axis} {n}" for axis, n in (("tp", tensor), ("pp", pipeline)) if n not in ("", "1"))
        raise InputError(
            f"{program} serves a trained model, no training: its latencies and memory are those of gnomon predict "
            f"MODEL --serve{layout} --on CLUSTER --input-len 1024 --output-len 256 --concurrency 8"
        )
    if re.search(PREPARES, program):
        raise InputError(f"{program} prepares data or a checkpoint and trains nothing; give the script that trains")


def family_of(program: str, words: Collection[str]) -> Family:
    """What a program trains. InputError for one whose network is not here, with the fix."""
    name = Path(program).name
    if IMAGES & set(words) or "multimodal/" in program:
        return "images"
    found = next((family for pattern, family in NAMES if re.search(pattern, name)), None)
    if found is None and (other := re.search(OTHERS, name)):
        raise InputError(
            f"{program} trains a {other[0]} model; decoders, BERT, T5, Mamba hybrids and readers of images are read; "
            f"{GIVE_MODEL}"
        )
    if found is None and {"--hybrid-override-pattern", "--hybrid-layer-pattern", "--is-hybrid-model"} & set(words):
        return "hybrid"
    return found or "decoder"


def network_of(f: Fields, family: Family, tp: int, vocab_size: int | None, name: str) -> Graph:
    """The network of a family that is no plain decoder."""
    match family:
        case "bert":
            return _bert(f, tp, vocab_size, name)
        case "t5":
            return _t5(f, tp, vocab_size, name)
        case "hybrid":
            return _hybrid(f, tp, vocab_size, name)
    raise AssertionError(family)


def _bert(f: Fields, tp: int, vocab_size: int | None, name: str) -> Graph:
    """BERT with its masked-language-model head; norms come before the sublayers in Megatron-LM and behind them in
    BERT, which costs the same."""
    s = shape_of(f, tp, vocab_size, tokenizer="BertWordPieceLowerCase")
    if not f.flag("bert_no_binary_head", False):
        f.note_default("bert_no_binary_head", "not given", "the loss of the next sentence is left out")
    return bert(
        BertConfig(
            name=name,
            num_layers=s.layers,
            hidden_size=s.hidden,
            num_heads=s.heads,
            ffn_size=s.ffn,
            vocab_size=s.vocab,
            max_positions=s.max_positions,
            num_token_types=2,
            dropout=f.number("hidden_dropout", 0.1),
            attention_dropout=f.number("attention_dropout", 0.1),
            head="mlm",
        )
    )


def _t5(f: Fields, tp: int, vocab_size: int | None, name: str) -> Graph:
    """T5 with the same sizes: its norms are RMS norms and its linears have no biases, which Megatron-LM's have."""
    s = shape_of(f, tp, vocab_size, tokenizer="BertWordPieceCase")
    decoder = f.integer("decoder_num_layers", s.layers)
    if f.integer("pipeline_model_parallel_size", 1) > 1:
        f.fail(
            "pipeline_model_parallel_size",
            "an encoder and a decoder over several pipeline ranks are not read; use tensor parallelism in its place",
        )
    if not s.rms or s.bias:
        f.note_default("normalization", "LayerNorm, biases", "read as T5's own: RMS norms, no biases; as much work")
    return t5(
        T5Config(
            name=name,
            num_layers=s.layers,
            num_decoder_layers=decoder,
            hidden_size=s.hidden,
            num_heads=s.heads,
            head_dim=s.head_dim,
            ffn_size=s.ffn,
            vocab_size=s.vocab,
            gated=s.gated,
            tied=s.tied,
            scaled=False,
            buckets=f.integer("relative_attention_num_buckets", 32),
            max_distance=f.integer("relative_attention_max_distance", 128),
            dropout=f.number("hidden_dropout", 0.1),
        )
    )


def _hybrid(f: Fields, tp: int, vocab_size: int | None, name: str) -> Graph:
    """Mamba-2, attention, feed-forward and expert layers by a pattern, or by their shares of the layers."""
    s = shape_of(f, tp, vocab_size)
    pattern, ahead, depth = _pattern(f, s.layers)
    heads_of = f.integer("mamba_head_dim", 64)
    mamba = Mamba2(
        num_heads=f.integer("mamba_num_heads", 2 * s.hidden // heads_of),
        head_dim=heads_of,
        num_groups=f.integer("mamba_num_groups", 8),
        state_size=f.integer("mamba_state_dim", 128),
    )
    f.ignore("mamba_head_dim", "mamba_state_dim", "mamba_num_groups", "is_hybrid_model")
    mixture = None
    if "E" in pattern:
        mixture = HybridMixture(
            num_experts=f.integer("num_experts"),
            experts_per_token=f.integer("moe_router_topk", 2),
            expert_ffn_size=f.integer("moe_ffn_hidden_size", s.ffn),
            shared_ffn_size=f.integer("moe_shared_expert_intermediate_size", 0, least=0),
            sigmoid=scores_of(f) == "sigmoid",
        )
    if f.number("attention_dropout", 0.1) > 0 or f.number("hidden_dropout", 0.1) > 0:
        f.note_default("hidden_dropout", "over 0", "dropout, which hybrids here have not: its masks are left out")
    squared = f.flag("squared_relu", False)
    return hybrid(
        HybridConfig(
            name=name,
            layers=tuple(pattern),
            hidden_size=s.hidden,
            vocab_size=s.vocab,
            num_heads=s.heads,
            num_kv_heads=s.kv_heads,
            head_dim=s.head_dim,
            rotary=s.position == "rope",
            ffn_size=s.ffn,
            gated=s.gated,
            activation="silu" if s.gated else "relu2" if squared else "gelu",
            mamba=mamba if "M" in pattern else None,
            mixture=mixture,
            tied=s.tied,
            mtp_layers=tuple(ahead),
            mtp_depth=depth,
        )
    )


def _pattern(f: Fields, layers: int) -> tuple[str, str, int]:
    """(letters of the layers, of the multi-token prediction module, its depth). `|` between pipeline stages is left
    out: they are of equal sizes here."""
    pattern = f.raw("hybrid_layer_pattern") or f.raw("hybrid_override_pattern")
    shares = f.number("hybrid_attention_ratio", 0.0), f.number("hybrid_mlp_ratio", 0.0)
    if not (0 <= shares[0] <= 1 and sum(shares) <= 1):
        f.fail("hybrid_attention_ratio", f"{shares[0]:g} of attention and {shares[1]:g} of feed-forwards: over 1")
    if pattern is None:
        return allocated(layers, *shares), "", 0
    main, *ahead = str(pattern).split("/")
    if "|" in main:
        f.note_default("hybrid_layer_pattern |", "stages", "stages of the pattern are read as equal ones")
        main = main.replace("|", "")
    if wrong := set(main + "".join(ahead)) - set("M*-E"):
        f.fail("hybrid_override_pattern", f"{sorted(wrong)[0]!r} is no layer: M, *, - and E are")
    if len(main) != layers:
        f.fail("hybrid_override_pattern", f"{len(main)} layers in the pattern, and num_layers = {layers}")
    if len(set(ahead)) > 1:
        f.fail("hybrid_layer_pattern", "modules of multi-token prediction that differ are refused by Megatron-LM")
    return main, ahead[0] if ahead else "", len(ahead) if ahead and ahead[0] else 0


def allocated(layers: int, attention: float, mlp: float) -> str:
    """Letters of layers by their shares: attention evenly between Mamba layers, feed-forwards among what is left."""
    kinds = ["M"] * layers
    _every(kinds, "*", (layers - round(layers * attention)) / (round(layers * attention) + 1))
    feed = round(layers * mlp)
    if feed:
        _every(kinds, "-", (kinds.count("M") - feed) / feed)
    return "".join(kinds)


def _every(kinds: list[str], letter: str, section: float) -> None:
    """Put a letter behind each `section` of what is still Mamba, in place."""
    remaining = section
    for at, kind in enumerate(kinds):
        if kind != "M":
            continue
        if remaining < 0.5:
            kinds[at] = letter
            remaining += section
        else:
            remaining -= 1


def images_in(f: Fields) -> int:
    """Tokens of the images of a sample, which join those of its text; the tower that makes them is listed.

    InputError where the decoder is frozen: what is left to train is no network here.
    """
    side = (
        f.integer("img_h", 336) // f.integer("patch_dim", 14) * (f.integer("img_w", 336) // f.integer("patch_dim", 14))
    )
    tokens = side + (0 if f.flag("disable_vision_class_token", False) else 1)
    if f.flag("pixel_shuffle", False):
        tokens = side // 4
    tower = str(f.raw("vision_model_type") or "clip")
    frozen = f.flag("freeze_ViT", False)
    f.note_default(
        "vision_model_type",
        tower,
        f"the tower that turns an image into {tokens} tokens is left out: its weights and "
        f"{'forward' if frozen else 'training'} come on top",
    )
    if f.flag("freeze_LM", False):
        _frozen(f)
    f.ignore("language_model_type", "img_embedding_idx", "allow_missing_vision_projection_checkpoint", "prompt_path")
    f.ignore("valid_path", "dataloader_seq_length", "decoder_seq_length", "encoder_num_layers")
    return tokens


def _frozen(f: Fields) -> NoReturn:
    f.fail("freeze_LM", "only the projection of images is trained, which is no network here; leave --freeze-LM out")
