"""The model of a published run: a config from its row, and what had to be known beyond the row.

`model_config(row)` returns a config of room `models` with notes; `build(config)` returns its Graph, the same object for
the same config. What the builders do not describe (adapters, hybrids of attention and state space, TPU programs' own
layers) is refused by name. Leaves out how it is run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from math import lcm
from typing import Any

from evidence.published.bridge import hybrid_mtp, mtp_modules
from evidence.published.megatron_ci import is_test
from evidence.published.notes import read_notes
from evidence.published.nvidia import tokenizer
from evidence.published.row import Row
from evidence.published.settings import METHODS, ZERO_BUBBLE
from evidence.published.sizes import MAXTEXT
from gnomon.errors import InputError
from gnomon.graph import Graph
from gnomon.models.bert import BertConfig, bert
from gnomon.models.decoder import DecoderConfig, Mixture, decoder
from gnomon.models.deepseek import DeepseekConfig, deepseek_v3, deepseek_v3_671b
from gnomon.models.gpt import GptConfig, gpt
from gnomon.models.hybrid import (
    HybridConfig,
    hybrid,
    mamba2_2_7b,
    nemotron_3_nano,
    nemotron_3_super,
    nemotron_3_ultra,
    nemotron_h_8b,
)
from gnomon.models.llama import LlamaConfig, llama
from gnomon.models.lora import Adapters, with_adapters
from gnomon.models.mixtral import MixtralConfig, mixtral
from gnomon.models.sizes import GEMMA_SIZES

Config = GptConfig | LlamaConfig | MixtralConfig | DeepseekConfig | BertConfig | HybridConfig | DecoderConfig

VOCABULARIES = (
    (r"llama.?3(?![\db])", 128_256, "Llama 3's tokenizer"),
    (r"llama.?2(?!\d)", 32_000, "Llama 2's tokenizer"),
    (r"mixtral|mistral", 32_000, "Mistral's tokenizer"),
    (r"nemotron", 256_000, "Nemotron-4's tokenizer"),
    (r"grok", 131_072, "Grok-1's published config"),
    (r"bloom", 250_880, "BLOOM's padded tokenizer; the source says 250k"),
    (r"bert", 30_522, "BERT's uncased tokenizer"),
    (r"llama(?!.?[234](?![\db]))|vicuna|alpaca", 32_000, "the first Llama's tokenizer"),
    (r"qwen.?2\.5.*[^\d.](?:7|14|32|72)b", 152_064, "Qwen2.5's published config"),
    (r"qwen.?(?:2\.5|3)", 151_936, "Qwen's published config"),
    (r"deepseek.?(?:v3|r1)", 129_280, "DeepSeek-V3's published config"),
    (r"gpt.?oss", 201_088, "GPT-OSS's published config"),
    (r"gemma.?[34]", 262_144, "Gemma 3's published config"),
    (r"gemma", 256_000, "Gemma's published config"),
    (r"mpt", 50_432, "MPT's published configs"),
    (r"opt[-_ ]?\d", 50_272, "OPT's published config"),
    (r"falcon", 65_024, "Falcon's published config"),
    (r"neox", 50_432, "GPT-NeoX-20B's published config"),
    (r"gpt3|gpt-3|nemo megatron|turing|megatron.1t", 51_200, "GPT-2's tokenizer as Megatron-LM pads it for tp 8"),
    (r"gpt", 50_257, "GPT-2's tokenizer"),
)
"""(pattern of model names, rows, why) where a table leaves the vocabulary out."""

USUAL_ROWS = 50_304
"""Where nothing is known."""

MAXTEXT_HEAD_DIM = 256
"""Of MaxText's v4 recipes, whose feed-forward has no gate: with both, sizes give the parameters that the models are
named by."""

HEAD_DIMS = (
    (r"qwen.?3", 128),
    (r"gpt.oss", 64),
    (r"gemma.?2.*27b", 128),
    (r"gemma(?!.?[34])", 256),
    (r"mistral.?(?:nemo|small)|ministral|devstral|glm.?4\.[5-9]", 128),
)
"""Head widths that are not hidden / heads."""

UNKNOWN_LAYERS = (
    (r"nemotron.(?:3_|3.5|v3)(?!.*(?:nano|lightning|super|ultra))", "a hybrid whose layers no published config gives"),
    (r"mimo", "a model of several towers whose sizes the row does not give"),
    (r"^t5", "an encoder-decoder whose two lengths and layer counts the row does not give"),
    (r"switch", "an encoder-decoder with every second layer a mixture, for which there is no builder"),
    (r"deepseek.?v4", "a model whose sizes the row does not give"),
    (r"gemma.?4.*\b[24]b", "a decoder with inputs of their own for each layer, for which there is no builder"),
)
"""(pattern of model names, why there is no graph)."""

HYBRIDS: tuple[tuple[str, Callable[..., HybridConfig]], ...] = (
    (r"nemotron.?h.*8b", lambda mtp_depth=0: nemotron_h_8b()),
    (r"mamba.?2.*2\.7b", lambda mtp_depth=0: mamba2_2_7b()),
    (r"nemotron.*lightning", nemotron_3_nano),
    (r"nemotron.v?3.nano", nemotron_3_nano),
    (r"nemotron.v?3.super", nemotron_3_super),
    (r"nemotron.v?3.ultra", nemotron_3_ultra),
)
"""(pattern of model names, config): Nemotron 3, whose layers no column holds. Nemotron 3.5 Lightning has Nano's."""

