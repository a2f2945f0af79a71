"""The engine against transformers' `generate`: the same greedy tokens, whoever else runs and however prompts are cut.

`compare(kind, folder)` saves a tiny random model of transformers, serves it in float32 with a small token budget, so
that prompts come in pieces, beside other requests, and returns how many of the tokens are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from runtime.hf_models import CONFIGS, build, quiet

from gnomon.errors import GnomonError
from gnomon.serve.engine import Engine
from gnomon.serve.load import open_model
from gnomon.serve.sampling import Sampling
from gnomon.software.engine import engine

PROMPT, BESIDE = 21, 9
SHORT = {"max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64, "max_seq_len": 64}
"""Lengths of the tiny configs, which are for training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One model type."""

    kind: str
    same: int = 0
    """Tokens before the first that differs."""
    count: int = 0
    refusal: str = ""


def config_of(kind: str, length: int) -> dict[str, Any]:
    """The tiny config of a model type, for sequences of that length."""
    given: Mapping[str, Any] = CONFIGS[kind]
    return {**given, **{key: length for key, value in SHORT.items() if given.get(key) == value}}


def served(kind: str, folder: Path, *, length: int = 512, **limits: Any) -> tuple[Any, Engine]:
    """(model of transformers, engine of the folder that it was saved to)."""
    with quiet():
        model = build(kind, config_of(kind, length)).float().eval()
        model.save_pretrained(folder)
    rules = replace(engine("gnomon"), **{"max_batched_tokens": 16, "max_seqs": 4, **limits})
    return model, open_model(folder, rules, dtype="fp32", kv_bytes=1 << 26)


def answers(engine: Engine) -> dict[int, list[int]]:
    """Tokens of all requests, by key, once all have ended."""
    made: dict[int, list[int]] = {}
    while engine.has_work:
        for one in engine.step():
            made.setdefault(one.key, []).append(one.chosen.token)
        assert engine.memory.problems() == []
    assert engine.memory.free == engine.memory.pools[0].total
    return made


def greedy(count: int, **more: Any) -> Sampling:
    """The likeliest token, so many times."""
    return Sampling(max_tokens=count, temperature=0, **more)


def theirs(model: Any, prompt: list[int], count: int) -> list[int]:
    """Of `generate`."""
    with torch.no_grad(), quiet():
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return list(ids[0, len(prompt) :].tolist())


def compare(kind: str, folder: Path, *, count: int = 40) -> Compared:
    """How many greedy tokens are the same."""
    ids = torch.randint(3, 96, (2, PROMPT), generator=torch.Generator().manual_seed(3)).tolist()
    try:
        model, ours = served(kind, folder)
        key, *_ = ours.add(ids[0], greedy(count))
    except GnomonError as error:
        return Compared(kind=kind, refusal=str(error))
    ours.add(ids[1][:BESIDE], greedy(count))
    made, wanted = answers(ours)[key], theirs(model, ids[0], count)
    same = next((at for at, (a, b) in enumerate(zip(made, wanted, strict=True)) if a != b), count)
    return Compared(kind=kind, same=same, count=count)
