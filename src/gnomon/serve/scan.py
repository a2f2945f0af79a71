"""A Mamba-2 scan that goes on where an earlier iteration stopped: its state and the last tokens that it convolves.

`LayerScan.run(rows, joined)` is the op `state_space` on rows of many sequences. A running request has a slot; its state
is as long as a head is wide times its state's size, whatever its length. In float32 or wider, as in training. Source:
Dao & Gu 2024, section 6.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from gnomon.serve.rows import TokenRows


class LayerScan:
    """The scan of one layer, with its states."""

    def __init__(self, weights: Mapping[str, Tensor], chunk: int, steps: tuple[float, float], slots: int) -> None:
        """Takes weights, the parameters by their last name, steps, between which dt stays, and slots, of running
        requests and of snapshots."""
        dtype = torch.promote_types(weights["D"].dtype, torch.float32)
        p = {name: tensor.to(dtype) for name, tensor in weights.items()}
        self.groups, self.width = p["weight_x"].shape[:2]
        self.state, self.heads, self.chunk, self.steps = p["weight_bc"].shape[2], p["D"].shape[0], chunk, steps
        self.weight = torch.cat([p["weight_x"].flatten(0, 1), p["weight_bc"].flatten(0, 2)])
        self.bias = torch.cat([p["bias_x"].flatten(), p["bias_bc"].flatten()]) if "bias_x" in p else None
        self.dt_bias, self.decay, self.skip = p["dt_bias"], -p["A_log"].exp(), p["D"]
        self.dtype, self.taps = dtype, self.weight.shape[-1]
        head = self.groups * self.width // self.heads
        self.states = torch.zeros((slots, self.heads, head, self.state), dtype=dtype)
        self.before = torch.zeros((slots, len(self.weight), self.taps - 1), dtype=dtype)
        """(slots, channels, taps - 1): what the convolution reads of earlier tokens."""

    @property
    def nbytes(self) -> int:
        """Bytes of the states of all slots."""
        return self.states.nbytes + self.before.nbytes

    def copy(self, source: int, target: int) -> None:
        """One slot's state to another."""
        self.states[target], self.before[target] = self.states[source], self.before[source]

    def run(self, rows: TokenRows, joined: Tensor) -> Tensor:
        """(1, tokens, groups, width) of (1, tokens, all that the projection writes)."""
        # The projection's rows lie group after group, each with its own z, x, B, C and dt.
        widths = [self.width, self.width, self.state, self.state, self.heads // self.groups]
        parts = joined[0].to(self.dtype).unflatten(-1, (self.groups, -1)).split(widths, dim=-1)
        z, x, b, c, dt = (part.flatten(-2) for part in parts)
        xbc = torch.cat([x, b, c], dim=-1)
        dt = functional.softplus(dt + self.dt_bias).clamp(*self.steps)
        out = self._one_each(rows, xbc, dt) if rows.one_each else self._pieces(rows, xbc, dt)
        out = (out.flatten(-2) * functional.silu(z)).unflatten(-1, (self.groups, self.width))
        return out.to(joined.dtype).unsqueeze(0)

    def _split(self, xbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (…, heads, head), b and c (…, heads, state)."""
        x, b, c = xbc.split([self.groups * self.width, *[self.groups * self.state] * 2], dim=-1)
        own = self.heads // self.groups
        b, c = (t.unflatten(-1, (self.groups, self.state)).repeat_interleave(own, dim=-2) for t in (b, c))
        return x.unflatten(-1, (self.heads, -1)), b, c

    def _one_each(self, rows: TokenRows, xbc: Tensor, dt: Tensor) -> Tensor:
        """A token of each sequence."""
        # (sequences, channels, taps): the earlier tokens that the convolution reads, then the new one.
        window = torch.cat([self.before[rows.slots], xbc.unsqueeze(-1)], dim=-1)
        self.before[rows.slots] = window[..., 1:]
        mixed = (window * self.weight).sum(-1)
        x, b, c = self._split(functional.silu(mixed if self.bias is None else mixed + self.bias))
        decay = (self.decay * dt).exp()[..., None, None]
        # S = exp(A dt) S + dt x B: (sequences, heads, head, state).
        state = self.states[rows.slots] * decay + (x * dt[..., None])[..., None] * b[..., None, :]
        self.states[rows.slots] = state
        for slot, marks in zip(rows.slots.tolist(), rows.marks, strict=False):
            for _, target in marks:
                self.copy(slot, target)
        return torch.einsum("thpn,thn->thp", state, c) + x * self.skip[:, None]

    def _pieces(self, rows: TokenRows, xbc: Tensor, dt: Tensor) -> Tensor:
        outputs = []
        for number, (begin, end, start) in enumerate(rows.spans):
            slot = int(rows.slots[number])
            if start == 0:
                self.states[slot] = 0
                self.before[slot] = 0
            at = begin
            for tokens, target in rows.marks[number] if rows.marks else ():
                stop = begin + tokens - start
                outputs.append(self._piece(slot, xbc[at:stop], dt[at:stop]))
                self.copy(slot, target)
                at = stop
            if at < end:
                outputs.append(self._piece(slot, xbc[at:end], dt[at:end]))
        return torch.cat(outputs)

    def _piece(self, slot: int, xbc: Tensor, dt: Tensor) -> Tensor:
        """Tokens of one sequence, whose state goes on."""
        # Earlier tokens stand where a convolution from the beginning would have zeros, so none are padded: as many come
        # out as new tokens went in.
        window = torch.cat([self.before[slot], xbc.T], dim=-1)
        self.before[slot] = window[:, window.shape[1] - self.taps + 1 :]
        mixed = functional.conv1d(window.unsqueeze(0), self.weight[:, None], self.bias, groups=len(self.weight))
        x, b, c = self._split(functional.silu(mixed[0].T))
        y, self.states[slot] = resumed(x * dt[..., None], self.decay * dt, b, c, self.chunk, self.states[slot])
        return y + x * self.skip[:, None]


def resumed(x: Tensor, decay: Tensor, b: Tensor, c: Tensor, chunk: int, state: Tensor) -> tuple[Tensor, Tensor]:
    """(y, state after it) with y[t] = S[t] · C[t] and S[t] = exp(decay[t]) · S[t-1] + x[t] B[t]ᵀ, from `state` on.

    x: (tokens, heads, head). decay: (tokens, heads), below 0. b, c: (tokens, heads, state). state: (heads, head,
    state). A chunk at a time: its tokens see each other through one masked product, and those before through the state.
    """
    outputs = []
    for first in range(0, len(x), chunk):
        xs, bs, cs = (t[first : first + chunk] for t in (x, b, c))
        # exp(since[i] - since[j]) is the decay of token j's part up to token i.
        since = decay[first : first + chunk].cumsum(0).T  # (heads, chunk)
        steps = since[:, :, None] - since[:, None, :]
        before = torch.ones(len(xs), len(xs), dtype=torch.bool).tril()
        # Masked before exp: above the diagonal the differences are positive, and exp of one may be infinite.
        within = steps.masked_fill(~before, -torch.inf).exp()
        scores = torch.einsum("ihn,jhn->hij", cs, bs) * within
        y = torch.einsum("hij,jhp->ihp", scores, xs)
        # What came before the chunk has decayed since the chunk began.
        y = y + torch.einsum("ihn,hpn,hi->ihp", cs, state, since.exp())
        # What each token leaves has decayed from it to the chunk's end.
        added_state = torch.einsum("jhn,hj,jhp->hpn", bs, (since[:, -1:] - since).exp(), xs)
        state = state * since[:, -1].exp()[:, None, None] + added_state
        outputs.append(y)
    return torch.cat(outputs), state
