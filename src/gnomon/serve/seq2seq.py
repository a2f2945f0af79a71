"""Encoders with a decoder (T5) behind the engine: a prompt is read whole, the answer is written token by token.

`open_seq2seq(folder, rules, …)` is an engine whose sequences are the decoder's, from its start token on; what the
encoder made of the prompt is computed once, when the sequence is first run, and so are the keys and values that
cross-attention reads. Scheduling, sampling and streaming are the engine's. Keys lie one after the other for each
answer, not in pages; the blocks that the scheduler deals out count them, those of the prompt from
admission on. Leaves out prefixes that answers share,
adapters, rounded weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gnomon.errors import InputError
from gnomon.graph import Graph, Layer
from gnomon.graph.outputs import without_loss
from gnomon.runtime.checkpoint.pretrained import CONFIG, model_of, values_of
from gnomon.runtime.module.apply import DTYPES
from gnomon.runtime.module.crossings import reads, writes
from gnomon.runtime.parameters.weights import WeightReader
from gnomon.serve.bound import Bound, BoundParameters, BoundText
from gnomon.serve.engine import Engine, EngineToken, Watch, check_ids
from gnomon.serve.rows import Turn
from gnomon.serve.sampling import Sampling
from gnomon.serve.sizes import Sizes
from gnomon.serving.kv_blocks import KvBlocks
from gnomon.software.engine import Engine as Rules
from gnomon.units import show_bytes

DEFAULT_LEN = 512
"""Tokens of a prompt with its answer, where nobody says: T5 has no table of positions, and was trained on so many."""


def _sides(graph: Graph) -> tuple[list[Layer], list[Layer]]:
    """Divides the layers into (encoder's, decoder's): the decoder's are those that depend on what is written."""
    names = {"decoder_input_ids"}
    encoder, decoder = list[Layer](), list[Layer]()
    for layer in graph.layers():
        # Layers come in the order of the graph, so that what a layer of the decoder writes makes its readers the
        # decoder's.
        if names & set(reads(layer).values()):
            decoder.append(layer)
            names |= set(writes(graph, layer).values())
        else:
            encoder.append(layer)
    return encoder, decoder


class Seq2Seq:
    """The model as an engine sees one (`engine.Model`)."""

    ranks = 1

    def __init__(self, graph: Graph, weights: BoundParameters, dtype: torch.dtype, sizes: Sizes) -> None:
        """Takes the graph without its loss."""
        self.sizes, self.graph = sizes, graph
        encoder, decoder = _sides(graph)
        self.encoder, self.decoder = (Bound(graph, side, weights, dtype) for side in (encoder, decoder))
        own = {full for layer in encoder for full in writes(graph, layer).values()}
        # All cross-attentions read one tensor, the encoder's output: fails where there are several.
        [self.memory] = {source for layer in decoder for source in reads(layer).values() if source in own}
        self.sources: dict[int, Sequence[int]] = {}
        """Key of an answer -> its prompt."""
        self.texts: dict[int, BoundText] = {}
        self._logits: list[Tensor] = []

    @property
    def vocab_size(self) -> int:
        """Tokens that logits are about."""
        return int(self.graph.source(self.graph.outputs[0])[1].dims[-1].size or 0)

    def adapter(self, name: str) -> int:
        """InputError for one by name."""
        if name:
            raise InputError(f"there is no adapter {name!r}; an encoder with a decoder is served without")
        return -1

    def blocks(self, *, prefix_cache: bool) -> KvBlocks:
        """A pool in which no block is taken. Every answer begins with the same token, so prefixes are not shared."""
        return KvBlocks(
            self.sizes.blocks, self.sizes.block_tokens, windows=(), window_blocks=(), slots=0, prefix_cache=False
        )  # fmt: skip

    @torch.inference_mode()
    def start(self, turn: Turn) -> None:
        """Computes an iteration of all texts together."""
        texts, ids, logit_rows, at = [], list[int](), list[int](), 0
        self._read([part.key for part in turn.parts if part.key not in self.texts])
        for part in turn.parts:
            text = self.texts[part.key]
            text.start, text.rows, text.real, text.first = at, len(part.tokens), len(part.tokens), part.start
            texts.append(text)
            ids += part.tokens
            at += len(part.tokens)
            if part.samples:
                logit_rows.append(at - 1)
        inputs = {"decoder_input_ids": torch.tensor([ids]), self.memory: None}
        logits: Tensor = self.decoder.run(inputs, texts)[self.graph.outputs[0]]
        self._logits.append(logits[0, logit_rows].float())

    def logits(self) -> Tensor:
        """(wanted, vocabulary) of the iteration that began first."""
        return self._logits.pop(0)

    def forget(self, key: int) -> None:
        """An answer that is over."""
        self.sources.pop(key, None)
        self.texts.pop(key, None)

    def _read(self, keys: Sequence[int]) -> None:
        """The encoder reads the prompts of new answers, together."""
        texts, ids = list[BoundText](), list[int]()
        for key in keys:
            prompt = self.sources[key]
            texts.append(BoundText(start=len(ids), rows=len(prompt), real=len(prompt)))
            ids += prompt
        if ids:
            states: Tensor = self.encoder.run({"input_ids": torch.tensor([ids])}, texts)[self.memory]
            for key, text in zip(keys, texts, strict=True):
                self.texts[key] = BoundText(start=0, rows=0, real=0, memory=states[:, text.slice])


