"""An encoder's server predicted: seconds of a text by op prices, a load played by a policy, and the best of policies.

`EncoderPrice(graph, cluster, engine, weights)` prices one text of so many tokens on one device; `forecast(…)` plays a
load (`serving.dispatch`) and sums up; `best_policy(…)` plays every policy that there may be and takes the one with the
least latency at a percentile. Each worker is one device. Leaves out decoders (`forecast`) and groups of devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from gnomon.errors import InputError
from gnomon.graph import Graph
from gnomon.hardware.types import Cluster
from gnomon.prices.curves import serving_curves
from gnomon.prices.decoding import ggml_row
from gnomon.serving.buckets import best_lengths
from gnomon.serving.dispatch import Policy, Seconds, Texts, play
from gnomon.serving.iteration import IterationPrice
from gnomon.serving.layout import Serving
from gnomon.serving.requests import Load
from gnomon.serving.weights import encoder_blocks
from gnomon.software.engine import Engine

PERCENTILE = 98
"""Of latencies, that policies are compared by, as the paper does."""
MOST_RUNTIMES = 8
PATIENCE = (0.0, 1.0, 4.0)
"""Values of `Policy.patience` that are tried."""
STEP = 8
"""Tokens of which lengths of runtimes are whole numbers."""


def reads_whole_texts(graph: Graph) -> bool:
    """Whether a model is an encoder of texts: tokens see those after them, and it reads nothing but a text."""
    names = {tensor.name for tensor in graph.inputs} - {"labels"}
    attends = [op for block in graph.blocks for op in block.ops if op.does == "attends"]
    seen = bool(attends) and not any(op.attr("causal", False) for op in attends)
    return seen and names <= {"input_ids", "token_type_ids"} and "input_ids" in names


class EncoderPrice(IterationPrice):
    """Prices a text alone on one device, by an iteration's layers; what has to do with keys is left out."""

    def __init__(self, graph: Graph, cluster: Cluster, engine: Engine, weights: str) -> None:
        """weights: a format of `serving.layout.FORMATS`."""
        if not reads_whole_texts(graph):
            raise InputError(f"{graph.name} is no encoder of texts, which read them whole; price it as a decoder")
        self.engine, self.device = engine, cluster.devices[0]
        self.serving = Serving(tp=1, pp=1, dp=1, ep=1, replicas=1, weights=weights, kv="bf16", max_model_len=1)
        self.ggml = None
        if engine.kernels.startswith("ggml"):
            self.ggml = ggml_row(self.device, vulkan=engine.kernels == "ggml-vulkan")
        self.stored = None  # encoders multiply by oneDNN's matrices, not by the engine's own kernels
        self.curves = serving_curves(self.device)
        self.assumed = self.curves.assumptions
        self.tp_link = self.ep_link = self.pp_link = None
        self.call_s = 0.0
        self.layers = encoder_blocks(graph, self.serving)
        launches = sum(b.count * (len(b.matmuls) + b.pass_kernels + (b.attention is not None)) for b in self.layers)
        self.launch_floor_s = launches * engine.launch_s
        self._matmul_prices = {}
        self._of_text: dict[int, float] = {}

    def seconds(self, tokens: int) -> float:
        """Returns the seconds of a text of so many tokens, from the process that has it to its answer."""
        if tokens not in self._of_text:
            self._of_text[tokens] = self._text_s(tokens)
        return self._of_text[tokens]

    def _text_s(self, tokens: int) -> float:
        total = float(self._rows_s(self.layers, np.array([float(tokens)]))[0]) + self._seen_s(self.layers, tokens)
        return max(total, self.launch_floor_s) + self.engine.request_s + tokens * self.engine.request_token_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncoderForecast:
    """A load that was played by a policy."""

    policy: Policy
    """How texts are batched."""
    texts: Texts
    """The texts that were played, and when."""

    @property
    def utilisation(self) -> float:
        """Share of the workers' time, from the first arrival to the last answer, that they computed in."""
        return self.texts.busy_s / self.policy.workers / self.span_s

    @property
    def span_s(self) -> float:
        """Returns the seconds from the first arrival to the last answer."""
        return float(self.texts.end_s.max() - self.texts.arrival_s.min())

    def to_mapping(self) -> dict[str, object]:
        """Writes seconds, texts and tokens for programs to read."""
        texts, policy = self.texts, self.policy
        return {
            "schema": "gnomon.encoder-forecast/1",
            "workers": policy.workers,
            "buckets": list(policy.lengths),
            "every_bucket": policy.every,
            "patience": policy.patience,
            "held": list(texts.runtimes),
            "latency": {f"p{p}_s": texts.percentile(p) for p in (50, 90, 98, 99)}
            | {"mean_s": float(texts.latency_s.mean())},
            "texts_per_s": len(texts.length) / self.span_s,
            "tokens_per_s": float(texts.length.sum()) / self.span_s,
            "utilisation": self.utilisation,
            "padding": texts.padding,
            "demoted": texts.demoted,
        }


def forecast(load: Load, policy: Policy, seconds: Seconds) -> EncoderForecast:
    """InputError for a text that is longer than the longest runtime."""
    longest = max(one.input_len for one in load.requests)
    if longest > policy.longest:
        raise InputError(
            f"a text of {longest} tokens is longer than the {policy.longest} that the encoder takes; cut it"
        )
    return EncoderForecast(policy=policy, texts=play(load, policy, seconds, known=True))


def policies(load: Load, workers: int, longest: int, seconds: Seconds) -> Iterator[Policy]:
    """All that are tried: own lengths, one padded runtime, and the best cuts into 2 to 8 runtimes, one a worker or all
    of them, with each patience."""
    yield Policy(workers=workers, longest=longest)
    yield Policy(workers=workers, longest=longest, lengths=(longest,))
    counts: Mapping[int, int] = Counter(one.input_len for one in load.requests)
    cuts: set[tuple[int, ...]] = {(longest,)}
    for most in range(2, MOST_RUNTIMES + 1):
        lengths = tuple(one for one in best_lengths(counts, seconds, most, STEP) if one < longest)
        # The longest runtime must take every text, so it is always the last one.
        lengths = (*lengths[-(most - 1) :], longest)
        if lengths in cuts:
            continue
        cuts.add(lengths)
        yield Policy(workers=workers, longest=longest, lengths=lengths, every=True)
        if workers > 1:
            for patience in PATIENCE:
                yield Policy(workers=workers, longest=longest, lengths=lengths, patience=patience)


def best_policy(
    load: Load, workers: int, longest: int, seconds: Seconds, *, percentile: float = PERCENTILE
) -> tuple[EncoderForecast, ...]:
    """All policies, played, the least latency at the percentile first; of equal ones the first that was tried."""
    played = [forecast(load, policy, seconds) for policy in policies(load, workers, longest, seconds)]
    return tuple(sorted(played, key=lambda one: one.texts.percentile(percentile)))
