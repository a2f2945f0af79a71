"""`state_space`: a Mamba-2 mixer's core on one rank, in chunks: convolution, scan over the sequence, skip, gate.

The op reads what one linear wrote, group of heads after group: z, x, B, C and dt of each side by side. Ranks of tp have
groups of their own. Only what it reads is kept for backward, which runs the op once more, as mamba_ssm's own
path does. Computed in float32 or wider; torch's autograd has the derivative. Attributes: `chunk`, tokens of a chunk;
`step_min` and `step_max`, between which dt stays. Leaves out packed rows.
Source: Dao & Gu 2024, section 6.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gnomon.errors import InputError
from gnomon.runtime.ops.site import Operand, Site, read


def state_space(site: Site, joined: Tensor, *parameters: Operand) -> Tensor:
    """(…, tokens, groups, width of a group) of (…, tokens, all that the projection writes)."""
    if site.attr("rule", "ssd") != "ssd":
        raise InputError(f"{site.op.path}: {site.attr('rule', 'ssd')} is predicted for serving, and not run")
    named = [name.rpartition(".")[2] for name in site.op.inputs[1:]]
    by_name = dict(zip(named, (read(parameter) for parameter in parameters), strict=True))
    steps = site.attr("step_min", 0.0), site.attr("step_max", math.inf)
    run = partial(_scan, by_name, site.attr("chunk", 128), steps)
    if not torch.is_grad_enabled():
        return run(joined)
    out: Tensor = checkpoint(run, joined, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-untyped-call]
    return out


def _scan(parameters: Mapping[str, Tensor], chunk: int, steps: tuple[float, float], joined: Tensor) -> Tensor:
    dtype = torch.promote_types(joined.dtype, torch.float32)
    p = {name: tensor.to(dtype) for name, tensor in parameters.items()}
    groups, width = p["weight_x"].shape[:2]
    state, heads = p["weight_bc"].shape[2], p["D"].shape[0]
    widths = [width, width, state, state, heads // groups]
    # [tokens, groups, width + width + state + state + heads / groups] -> five tensors [tokens, groups * own width].
    # Group after group in place of part after part, so that tp cuts between groups.
    z, x, b, c, dt = (t.flatten(-2) for t in joined.to(dtype).unflatten(-1, (groups, -1)).split(widths, dim=-1))
    xbc = functional.silu(_convolved(torch.cat([x, b, c], dim=-1), p))
    x, b, c = xbc.split([groups * width, groups * state, groups * state], dim=-1)
    dt = functional.softplus(dt + p["dt_bias"]).clamp(*steps)
    x = x.unflatten(-1, (heads, -1))
    b, c = (t.unflatten(-1, (groups, state)) for t in (b, c))
    # Discretised as in the paper: A is negative, exp(A dt) decays the state, and dt scales what x adds to it.
    y = scan(x * dt[..., None], -p["A_log"].exp() * dt, b, c, chunk) + x * p["D"][:, None]
    return (y.flatten(-2) * functional.silu(z)).unflatten(-1, (groups, width)).to(joined.dtype)


def _convolved(xbc: Tensor, p: Mapping[str, Tensor]) -> Tensor:
    """A causal convolution over the last tokens of each channel by itself; zeros before the first."""
    weight = torch.cat([p["weight_x"].flatten(0, 1), p["weight_bc"].flatten(0, 2)])
    bias = torch.cat([p["bias_x"].flatten(), p["bias_bc"].flatten()]) if "bias_x" in p else None
    taps = weight.shape[-1]
    padded = functional.pad(xbc.transpose(-1, -2), (taps - 1, 0))
    return functional.conv1d(padded, weight[:, None], bias, groups=len(weight)).transpose(-1, -2)


def scan(x: Tensor, decay: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    """y[t] = C[t] · S[t] with S[t] = exp(decay[t]) · S[t-1] + B[t] x[t]ᵀ, for each head.

    x: (batch, tokens, heads, width). decay: (batch, tokens, heads), below 0. b, c: (batch, tokens, groups, state);
    neighbouring heads share a group. In chunks: the tokens of a chunk see each other through one masked product, and
    those before through the state that the chunks before left.
    """
    tokens, heads = x.shape[1], x.shape[2]
    chunk = min(chunk, tokens)
    rest = -tokens % chunk
    if rest:  # after the last token: zeros change nothing before them
        x, b, c = (functional.pad(t, (0, 0, 0, 0, 0, rest)) for t in (x, b, c))
        decay = functional.pad(decay, (0, 0, 0, rest))
    b, c = (t.repeat_interleave(heads // t.shape[2], dim=2).unflatten(1, (-1, chunk)) for t in (b, c))
    x, decay = x.unflatten(1, (-1, chunk)), decay.unflatten(1, (-1, chunk)).transpose(-1, -2)
    since = decay.cumsum(-1)  # (batch, chunks, heads, chunk)
    # z batch, k chunk, h head, i and j tokens of a chunk, n state, p width. steps[i, j] is the sum of decays of tokens
    # j + 1 … i, the log of what is left at i of what j added.
    steps = since[..., :, None] - since[..., None, :]
    before = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    within = steps.masked_fill(~before, float("-inf")).exp()
    scores = torch.einsum("zkihn,zkjhn->zkhij", c, b) * within
    y = torch.einsum("zkhij,zkjhp->zkihp", scores, x)
    # The state at a chunk's end from its own tokens: each decays from its token to the last one.
    chunk_states = torch.einsum("zkjhn,zkhj,zkjhp->zkhpn", b, (since[..., -1:] - since).exp(), x)  # by each chunk alone
    states, carried = [torch.zeros_like(chunk_states[:, 0])], since[..., -1].exp()
    # The only loop over the sequence: a state at the beginning of each chunk, tokens / chunk of them.
    for index in range(chunk_states.shape[1] - 1):
        states.append(states[-1] * carried[:, index, :, None, None] + chunk_states[:, index])
    # What came before the chunk has decayed by since[i] when token i reads it.
    y = y + torch.einsum("zkihn,zkhi,zkhpn->zkihp", c, since.exp(), torch.stack(states, dim=1))
    return y.flatten(1, 2)[:, :tokens]