class Seq2SeqEngine(Engine):
    """An engine whose prompts the encoder reads."""

    model: Seq2Seq

    def __init__(self, model: Seq2Seq, rules: Rules, *, max_model_len: int, start_token: int) -> None:
        """Takes start_token, which the decoder sees before every answer, and max_model_len, tokens of a prompt with its
        answer."""
        super().__init__(model, replace(rules, prefix_cache=False), max_model_len=max_model_len)
        self.start_token = start_token

    def add(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        first: int = 0,
        count: int = 1,
        watch: Sequence[Watch] = (),
        mask: Sequence[Callable[[], Tensor | None]] = (),
        adapter: str = "",
        source: int = 0,
        salt: str = "",
    ) -> list[int]:
        """Adds a request as `Engine.add` does; the prompt is what the encoder reads, all of it."""
        assert not source, "the engine sets it: the length of the prompt"
        if sampling.prompt_logprobs >= 0:
            raise InputError(
                "an encoder reads the prompt, which so has no log-probabilities: leave out prompt_logprobs, and echo "
                "with logprobs"
            )
        if not prompt or len(prompt) + sampling.max_tokens > self.max_model_len:
            raise InputError(
                f"the request asks for {len(prompt)} + {sampling.max_tokens} tokens (prompt and max_tokens), and the "
                f"model is served with 1 to {self.max_model_len}; shorten the prompt or lower max_tokens"
            )
        check_ids(prompt, self.vocab_size)
        keys = super().add(
            [self.start_token], sampling, first=first, count=count, watch=watch, mask=mask, adapter=adapter,
            source=len(prompt),
        )  # fmt: skip
        self.model.sources.update(dict.fromkeys(keys, tuple(prompt)))
        return keys

    def cancel(self, key: int) -> None:
        """Nobody waits for it any more."""
        super().cancel(key)
        self.model.forget(key)

    def forget_blocks(self, key: int) -> None:
        """Drops what the encoder made of a preempted request's prompt: it is read again with the next admission."""
        self.model.texts.pop(key, None)

    def end(self) -> list[EngineToken]:
        """What the iteration made that `begin` began."""
        tokens = super().end()
        for one in tokens:
            if one.reason is not None:
                self.model.forget(one.key)
        return tokens


def open_seq2seq(
    folder: Path, rules: Rules, *, dtype: str, kv_bytes: int, max_model_len: int | None = None
) -> Seq2SeqEngine:
    """InputError for weights that are not all there, too little memory, or no token to begin with."""
    known = model_of(folder)
    graph = without_loss(known.graph)
    reader = values_of(folder, known.graph)
    assert isinstance(reader, WeightReader), "a folder's"
    longest = max_model_len or DEFAULT_LEN
    sizes = _sizes(graph, rules, DTYPES[dtype], kv_bytes, longest)
    model = Seq2Seq(graph, BoundParameters(reader, known.graph), DTYPES[dtype], sizes)
    return Seq2SeqEngine(model, rules, max_model_len=longest, start_token=start_token(folder))


def start_token(folder: Path) -> int:
    """Finds the token that a decoder begins with."""
    where = folder if folder.is_dir() else folder.parent
    for name in ("generation_config.json", CONFIG):
        if (where / name).is_file():
            values = json.loads((where / name).read_text(encoding="utf-8"))
            for key in ("decoder_start_token_id", "pad_token_id"):
                if isinstance(values.get(key), int):
                    return int(values[key])
    raise InputError(
        f"{folder}: neither decoder_start_token_id nor pad_token_id says what an answer begins with; add one"
    )


def _sizes(graph: Graph, rules: Rules, dtype: torch.dtype, kv_bytes: int, longest: int) -> Sizes:
    """Blocks for keys and values of answers and of the prompts that they read, of which a token takes as much."""
    token = 0
    for layer in graph.layers():
        block = graph.block(layer.call.block)
        for op in block.ops:
            if op.does == "attends" and op.attr("causal", False):
                atoms = (a for name in op.inputs[1:3] for a in [block.tensor(name).atoms])
                token += sum(math.prod(a.size or 1 for a in one) for one in atoms) * dtype.itemsize
    most = -(-longest // rules.block_tokens) + 1  # prompt and answer each begin a block
    # More blocks than all sequences at their longest have could never be taken.
    blocks = min(rules.max_seqs * most, kv_bytes // (token * rules.block_tokens))
    if blocks < most:
        raise InputError(
            f"{show_bytes(kv_bytes)} of keys and values hold {blocks * rules.block_tokens} tokens, and a request may "
            f"have {longest}; give more memory, or lower max_model_len"
        )
    return Sizes(
        blocks=blocks, block_tokens=rules.block_tokens, max_seqs=rules.max_seqs,
        max_batched_tokens=max(rules.max_batched_tokens, rules.max_seqs), max_len=longest, windows=(), scans=False,
    )  # fmt: skip
