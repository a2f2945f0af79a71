"""Small models that have no package: nanoGPT's, recommendation, recurrent ones, a selective scan, branches on shapes.

Each takes `ids` (batch, seq), but `Dlrm`, which takes dense features and indices of tables, and `Graphs`, which wraps a
graph network so that it takes a batch of graphs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _Block(nn.Module):
    """Attention and a feed-forward of a GPT-2, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        parts = self.qkv(self.before_attention(x)).split(width, 2)
        q, k, v = (part.view(batch, seq, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return x + self.feed(self.before_feed(x))


class NanoGPT(nn.Module):
    """As nanoGPT: a GPT-2 with learned positions whose head is its table of tokens; with labels, their loss."""

    def __init__(self, vocab: int = 128, most: int = 32, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(most, width)
        self.layers = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """ids, labels: (batch, seq)."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return logits, None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Graphs(nn.Module):
    """A graph network over a batch of graphs, as torch-geometric's batches are: their nodes one after another, and
    edges between the nodes of each."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """nodes: (batch, nodes, features). edges: (batch, 2, edges). Returns (batch, nodes, features)."""
        batch, count, _ = nodes.shape
        begins = torch.arange(batch) * count
        joined = (edges + begins[:, None, None]).transpose(0, 1).flatten(1)
        return self.network(nodes.flatten(0, 1), joined).unflatten(0, (batch, count))


class Dlrm(nn.Module):
    """Bags of embeddings and dense features, and the products of each pair of them."""

    def __init__(self, tables: int = 4, rows: int = 50, width: int = 16) -> None:
        super().__init__()
        self.bags = nn.ModuleList([nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables)])
        self.bottom = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """dense: (batch, 8). sparse: (batch, tables, indices of a bag)."""
        bottom = self.bottom(dense)
        features = torch.stack([bottom, *(bag(sparse[:, place]) for place, bag in enumerate(self.bags))], 1)
        products = features @ features.transpose(1, 2)
        first, second = torch.triu_indices(features.shape[1], features.shape[1], 1)
        return self.top(torch.cat([bottom, products[:, first, second]], 1))


class _Recurrent(nn.Module):
    kind: type[nn.RNNBase] = nn.LSTM

    def __init__(self, vocab: int = 100, width: int = 32) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, width)
        self.cells = self.kind(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: (batch, seq)."""
        return self.head(self.cells(self.table(ids))[0])


class Lstm(_Recurrent):
    """A language model of two LSTM layers."""


class Gru(_Recurrent):
    """The same of two GRU layers."""

    kind = nn.GRU


class Selective(nn.Module):
    """A state-space model whose step, input and output matrices follow from the input, scanned position by position."""

    def __init__(self, vocab: int = 100, width: int = 32, states: int = 4) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab)
        self.conv = nn.Conv1d(width, width, 4, padding=3, groups=width)
        self.chosen, self.step = nn.Linear(width, 2 * states), nn.Linear(width, width)
        self.decay = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(width, 1))

    def forward(self, ids: Tensor) -> Tensor:
        """ids: (batch, seq)."""
        x = self.table(ids)
        x = F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        into, out = self.chosen(x).chunk(2, -1)
        step = F.softplus(self.step(x))
        kept = torch.exp(-step[..., None] * self.decay.exp())
        added = (step * x)[..., None] * into[:, :, None]
        state, made = torch.zeros_like(added[:, 0]), []
        for place in range(x.shape[1]):
            state = kept[:, place] * state + added[:, place]
            made.append((state * out[:, place, None]).sum(-1))
        return self.head(torch.stack(made, 1))


class Branches(nn.Module):
    """Goes by the shapes of what it is given: how often it halves the sequence, and whether it pads it."""

    def __init__(self, vocab: int = 100, width: int = 32) -> None:
        super().__init__()
        self.table, self.fold, self.head = nn.Embedding(vocab, width), nn.Linear(2 * width, width), nn.Linear(width, 4)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: (batch, seq)."""
        x = self.table(ids)
        while x.shape[1] > 1:
            if x.shape[1] % 2:
                x = F.pad(x, (0, 0, 0, 1))
            x = torch.relu(self.fold(x.reshape(x.shape[0], x.shape[1] // 2, -1)))
        return self.head(x[:, 0])
