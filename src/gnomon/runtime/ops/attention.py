"""`attention` and `rotary`: mixing positions, by torch's own kernels.

Attention is `scaled_dot_product_attention` with a mask for windows; where scores are capped or there are sinks, it is
merged from `pieces`, so that it too keeps no scores. Rotary
angles are made in float32 (or wider, in float64 runs) and kept for all layers and microbatches. Positions that ranks
divide among them (cp) are `context`. Leaves out dropout.
Shapes: q (…, positions, heads, dim), k and v (…, positions, kv heads, dim).
"""

from __future__ import annotations

import math
from dataclasses import fields
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gnomon.errors import PlanError
from gnomon.models.numerics import Rotary
from gnomon.runtime.data.packing import Packing
from gnomon.runtime.data.parts import Part, Prefixes
from gnomon.runtime.ops.context import as_wide, over_context
from gnomon.runtime.ops.pieces import OnlineSoftmax, Rule, attend, backward
from gnomon.runtime.ops.site import Operand, Site, read

ROTARY_FIELDS = frozenset(field.name for field in fields(Rotary))


@lru_cache(maxsize=16)
def window_mask(queries: int, keys: int, window: int, causal: bool, device: torch.device) -> Tensor:
    """A mask (queries, keys): whether a query sees a key; of its own position and the `window` - 1 before it, or
    without causality as many after it. The queries are the last positions of the keys."""
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    # distance[i, j] is query i's position less key j's.
    seen = distance < window if window else torch.ones_like(distance, dtype=torch.bool)
    return seen & (distance >= 0 if causal else distance > -window if window else seen)


def attention(
    site: Site, q: Tensor, k: Tensor, v: Tensor, bias: Operand | None = None, *, packing: Packing | None = None
) -> Tensor:
    """softmax(scale · q kᵀ + bias) v; fewer key heads than query heads serve groups of them. packing: documents that
    share a row and do not see each other."""
    rule = Rule(
        causal=site.attr("causal", False),
        window=site.attr("window", 0),
        scale=site.attr("scale", 0.0) or q.shape[-1] ** -0.5,
        cap=site.attr("softcap", 0.0),
    )
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    if site.attr("masked", False):  # a captured call's own mask, as torch takes it
        mask = read(bias) if bias is not None else None
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=rule.scale, enable_gqa=q.shape[-3] != k.shape[-3]
        ).transpose(-3, -2)
    sinks = site.attr("sinks", False)
    if packing is not None and packing.parts is not None:
        return _over_parts(site, q, k, v, rule, bias if sinks else None, packing).transpose(-3, -2)
    whole = partial(_whole, rule=rule, bias=bias, sinks=sinks, packing=packing)
    out = whole(q, k, v) if site.axis("cp").ranks == 1 else over_context(site, q, k, v, whole, rule, packing)
    return out.transpose(-3, -2)


def _whole(
    q: Tensor, k: Tensor, v: Tensor, *, rule: Rule, bias: Operand | None, sinks: bool, packing: Packing | None
) -> Tensor:
    """Attention over whole sequences; (…, heads, positions, dim) each."""
    causal, window, scale = rule.causal, rule.window, rule.scale
    if sinks or rule.cap:
        assert bias is not None or not sinks, "sinks are the fourth operand"
        extra = read(bias) if sinks and bias is not None else None
        merged: Tensor = _Merging.apply(q, k, v, extra, rule, packing)  # type: ignore[no-untyped-call]
        return merged
    queries, keys = q.shape[-2], k.shape[-2]
    # A window as wide as the row hides nothing: without a mask torch may choose its flash kernel.
    masked = bool(window and window < keys) or packing is not None
    if packing is not None:
        mask: Tensor | None = packing.mask(window=window if window < keys else 0, causal=causal)
    elif masked or bias is not None:
        mask = window_mask(queries, keys, window if masked else 0, causal, q.device)
    else:
        mask = None
    if bias is not None:
        added = read(bias).movedim(-1, 0).to(q.dtype)  # (positions, positions, heads) -> heads first
        # torch takes either a bias or a mask, so the mask becomes -inf in the bias.
        mask = added if mask is None or not (masked or causal) else added.masked_fill(~mask, -math.inf)
    grouped = q.shape[-3] != k.shape[-3]
    # torch refuses is_causal together with a mask; every mask made here has causality in it.
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=scale, enable_gqa=grouped
    )


