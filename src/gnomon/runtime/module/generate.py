"""A few words from a model: greedy or sampled, on one process.

`generate(model, ids, count=…)` extends one sequence. Every token runs the whole sequence again, since the Graph has no
cache of keys and values: right for looking at what a run has learnt, and slow for anything longer than some hundred
tokens. Leaves out tokenizers, and models that are no decoders.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gnomon.errors import PlanError
from gnomon.runtime.module.one_process import OneProcess


def generate(
    model: OneProcess,
    ids: Sequence[int],
    *,
    count: int,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
    stop: Sequence[int] = (),
) -> list[int]:
    """The new ids, at most `count`, ending before the first of `stop`.

    model: of `pretrained.load(path, logits=True)`. temperature: 0 takes the likeliest token; otherwise logits are
    divided by it and one is drawn, among the `top_k` likeliest if that is not 0.
    """
    if [tensor.name for tensor in model.graph.inputs] != ["input_ids"]:
        names = ", ".join(tensor.name for tensor in model.graph.inputs)
        raise PlanError(f"{model.graph.name} reads {names}; words are generated from decoders, which read input_ids")
    if not ids:
        raise PlanError("a prompt has at least one token")
    generator = torch.Generator().manual_seed(seed)
    device = model.parameters.device
    sequence = list(ids)
    with torch.no_grad():
        for _ in range(count):
            logits = model.output({"input_ids": torch.tensor([sequence], device=device)})[0, -1]
            token = _chosen(logits.float().cpu(), temperature, top_k, generator)
            if token in stop:
                break
            sequence.append(token)
    return sequence[len(ids) :]


def _chosen(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature <= 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        least = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))
