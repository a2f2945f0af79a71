"""A decoder's head as a search in a graph over the vocabulary (FGD): `GraphHead(table, bias)`, in place of the product.

`without_head(graph)` is the model up to what its head multiplies; `GraphHead.logits(states, …)` are logits of the
tokens that the search found, and minus infinity of all others, which are taken for unlikely. Tokens are neighbours by a
map that makes the largest product the nearest point: centred rows, a coordinate for the bias, and one that gives all
the same length. The hundredth with the longest rows, which that coordinate would crowd out, is always multiplied.
`calibrate` sets how widely it searches, by what the exact product says of the model's own states: where that recalls
too little, or takes longer, the product is used. Leaves out rows whose sampling needs all logits: they are multiplied,
and it is said.
Source: Zhang, Liu, Wang, Gao, Sun and He 2018 (FGD); Malkov and Yashunin 2016 (HNSW, by faiss).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from gnomon.errors import InputError, PlanError
from gnomon.graph import Block, Graph
from gnomon.serve.choose import LogitsRow
from gnomon.tensors.dims import Dim

IDENTITY = "graph_head.identity"
"""Name of the matrix that stands in the head's place: a layer that ends a model multiplies by something."""
MOST_K = 64
"""Of top-k sampling that the graph is asked for."""
RECALLED, RECALL = 10, 0.99
"""Likeliest tokens of which so large a share must be found."""
LONGEST = 0.01
"""Share of the tokens, those with the longest rows, that are always multiplied."""
NEIGHBOURS, BUILD_EF = 32, 100
"""Of a token in the graph, and how widely neighbours are searched for when it is built (HNSW's M and
efConstruction)."""
WIDTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""That are tried (HNSW's efSearch)."""
TIMED_ROWS = (1, 8, 32)
"""Of the exact product, whose seconds a row fall with rows."""
INSTALL = "a head searched in a graph needs faiss: pip install gnomon[graph]"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadlessModel:
    """A model without its head."""

    graph: Graph
    """Whose logits are what the head reads."""
    weight: str
    """The head's matrix (vocabulary, width), which may be the table of embeddings."""
    bias: str
    """Its bias; empty for none."""
    width: int


def without_head(graph: Graph) -> HeadlessModel:
    """Cuts the head off a graph that returns logits. PlanError for a head that does more than multiply."""
    call = next(call for call in graph.calls if graph.outputs[0].startswith(f"{call.name}."))
    block = graph.block(call.block)
    op = block.ops[-1]
    if not op.is_dense_linear or op.attr("factor", 1.0) != 1.0 or call.repeat != 1:
        raise PlanError(
            f"--head graph: {graph.name} changes its logits after the head's product ({op.path}); leave --head out"
        )
    width = int(block.tensor(op.inputs[0]).dims[-1].size or 0)

    def narrowed(dims: Sequence[Dim]) -> tuple[Dim, ...]:
        return tuple(replace(dim, size=width) if dim.name == "vocab" else dim for dim in dims)

    changed = {name: replace(block.tensor(name), dims=narrowed(block.tensor(name).dims))
               for name in (op.inputs[1], *op.outputs)}  # fmt: skip
    inputs = op.inputs[:2]
    cut = Block(
        name=block.name,
        inputs=block.inputs,
        outputs=block.outputs,
        tensors=tuple(changed.get(t.name, t) for t in block.tensors if t.name not in op.inputs[2:]),
        ops=(*block.ops[:-1], replace(op, inputs=inputs)),
    )
    named = [pair for pair in call.params if pair[0] not in op.inputs[1:]]
    headless = replace(call, params=(*named, (op.inputs[1], IDENTITY)))
    return HeadlessModel(
        graph=replace(
            graph,
            blocks=tuple(cut if one is block else one for one in graph.blocks),
            calls=tuple(headless if one is call else one for one in graph.calls),
        ),
        weight=call.parameter_name(op.inputs[1], 0),
        bias=call.parameter_name(op.inputs[2], 0) if len(op.inputs) > 2 else "",
        width=width,
    )


def needs_all(row: LogitsRow) -> str:
    """Why a row's sampling needs the logits of all tokens; empty where a graph's do."""
    s = row.sampling
    if s.logprobs >= 0 or s.prompt_logprobs >= 0:
        return "log-probabilities"
    if s.changes:
        return "penalties, a bias or min_tokens"
    if row.mask is not None:
        return "a grammar"
    if s.temperature > 0 and not 0 < s.top_k <= MOST_K:
        return f"a temperature without top_k of at most {MOST_K}"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCalibration:
    """What the graph recalls and takes."""

    width: int
    """Of the search; 0: the product is used."""
    recall: float
    """Share of the product's likeliest ten that were found, at that width or at the widest."""
    graph_s: float
    """Of a row."""
    exact_s: tuple[float, ...]
    """Of the product of `TIMED_ROWS` rows."""

    def pays(self, rows: int) -> bool:
        """Whether so many rows are faster by the graph."""
        # Beyond TIMED_ROWS interp keeps the last value, so of many rows the product counts as quicker than it is.
        return bool(self.width) and rows * self.graph_s < float(np.interp(rows, TIMED_ROWS, self.exact_s))

    def summary(self, tokens: int) -> str:
        """Sums the calibration up in a line."""
        times = f"{self.graph_s * 1e3:.2f} ms a row, exact {self.exact_s[0] * 1e3:.2f}"
        seen = f"recall@{RECALLED} {self.recall:.3f}, {times}"
        if not self.pays(1):
            return f"head: exact; a graph of {tokens:,} tokens would not do ({seen} ms)"
        return f"head: a graph of {tokens:,} tokens, {self.width} wide ({seen} ms)"


class GraphHead:
    """The head of a model, with the graph over its vocabulary."""

    def __init__(self, table: Tensor, bias: Tensor | None) -> None:
        """Takes the table (vocabulary, width) and the bias (vocabulary)."""
        try:
            import faiss  # type: ignore[import-not-found, import-untyped, unused-ignore]
        except ImportError as error:
            raise InputError(INSTALL) from error
        faiss.omp_set_num_threads(torch.get_num_threads())
        self.table = table.float().contiguous()
        self.bias = None if bias is None else bias.float()
        self.vocab_size = len(table)
        rows = self.table.numpy()
        # what is the same for all tokens changes no order: a mean row adds the same to every product
        centred = rows - rows.mean(0)
        offset = np.zeros(len(rows), dtype=np.float32) if bias is None else self.bias.numpy() - self.bias.numpy().mean()  # type: ignore[union-attr]
        square = np.square(centred).sum(1) + np.square(offset)
        order = np.argsort(square)
        most = max(1, int(len(rows) * (1 - LONGEST)))
        self._inner, self._always = np.sort(order[:most]), np.sort(order[most:])
        # With this coordinate all points have one length M, and |p - q|^2 = M^2 + |q|^2 - 2 p q: the nearest point is
        # the one with the largest product.
        missing = np.sqrt(np.maximum(square[self._inner].max() - square[self._inner], 0.0))
        points = np.concatenate([centred[self._inner], offset[self._inner, None], missing[:, None]], axis=1)
        self._index = faiss.IndexHNSWFlat(points.shape[1], NEIGHBOURS)
        self._index.hnsw.efConstruction = BUILD_EF
        self._index.add(np.ascontiguousarray(points, dtype=np.float32))
        self.calibrated: HeadCalibration | None = None
        self.seen: list[Tensor] = []
        """States that were met before `calibrate`."""
        self.searched = self.multiplied = 0
        """Rows so far."""
        self._notes = set[str]()

    def exact(self, states: Tensor) -> Tensor:
        """Returns exact logits (rows, vocabulary). states: (rows, width), float32."""
        return functional.linear(states, self.table, self.bias)

    def likeliest(self, state: Tensor, count: int, width: int) -> tuple[NDArray[np.int64], Tensor]:
        """(tokens, their exact logits) of at least `count` that the search takes for the likeliest. state: (width)."""
        point = np.zeros((1, len(state) + 2), dtype=np.float32)
        # 1 for the coordinate of the bias, 0 for the one that makes lengths equal.
        point[0, : len(state)], point[0, len(state)] = state.numpy(), 1.0
        self._index.hnsw.efSearch = max(width, count)
        near = self._inner[self._index.search(point, count)[1][0]]
        tokens = np.concatenate([near, self._always])
        at = torch.from_numpy(tokens)
        logits = self.table.index_select(0, at) @ state
        return tokens, logits if self.bias is None else logits + self.bias[at]

    def calibrate(self, states: Tensor, clock: Callable[[], float] = time.process_time) -> HeadCalibration:
        """How widely to search, by what the product says of these states: (rows, width)."""
        exact = self.exact(states).topk(RECALLED).indices.numpy()
        exact_s = []
        for rows in TIMED_ROWS:
            few = states[:1].expand(rows, -1).contiguous()
            exact_s.append(min(_timed(lambda few=few: self.exact(few), clock) for _ in range(3)))  # type: ignore[misc]
        calibration = HeadCalibration(width=0, recall=0.0, graph_s=0.0, exact_s=tuple(exact_s))
        for width in WIDTHS:
            begin, hits = clock(), 0
            for state, exact_best in zip(states, exact, strict=True):
                tokens, logits = self.likeliest(state, 2 * RECALLED, width)
                best = tokens[logits.topk(RECALLED).indices.numpy()]
                hits += len(set(best.tolist()) & set(exact_best.tolist()))
            graph_s = (clock() - begin) / len(states)
            recall = hits / (RECALLED * len(states))
            calibration = HeadCalibration(width=0, recall=recall, graph_s=graph_s, exact_s=tuple(exact_s))
            if recall >= RECALL:
                calibration = replace(calibration, width=width)
                break
            if graph_s > exact_s[0]:
                break
        self.calibrated = calibration
        self.seen.clear()
        return calibration

    def logits(self, states: Tensor, rows: Sequence[LogitsRow | None]) -> Tensor:
        """Returns (rows, vocabulary): exact logits of every token that was found, minus infinity of the others. rows:
        whose they are; None: of one that nobody waits for."""
        states = states.float()
        known = self.calibrated
        if known is None:
            self.seen.append(states.clone())
        why = [needs_all(row) if row is not None else "" for row in rows]
        graph = [at for at, reason in enumerate(why) if not reason]
        if known is None or not known.pays(len(graph)):
            graph = []
        for reason in {reason for reason in why if reason} - self._notes:
            self._notes.add(reason)
            print(f"gnomon: head: exact for requests with {reason}", file=sys.stderr, flush=True)
        full_logits = torch.full((len(states), self.vocab_size), -torch.inf)
        for at in graph:
            row = rows[at]
            count = max(2 * RECALLED, 2 * (row.sampling.top_k if row is not None else 0))
            assert known is not None
            tokens, logits = self.likeliest(states[at], count, known.width)
            full_logits[at, torch.from_numpy(tokens)] = logits
        others = [at for at in range(len(states)) if at not in set(graph)]
        if others:
            full_logits[others] = self.exact(states[others])
        self.searched, self.multiplied = self.searched + len(graph), self.multiplied + len(others)
        return full_logits


def _timed(run: Callable[[], object], clock: Callable[[], float]) -> float:
    begin = clock()
    run()
    return clock() - begin