def _over_parts(
    site: Site, q: Tensor, k: Tensor, v: Tensor, rule: Rule, sinks: Operand | None, packing: Packing
) -> Tensor:
    """Attention over a row of sequences of several lengths, each by itself; (1, heads, positions, dim) each."""
    parts = packing.parts or ()
    counts = [part.tokens for part in parts]
    rest = q.shape[-2] - sum(counts)  # filled up with what counts nowhere
    split = [x.split([*counts, rest], dim=-2) for x in (q, k, v)]
    plain = partial(_whole, rule=rule, bias=sinks, sinks=sinks is not None, packing=None)
    outs = list[Tensor]()
    for number, part in enumerate(parts):
        mine = split[0][number], split[1][number], split[2][number]
        if part.ranks:
            outs.append(over_context(site, *mine, plain, rule, None, part))
        elif part.is_chunk:
            extra = None if sinks is None else read(sinks)
            at = f"{packing.layer}/{site.op.path}"
            outs.append(_OfChunk.apply(*mine, extra, rule, packing.prefixes, part, at))  # type: ignore[no-untyped-call]
        else:
            outs.append(plain(*mine))
    if rest:
        # Of q, so that autograd goes back to rows of the filler as well: its gradient there is zero, not missing.
        outs.append(split[0][-1][..., : v.shape[-1]] * 0.0)
    return torch.cat(outs, dim=-2)


