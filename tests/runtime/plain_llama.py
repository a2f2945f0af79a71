"""The plain Llama: torch's own layers and autograd on one device, no parallelism. What every plan must agree with.

`Llama(config)` has the parameters of `gnomon.models.llama(config)`: the same full names, shapes up to merging head
dims, and the same values at step 0.
Shapes: B sequences, T tokens, H heads, D head_dim.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from gnomon.models.llama import LlamaConfig
from gnomon.runtime.parameters.initial import initial

NORM_EPS = 1e-5
"""Llama's own."""
ROTARY_BASE = 10_000.0
"""Of the first Llama; it changes no shape."""


@lru_cache(maxsize=4)
def rotary_tables(tokens: int, half: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """(cosines, sines), (T, 1, D/2) each: made once, so that no microbatch keeps its own for backward."""
    work = torch.promote_types(dtype, torch.float32)
    speed = ROTARY_BASE ** (-torch.arange(half, dtype=work, device=device) / half)
    angle = torch.arange(tokens, dtype=work, device=device)[:, None, None] * speed
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotary(x_BTHD: Tensor) -> Tensor:
    """Rotary position embedding of queries or keys: dims i and i + D/2 turn together (Su et al. 2021)."""
    half = x_BTHD.shape[3] // 2
    cos, sin = rotary_tables(x_BTHD.shape[1], half, x_BTHD.dtype, x_BTHD.device)
    a, b = x_BTHD[..., :half], x_BTHD[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attention_core(q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> Tensor:
    """Causal attention; fewer key heads than query heads serve groups of them."""
    q, k, v = (t.transpose(1, 2) for t in (q_BTHD, k_BTHD, v_BTHD))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


class SelfAttention(nn.Module):
    """Projections, rotary, core, output projection."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(c.head_dim, eps=NORM_EPS) if c.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(c.head_dim, eps=NORM_EPS) if c.qk_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, hidden) -> the same."""
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        out: Tensor = self.o_proj(attention_core(rotary(self.q_norm(q)), rotary(self.k_norm(k)), v).flatten(2))
        return out


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.ffn_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.ffn_size, bias=False)
        self.down_proj = nn.Linear(c.ffn_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, hidden) -> the same."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.hidden_size, eps=NORM_EPS)
        self.self_attn = SelfAttention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, eps=NORM_EPS)
        self.mlp = FeedForward(c)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, hidden) -> the same."""
        x = x + self.self_attn(self.input_layernorm(x))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embedding, layers, final norm: what public checkpoints call `model`."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        self.norm = nn.RMSNorm(c.hidden_size, eps=NORM_EPS)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) token ids -> (B, T, hidden)."""
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.norm(x)
        return out


class Llama(nn.Module):
    """The whole model. PlanError for parts of the config that the runtime does not compute."""

    def __init__(self, config: LlamaConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.to(dtype)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                constant = 1.0 if name.endswith("norm.weight") else 0.0 if name.endswith(".bias") else None
                parameter.copy_(initial(name, parameter.shape, seed, dtype, constant=constant))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy summed over all tokens, in float32 or wider. ids, labels: (B, T)."""
        logits = self.lm_head(self.model(ids))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