GEMMAS = (
    (r"gemma.?3.*\b1b", "gemma-3-1b"),
    (r"gemma.?3.*\b4b", "gemma-3-4b"),
    (r"gemma.?3.*\b12b", "gemma-3-12b"),
    (r"gemma.?3.*\b27b", "gemma-3-27b"),
    (r"gemma.?4.*\b26b", "gemma-4-26b-a4b"),
    (r"gemma.?4.*\b31b", "gemma-4-31b"),
)
"""(pattern of model names, name of the config): windows and heads that no column holds."""

_DROPOUT = 0.1
_HUGGING_FACE = r"hugging ?face|transformers|\bhf\b"
"""Its GPT-2 has dropout of 0.1 and `gelu_new` (configuration_gpt2.py, read 2026-11-21); GPT-J and GPT-Neo the
latter."""
NEMO_DROPOUT = r"gpt-?3|nemo megatron"
"""Models whose configs of NeMo have dropout of 0.1 (NVIDIA/NeMo-Framework-Launcher 24.07 launcher_scripts/conf/
training/gpt3; NVIDIA/dgxc-benchmarking v24.11.1 nemo_megatron/gpt3_175b_hydra.yaml; read 2026-11-22)."""
_MEGATRON_DROPOUT = r"megatron-lm|megatron-deepspeed|megatron\+deepspeed|libai|oneflow"


GATED = (
    r"llama|mistral|qwen|baichuan|deepseek.?(?:coder|llm|math)|vicuna|alpaca|internlm|smollm|phi.?[34]|\byi\b|olmo"
    r"|glm|granite|exaone|minicpm|skywork|aquila|command.?r|stablelm|gemma|palm"
)
"""Models with Llama's layer: a gated feed-forward, RMS norms, no biases that matter."""

UNGATED = r"gpt|opt|bloom|falcon|mpt|pythia|neo|starcoder|phi|nemotron|turing|nlg|galactica|maxtext|codegen|santacoder"
"""Models whose feed-forward has no gate."""

OWN_HEAD = r"^vtrain\b"
"""Programs whose head is a table of its own (vTrain f8dda84 src/model/gpt_modeling.py ShardedGptLogit)."""

UNPADDED = r"VIA-Research/vTrain.*single"
"""Sources whose model divides the vocabulary over tp as it is (vTrain f8dda84 src/model/gpt_modeling.py); its measured
runs are Megatron-DeepSpeed's."""