class _OfChunk(torch.autograd.Function):
    """A chunk of a sequence: its queries see the keys of the chunks before, which are in `Prefixes`, and its own.
    Chunks go backward in reverse, so that all later ones have left their gradients at its keys."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        rule: Rule,
        before: Prefixes,
        part: Part,
        at: str,
    ) -> Tensor:
        # Keys and values of all chunks so far are in one buffer of `Prefixes`; later chunks read it, none is copied.
        prefix, merged = before.append(at, part, k, v), OnlineSoftmax()
        ctx.given = rule, before, part, at, prefix
        keys, values = prefix.keys[:, :, : part.stop], as_wide(prefix.values[:, :, : part.stop], q)
        attend(merged, q, keys, values, part.segments, ((0, part.stop),), rule)
        out, lse = merged.result(q)
        if sinks is not None:
            out, lse = _with_sinks(out, lse, sinks)
        ctx.save_for_backward(q, out, lse, *(() if sinks is None else (sinks,)))
        return out[..., : v.shape[-1]]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, out, lse, *sinks = ctx.saved_tensors
        rule, before, part, at, prefix = ctx.given
        keys, values = prefix.keys[:, :, : part.stop], as_wide(prefix.values[:, :, : part.stop], q)
        width, grad = prefix.values.shape[-1], as_wide(grad, q)
        dq, (of_keys, of_values) = torch.zeros_like(q), prefix.gradients()
        dk, dv = of_keys[:, :, : part.stop], of_values[:, :, : part.stop]
        wide = dv if width == values.shape[-1] else torch.zeros_like(values)
        backward(grad, q, keys, values, out, lse, part.segments, ((0, part.stop),), rule, (dq, dk, wide))
        if wide is not dv:
            # Values narrower than keys (MLA) were widened with zeros for the kernel; the gradient of what was added
            # goes.
            dv += wide[..., :width]
        # Later chunks have added to these gradients already (they went backward before), and no earlier chunk reads
        # these keys: they are complete, and leave the buffer.
        own = slice(part.start, part.stop)
        mine = of_keys[:, :, own].clone(), of_values[:, :, own].clone()
        before.free(at, part)
        return dq, *mine, _of_sinks(sinks[0], grad, out, lse) if sinks else None, None, None, None, None


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """(out, log of the sum) with one more score a head, whose share goes to nothing."""
    # The softmax's denominator grows by exp(sink): weights are multiplied by exp(lse - log(exp(lse) + exp(sink))).
    below = torch.logaddexp(lse, sinks.to(lse.dtype).view(-1, 1))
    return out * (lse - below).exp().unsqueeze(-1).to(out.dtype), below


def _of_sinks(sinks: Tensor, grad: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """The gradient of attention sinks (heads)."""
    # d out / d sink = -p · out, where p is the sink's own weight; `lse` includes the sink here.
    share = (sinks.to(lse.dtype).view(-1, 1) - lse).exp()
    return -(share * (grad * out).sum(-1)).sum((0, 2)).to(sinks.dtype)


class _Merging(torch.autograd.Function):
    """Attention for which torch has no kernel on every device, keeping what flash attention keeps: scores are cut to
    ±cap by tanh (Gemma 2), or there is one more score a head, whose share of the weights goes to nothing (GPT-OSS)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, rule: Rule, packing: Packing | None
    ) -> Tensor:
        ctx.rule, ctx.packing, merged = rule, packing, OnlineSoftmax()
        # The queries are the last positions of the keys.
        ctx.queries, ctx.keys = ((k.shape[2] - q.shape[2], q.shape[2]),), ((0, k.shape[2]),)
        attend(merged, q, k, v, ctx.queries, ctx.keys, rule, packing)
        out, lse = merged.result(q)
        if sinks is not None:
            out, lse = _with_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, out, lse, *(() if sinks is None else (sinks,)))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *sinks = ctx.saved_tensors
        into = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        backward(grad, q, k, v, out, lse, ctx.queries, ctx.keys, ctx.rule, into, ctx.packing)
        return *into, _of_sinks(sinks[0], grad, out, lse) if sinks else None, None, None


Attributes = tuple[tuple[str, Any], ...]
"""Of a rotary op, as it carries them; what is left out is as in `models.numerics.Rotary`."""


