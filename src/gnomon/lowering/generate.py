"""Generating text with a KV cache: prompts are read as requests join, then all requests that run take steps together.

`generate(requests)` returns one finite Program on one stage: for each request a PREFILL, for each step one DECODE whose
unit holds one token of every request that runs. A request's cache (KV, one buffer a sequence) grows with every token
and is freed by its last step. Left out: when requests arrive (they join at a step), pipelines, prompts in chunks, and
pages of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gnomon.errors import PlanError
from gnomon.plans import Unit
from gnomon.program import (
    BufferClass,
    BufferRef,
    Kind,
    Override,
    Program,
    ProgramBuilder,
    RowEffect,
    effects,
    with_buffers,
    with_kinds,
)

KINDS = (
    Kind(name="PREFILL", effects=effects("read P, extend KV")),
    Kind(name="DECODE", effects=effects("read P, read KV, extend KV")),
)
KV = BufferClass(name="KV", memory="activations", lifetime="sequence", per="sequence")
"""Keys and values of one request; its size is that of one token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A sequence to be continued."""

    prompt_tokens: int
    """Tokens that are there when it joins."""
    new_tokens: int
    """Steps that it takes part in."""
    joins: int = 0
    """First step that it takes part in; its prompt is read right before."""

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.new_tokens < 1 or self.joins < 0:
            raise PlanError(
                f"a request has at least 1 prompt token and 1 new one and joins at step 0 or later, not "
                f"{self.prompt_tokens}, {self.new_tokens} and {self.joins}"
            )

    def runs(self, step: int) -> bool:
        """Whether it takes part in a step."""
        return self.joins <= step < self.joins + self.new_tokens


def generate(requests: Sequence[GenerationRequest]) -> Program:
    """The Program of all steps; sequence i is request i. PlanError without requests."""
    if not requests:
        raise PlanError("there is nothing to generate: give at least one request")
    rows: list[tuple[str, Unit, tuple[int, ...]]] = []
    for step in range(max(request.joins + request.new_tokens for request in requests)):
        for i, request in enumerate(requests):
            if request.joins == step:
                rows.append(("PREFILL", Unit(pieces=((i, 0, request.prompt_tokens),)), ()))
        running = [(i, request) for i, request in enumerate(requests) if request.runs(step)]
        if running:
            # Where each one's next token goes: behind its prompt and the tokens of its steps so far.
            at = [(i, request.prompt_tokens + step - request.joins) for i, request in running]
            # This is their last step, which frees their caches.
            done = tuple(i for i, request in running if not request.runs(step + 1))
            rows.append(("DECODE", Unit(pieces=tuple((i, start, start + 1) for i, start in at)), done))
    units = tuple(unit for _, unit, _ in rows)
    builder = ProgramBuilder(num_stages=1, units=units, kinds=with_kinds(*KINDS))
    worker = builder.rank_class()
    for index, (kind, _, done) in enumerate(rows):
        freed = tuple(RowEffect("free", BufferRef("KV", 0, sequence)) for sequence in done)
        builder.add(worker, kind, 0, index, override=Override(effects=freed, adds=True) if freed else None)
    return builder.build(buffers=with_buffers(KV))