def model_config(row: Row) -> tuple[Config, tuple[str, ...]]:
    """(config, what was assumed) of a row. InputError when a size is missing or there is no builder."""
    name = row.model.lower()
    for pattern, why in UNKNOWN_LAYERS:
        if re.search(pattern, name):
            raise InputError(f"{row.model}: {why}")
    missing = [c for c in ("layers", "hidden", "heads", "ffn", "seq_len") if getattr(row, c) is None]
    if missing:
        raise InputError(f"{', '.join(missing)} not given")
    vocab, notes = _vocab(row, name)
    if (made := next((make for pattern, make in HYBRIDS if re.search(pattern, name)), None)) is not None:
        return _hybrid(replace(made(mtp_depth=hybrid_mtp(row)), name=row.model, vocab_size=vocab), row, notes)
    if (known := next((known for pattern, known in GEMMAS if re.search(pattern, name)), None)) is not None:
        return replace(GEMMA_SIZES[known](), name=row.model, vocab_size=vocab), notes
    if row.arch == "moe" or row.experts:
        config, more = _mixture(row, name, vocab)
    elif re.search(r"bert", name):
        config, more = _bert(row, vocab), ()
    elif re.search(GATED, name) or _gated_by_sizes(row, name, vocab):
        config, more = _llama(row, name, vocab), ()
    elif re.match(MAXTEXT, name) and "global_parameter_scale" in row.notes:
        config, more = _llama(row, name, vocab), ()
    elif "nemotron" in name:
        config, more = _nemotron(row, name, vocab), ()
    elif is_test(row) and _kv_heads(row) != _int(row, "heads"):
        config, more = _grouped_gpt(row, name, vocab), ()
    elif re.match(MAXTEXT, name) or _kv_heads(row) != _int(row, "heads"):
        config, more = _ungated(row, name, vocab)
    else:
        config, more = _gpt(row, vocab), ()
    return config, notes + more


@lru_cache(maxsize=512)
def build(config: Config, adapters: Adapters | None = None) -> Graph:
    """The Graph of a config, frozen if it has adapters."""
    return with_adapters(build(config), adapters) if adapters is not None else _build(config)


def _build(config: Config) -> Graph:
    match config:
        case GptConfig():
            return gpt(config)
        case LlamaConfig():
            return llama(config)
        case DecoderConfig():
            return decoder(config)
        case MixtralConfig():
            return mixtral(config)
        case DeepseekConfig():
            return deepseek_v3(config)
        case BertConfig():
            return bert(config)
        case HybridConfig():
            return hybrid(config)