def inverse_frequencies(attributes: Attributes, width: int, dtype: torch.dtype, positions: int) -> Tensor:
    """Returns (width / 2): radians a position of each pair, in the order of operations of transformers. positions: of
    the sequence, on which `dynamic` and `longrope` depend. Sources: Su et al. 2021; Llama 3.1's smooth change between
    scaled and unscaled pairs; YaRN (Peng et al. 2023); LongRoPE (Ding et al. 2024)."""
    r = Rotary(**{name: value for name, value in attributes if name in ROTARY_FIELDS})
    plain = 1.0 / r.base ** (torch.arange(0, width, 2, dtype=torch.int64).to(dtype) / width)
    match r.scaling:
        case "":
            return plain
        case "linear":
            return plain / r.scaling_factor
        case "dynamic":
            # NTK-aware scaling by the length at hand: 1 up to the original length, then linear in it.
            times = r.scaling_factor * max(positions, r.original_length) / r.original_length - (r.scaling_factor - 1)
            base = r.base * times ** (width / (width - 2))
            return 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.int64).to(dtype) / width)
        case "longrope":
            factors = r.long_factors if positions > r.original_length else r.short_factors
            return plain / torch.tensor([float(factor) for factor in factors.split()], dtype=dtype)
        case "llama3":
            # How often a pair turns within the original length: pairs that turn often keep their frequency, those that
            # turn rarely are divided by the factor, between them it is interpolated.
            turns = r.original_length * plain / (2 * math.pi)
            smooth = ((turns - r.low_freq_factor) / (r.high_freq_factor - r.low_freq_factor)).clamp(0, 1)
            return (1 - smooth) * plain / r.scaling_factor + smooth * plain
        case "yarn":
            # YaRN, section 3.2: the pairs that turn beta_fast and beta_slow times within the original length; between
            # them the frequency goes from plain to divided.
            first, last = (
                width * math.log(r.original_length / (turns * 2 * math.pi)) / (2 * math.log(r.base))
                for turns in (r.beta_fast, r.beta_slow)
            )
            if r.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, width - 1)
            # 0.001 as transformers has it, where both ends are one pair: a step in place of a division by 0.
            ramp = (torch.arange(width // 2, dtype=dtype) - first) / (last - first or 0.001)
            interpolated = 1 - ramp.clamp(0, 1)
            return plain / r.scaling_factor * (1 - interpolated) + plain * interpolated
        case other:
            raise PlanError(f"the runtime has no rotary scaling {other!r}")


@lru_cache(maxsize=64)
def rotary_tables(
    attributes: Attributes, positions: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(cosines, sines), (positions, width / 2) each: made once, so that no microbatch keeps its own for backward."""
    work = torch.promote_types(dtype, torch.float32)
    angle = torch.arange(positions, dtype=work)[:, None] * inverse_frequencies(attributes, width, work, positions)
    factor = float(dict(attributes).get("attention_factor", 1.0))
    return (angle.cos() * factor).to(device, dtype), (angle.sin() * factor).to(device, dtype)


_LONGEST: dict[tuple[Attributes, int, torch.dtype, torch.device], int] = {}
"""Positions of the longest table so far."""


def shared_tables(
    attributes: Attributes, positions: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """`rotary_tables`, as the beginning of a longer one where one was made and its angles do not depend on the length,
    so that batches of many lengths share it."""
    if dict(attributes).get("scaling", "") in ("dynamic", "longrope"):
        return rotary_tables(attributes, positions, width, dtype, device)
    key = attributes, width, dtype, device
    # The longest is asked for again by its own length, which is the cached call; a shorter one is a view of it.
    longest = _LONGEST[key] = max(positions, _LONGEST.get(key, 0))
    cos, sin = rotary_tables(attributes, longest, width, dtype, device)
    return cos[:positions], sin[:positions]


def rotary(site: Site, x: Tensor, *, packing: Packing | None = None) -> Tensor:
    """Pairs of elements turned by their position's angle: of the two halves of what is turned, or neighbours. packing:
    documents that share a row, whose positions begin at 0 each."""
    width = int(x.shape[-1] * site.attr("fraction", 1.0))
    where = site.token_dim(site.op.inputs[0])
    # The shape that the tables are viewed in: [positions, width / 2] at the token dim and the last one, 1 at the others
    # (batch, heads).
    spread = [1] * x.dim()
    spread[where], spread[-1] = x.shape[where], width // 2
    local, ranks = x.shape[where], site.position_ranks
    in_parts = packing is not None and packing.parts is not None
    # Rows of several sequences restart at 0 each, and over cp the table has to reach the positions of all ranks.
    longest = max(packing.longest, local) if packing is not None and in_parts else local * ranks
    cos, sin = shared_tables(site.op.attrs, longest, width, x.dtype, x.device)
    own = None if ranks == 1 or in_parts else site.positions(local, x.device)
    if packing is not None:
        spread[0] = x.shape[0]
        own = packing.positions if own is None else packing.positions[:, own]
    if own is not None:
        cos, sin = cos[own], sin[own]
    cos, sin = cos.view(spread), sin.view(spread)
    turned, rest = x[..., :width], x[..., width:]
    if site.attr("interleaved", False):
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned[..., : width // 2], turned[..., width // 2 :]
    parts = [a * cos - b * sin, b * cos + a * sin]
    return torch.cat([*parts, rest] if width < x.shape[-1] else parts, dim=-1)
