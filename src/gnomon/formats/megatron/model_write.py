"""The network options of Megatron-LM for a model's config: what `megatron_model` reads, written.

`model_options(config, seq_len)` returns (name, value) pairs as in Megatron's `args`. What an option cannot say
(GPT-NeoX's parallel residual, a window on some layers) is left out: reading the options back shows the difference.
"""

from __future__ import annotations

from gnomon.formats.job import ModelConfig
from gnomon.models.deepseek import DeepseekConfig
from gnomon.models.gpt import GptConfig, GptNeoxConfig
from gnomon.models.llama import LlamaConfig
from gnomon.models.mixtral import MixtralConfig

Options = list[tuple[str, object]]


def model_options(config: ModelConfig, seq_len: int) -> Options:
    """The options of a decoder that takes sequences of `seq_len` tokens."""
    shared: Options = [
        ("num_layers", config.num_layers),
        ("hidden_size", config.hidden_size),
        ("num_attention_heads", config.num_heads),
        ("vocab_size", config.vocab_size),
        # The vocabulary is padded to a multiple of this × tp.
        ("make_vocab_size_divisible_by", 1),
    ]
    match config:
        case LlamaConfig():
            ffn: Options = [("ffn_hidden_size", config.ffn_size)]
            return [*shared, *_llama(config, seq_len), *ffn]
        case MixtralConfig():
            return [*shared, *_llama(config, seq_len), *_experts(config)]
        case DeepseekConfig():
            return [*shared, *_deepseek(config, seq_len)]
        case GptNeoxConfig():
            return [*shared, *_gpt_neox(config, seq_len)]
        case GptConfig():
            return [*shared, *_gpt(config)]


def _rotary(seq_len: int) -> Options:
    return [("position_embedding_type", "rope"), ("max_position_embeddings", seq_len)]


def _llama(config: LlamaConfig | MixtralConfig, seq_len: int) -> Options:
    grouped = config.num_kv_heads != config.num_heads
    everywhere = config.qkv_bias and config.out_bias and getattr(config, "ffn_bias", True)
    return [
        ("kv_channels", config.head_dim),
        ("group_query_attention", grouped),
        ("num_query_groups", config.num_kv_heads if grouped else None),
        *_rotary(seq_len),
        ("normalization", "RMSNorm"),
        ("swiglu", True),
        ("disable_bias_linear", not everywhere),
        ("add_qkv_bias", config.qkv_bias and not everywhere),
        ("qk_layernorm", config.qk_norm),
        ("window_size", f"{config.window - 1},0" if config.window else None),
        ("untie_embeddings_and_output_weights", not config.tied),
        ("attention_dropout", 0.0),
        ("hidden_dropout", 0.0),
    ]


def _experts(config: MixtralConfig) -> Options:
    return [
        ("ffn_hidden_size", config.expert_ffn_size),
        ("num_experts", config.num_experts),
        ("moe_router_topk", config.experts_per_token),
        ("moe_ffn_hidden_size", config.expert_ffn_size),
        ("moe_grouped_gemm", True),
    ]


def _deepseek(config: DeepseekConfig, seq_len: int) -> Options:
    dense, mixed = config.num_dense_layers, config.num_layers - config.num_dense_layers
    return [
        ("multi_latent_attention", True),
        ("q_lora_rank", config.q_rank or None),
        ("kv_lora_rank", config.kv_rank),
        ("qk_head_dim", config.nope_dim),
        ("qk_pos_emb_head_dim", config.rope_dim),
        ("v_head_dim", config.v_head_dim),
        ("kv_channels", config.v_head_dim),
        *_rotary(seq_len),
        ("normalization", "RMSNorm"),
        ("swiglu", True),
        ("disable_bias_linear", True),
        ("untie_embeddings_and_output_weights", True),
        ("attention_dropout", 0.0),
        ("hidden_dropout", 0.0),
        ("ffn_hidden_size", config.ffn_size),
        ("num_experts", config.num_experts),
        ("moe_layer_freq", f"([0]*{dense}+[1]*{mixed})"),
        ("moe_router_topk", config.experts_per_token),
        ("moe_ffn_hidden_size", config.expert_ffn_size),
        ("moe_shared_expert_intermediate_size", config.num_shared_experts * config.expert_ffn_size or None),
        ("moe_router_score_function", config.router),
        ("moe_router_num_groups", config.num_groups if config.num_groups > 1 else None),
        ("moe_router_group_topk", config.groups_per_token if config.num_groups > 1 else None),
        ("moe_grouped_gemm", True),
        ("mtp_num_layers", config.mtp_modules or None),
    ]


def _gpt(config: GptConfig) -> Options:
    return [
        ("ffn_hidden_size", config.ffn_size),
        ("position_embedding_type", "learned_absolute"),
        ("max_position_embeddings", config.max_positions),
        ("untie_embeddings_and_output_weights", not config.tied),
        ("attention_dropout", config.attention_dropout),
        ("hidden_dropout", config.dropout),
    ]


def _gpt_neox(config: GptNeoxConfig, seq_len: int) -> Options:
    return [
        ("ffn_hidden_size", config.ffn_size),
        *_rotary(seq_len),
        ("rotary_percent", config.rotary_fraction),
        ("untie_embeddings_and_output_weights", not config.tied),
        ("attention_dropout", 0.0),
        ("hidden_dropout", 0.0),
    ]