def _vocab(row: Row, name: str) -> tuple[int, tuple[str, ...]]:
    """Rows of the embedding as the program pads them, and where they are from."""
    size = row.vocab
    notes: tuple[str, ...] = ()
    if size is None:
        named = next(((rows, why) for pattern, rows, why in VOCABULARIES if re.search(pattern, name)), None)
        result = tokenizer(row) or named
        result = result or (USUAL_ROWS, f"none is known for {row.model!r}: GPT-2's tokenizer, padded")
        size, notes = result[0], (f"vocab {result[0]} not in the row: {result[1]}",)
    if re.search(UNPADDED, row.source or ""):
        size, notes = size // (row.tp or 1) * (row.tp or 1), (*notes, "vocabulary not padded: the source's own model")
    elif re.search(r"megatron|nemo|libai|primus", row.framework.lower()):
        multiple = 128 * (row.tp or 1)  # Megatron-LM: --make-vocab-size-divisible-by 128, times tp
        if METHODS.get(read_notes(row).method, "ends") != "ends":
            multiple = lcm(multiple, row.pp or 1)  # of that fork: by all ranks that divide it (arguments.py)
        size = -(-size // multiple) * multiple
    return size, notes


def _gated_by_sizes(row: Row, name: str, vocab: int) -> bool:
    """Whether a model that no pattern names has a gated feed-forward: the count of parameters that was published says,
    or a width that is not four times the hidden size, as that of every GPT is."""
    if re.search(UNGATED, name) or is_test(row) or not (row.ffn or "").isdigit() or not (row.kv_heads or "1").isdigit():
        return False
    hidden, ffn, layers = _int(row, "hidden"), _ffn(row), _int(row, "layers")
    if row.params_b is None:
        return ffn != 4 * hidden
    attention = 2 * hidden * hidden * (1 + _kv_heads(row) / _int(row, "heads"))
    plain, gated = (layers * (attention + n * hidden * ffn) + vocab * hidden for n in (2, 3))
    published = row.params_b * 1e9
    return min(abs(gated - published), abs(gated + vocab * hidden - published)) < min(
        abs(plain - published), abs(plain + vocab * hidden - published)
    )


def _int(row: Row, column: str) -> int:
    value = getattr(row, column)
    if not isinstance(value, int):
        raise InputError(f"{column} not given")
    return value


def _kv_heads(row: Row) -> int:
    if row.kv_heads is None:
        return _int(row, "heads")
    if not row.kv_heads.isdigit():
        raise InputError(f"kv_heads = {row.kv_heads!r} is not a whole number")
    return int(row.kv_heads)


def _ffn(row: Row) -> int:
    if row.ffn is None or not row.ffn.isdigit():
        raise InputError(f"ffn = {row.ffn!r} is not a whole number")
    return int(row.ffn)


def _head_dim(row: Row, name: str) -> int:
    heads, hidden = _int(row, "heads"), _int(row, "hidden")
    for pattern, size in HEAD_DIMS:
        if re.search(pattern, name):
            return size
    if re.match(MAXTEXT, name):
        return 128 if "global_parameter_scale" in row.notes else MAXTEXT_HEAD_DIM
    if hidden % heads and name.startswith("palm"):
        return 256
    if hidden % heads:
        raise InputError(f"hidden = {hidden} is not divisible by heads = {heads}")
    return hidden // heads


def _grouped(row: Row, name: str, vocab: int) -> dict[str, Any]:
    """Fields that configs of decoders with grouped queries share, whatever their feed-forwards."""
    return {
        "name": row.model,
        "num_layers": _int(row, "layers"),
        "hidden_size": _int(row, "hidden"),
        "num_heads": _int(row, "heads"),
        "num_kv_heads": _kv_heads(row),
        "head_dim": _head_dim(row, name),
        "vocab_size": vocab,
    }


def _learned(row: Row, vocab: int) -> dict[str, Any]:
    """Fields that configs of models with learned positions share: GPT and BERT."""
    return {
        "name": row.model,
        "num_layers": _int(row, "layers"),
        "hidden_size": _int(row, "hidden"),
        "num_heads": _int(row, "heads"),
        "ffn_size": _ffn(row),
        "vocab_size": vocab,
        "max_positions": _int(row, "seq_len"),
    }


def _gpt(row: Row, vocab: int) -> GptConfig:
    program = row.framework.lower()
    eager = bool(re.search(_HUGGING_FACE, program))
    trained_with = re.search(_MEGATRON_DROPOUT, program) or (eager and re.search(r"gpt-?2", row.model.lower()))
    if program == "nemo":
        trained_with = re.search(NEMO_DROPOUT, row.model.lower())
    if without := re.search(ZERO_BUBBLE, program):
        trained_with = None
    dropout = _DROPOUT if trained_with else 0.0
    return GptConfig(
        **_learned(row, vocab),
        dropout=dropout,
        attention_dropout=dropout,
        tied=not (without or re.search(OWN_HEAD, program)),
        activation="gelu_new" if eager else "gelu_tanh",
    )


def _llama(row: Row, name: str, vocab: int) -> LlamaConfig:
    # nanotron's benchmark script ties the embedding of its two smaller models (notes of those rows).
    tied = "tied emb" in row.notes and bool(re.search(r"llama-(1\.34|3\.57)b", name))
    return LlamaConfig(
        **_grouped(row, name, vocab),
        ffn_size=_ffn(row),
        tied=tied,
        qkv_bias="qwen2" in name,
        qk_norm="qwen3" in name,
    )


def _nemotron(row: Row, name: str, vocab: int) -> DecoderConfig:
    """Nemotron-3 and 4: an ungated feed-forward with a squared ReLU, LayerNorm, no biases of products (NVIDIA/NeMo
    v2.2.0 nemo/collections/llm/gpt/model/nemotron.py NemotronConfig, read 2026-11-22)."""
    return DecoderConfig(
        **_grouped(row, name, vocab),
        ffn_size=_ffn(row),
        norm="layer",
        norm_bias=True,
        gated=False,
        activation="relu2",
    )


def _grouped_gpt(row: Row, name: str, vocab: int) -> DecoderConfig:
    """Megatron-LM's GPT with groups of heads, as its tests of memory and speed leave it: LayerNorm, biases, GELU,
    learned positions, dropout, a head of its own (NVIDIA/Megatron-LM 1739859 tests/functional_tests/test_cases/gpt/
    gpt3_7b_tp4_pp1_memory_speed/model_config.yaml and the defaults of training/arguments.py, read 2026-11-23)."""
    return DecoderConfig(
        **_grouped(row, name, vocab),
        ffn_size=_ffn(row),
        norm="layer",
        norm_bias=True,
        gated=False,
        activation="gelu_tanh",
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
        rotary=False,
        position_rows=_int(row, "seq_len"),
        dropout=_DROPOUT,
        attention_dropout=_DROPOUT,
    )


def _ungated(row: Row, name: str, vocab: int) -> tuple[LlamaConfig, tuple[str, ...]]:
    """An ungated feed-forward of f as a gated one of 2f/3: as many parameters and FLOPs."""
    gated = max(128, round(_ffn(row) * 2 / 3 / 128) * 128)
    note = f"ungated feed-forward of {row.ffn} taken as a gated one of {gated}: as many parameters and FLOPs"
    return _llama(replace(row, ffn=str(gated)), name, vocab), (note,)


def _bert(row: Row, vocab: int) -> BertConfig:
    return BertConfig(
        **_learned(row, vocab),
        num_token_types=2,
        dropout=_DROPOUT,
        attention_dropout=_DROPOUT,
        activation="gelu",
        head="mlm",
    )


def _mixture(row: Row, name: str, vocab: int) -> tuple[Config, tuple[str, ...]]:
    counts = re.fullmatch(r"(\d+)(?: routed)?(?: ?\+ ?(\d+)(?: shared)?)?", row.experts or "")
    widths = _widths(row.ffn or "")
    if counts is None or "expert" not in widths or row.topk is None:
        raise InputError(f"experts = {row.experts!r}, ffn = {row.ffn!r}, topk = {row.topk!r} do not say the mixture")
    if (row.kv_heads or "").upper() == "MLA":
        return _deepseek(row, name, vocab, int(counts[1]), int(counts[2] or 1), widths)
    if counts[2] or "dense" in widths or "shared" in widths:
        return _with_shared(row, name, vocab, int(counts[1]), int(counts[2] or 1), widths)
    oss = bool(re.search(r"gpt.oss", name))  # openai/gpt-oss-120b config.json: sliding_window, layer_types, biases
    dropout = _DROPOUT if is_test(row) else 0.0
    config = MixtralConfig(
        **_grouped(row, name, vocab),
        num_experts=int(counts[1]),
        experts_per_token=row.topk,
        expert_ffn_size=widths["expert"],
        qk_norm="qwen3" in name,
        dropout=dropout,
        attention_dropout=dropout,
        gated=not is_test(row),  # the tests' mixtures are GPT's feed-forward, several times
        tied=is_test(row) and "untie" not in (row.section or ""),
        window=128 if oss else 0,
        windowed_every=2 if oss else 1,
        qkv_bias=oss,
        out_bias=oss,
        expert_bias=oss,
        rotary_factor=oss,
    )
    return config, ()


def _widths(ffn: str) -> dict[str, int]:
    """Widths of feed-forwards by kind: `dense`, `shared` and `expert`, as is what has no word."""
    words = {"dense": "dense", "shared": "shared"}
    hit = re.finditer(r"(\d+)(?:[ _-]*\(?(dense|shared|expert|moe|routed)\b)?", ffn)
    return {words.get(match[2] or "", "expert"): int(match[1]) for match in hit}


def _with_shared(
    row: Row, name: str, vocab: int, experts: int, shared: int, widths: dict[str, int]
) -> tuple[DecoderConfig, tuple[str, ...]]:
    """Experts that some tokens visit beside one that all do, as wide as the shared ones together; a dense width is
    that of the first layer."""
    mixture = Mixture(
        num_experts=experts,
        experts_per_token=row.topk or 1,
        expert_ffn_size=widths["expert"],
        shared_ffn_size=widths.get("shared", shared * widths["expert"]),
        num_dense_layers=1 if "dense" in widths else 0,
    )
    dense = widths.get("dense", widths["expert"])
    config = DecoderConfig(**_grouped(row, name, vocab), ffn_size=dense, mixture=mixture, qk_norm="qwen3" in name)
    return config, (f"{shared} shared experts as one of {mixture.shared_ffn_size}",)


FAKE_GATE = r"balanced fake gate"
"""NeMo AutoModel's FakeBalancedGate, without noise: the i-th token gets the topk experts from i·topk on, modulo all
(NVIDIA-NeMo/Automodel nemo_automodel/components/moe/layers.py, read 2026-11-22)."""


def _hybrid(config: HybridConfig, row: Row, notes: tuple[str, ...]) -> tuple[Config, tuple[str, ...]]:
    """Under the balanced fake gate, experts that follow each other are in the smallest group that holds them."""
    m = config.mixture
    if m is None or not re.search(FAKE_GATE, row.notes):
        return config, notes
    sizes = range(m.experts_per_token, m.num_experts + 1)
    size = next(size for size in sizes if m.num_experts % size == 0)
    grouped = replace(m, num_groups=m.num_experts // size)
    note = "balanced fake gate: a token goes to experts that follow each other"
    return replace(config, mixture=grouped), (*notes, note)


def _deepseek(
    row: Row, name: str, vocab: int, experts: int, shared: int, widths: dict[str, int]
) -> tuple[Config, tuple[str, ...]]:
    """DeepSeek-V3's latent sizes; Kimi K2, V2 and those like it have the same with one dense layer, the narrow ones
    without a latent of queries (config.json of DeepSeek-V2, V2-Lite and Moonlight)."""
    earlier = bool(re.search(r"v2|moonlight", name))
    dense, topk = 1 if earlier or "kimi" in name else 3, row.topk or 8
    notes = ["latent widths are those of DeepSeek-V3's config"]
    groups = (8, 3) if experts == 160 else (1, 1) if "kimi" in name or experts != 256 else (8, 4)
    if re.search(FAKE_GATE, row.notes) and experts % topk == 0:
        groups = experts // topk, 1
        notes.append("balanced fake gate: a token goes to experts that follow each other")
    whole = deepseek_v3_671b()
    hidden = _int(row, "hidden")
    config = replace(
        whole,
        name=row.model,
        num_layers=_int(row, "layers"),
        num_dense_layers=min(dense, _int(row, "layers") - 1),
        hidden_size=hidden,
        q_rank=whole.q_rank if hidden >= NARROW_WIDTH else 0,
        num_heads=_int(row, "heads"),
        num_experts=experts,
        num_shared_experts=shared,
        experts_per_token=topk,
        num_groups=groups[0],
        groups_per_token=groups[1],
        router="softmax" if re.search(r"v2", name) else whole.router,
        expert_ffn_size=widths["expert"],
        ffn_size=widths.get("dense", widths["expert"]),
        vocab_size=vocab,
        mtp_modules=mtp_modules(row),
    )
    if config.mtp_modules and "mtp" not in name:
        notes.append("a multi-token prediction module: its recipes train it")
    return config, tuple(notes)


NARROW_WIDTH = 4096
"""Hidden size below which DeepSeek's queries have no latent (2048 in V2-Lite, 5120 in V2)."""
