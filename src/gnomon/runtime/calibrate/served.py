"""What calibration runs of the engine that serves: products with packed weights, attention over pages.

Weights and keys are read from memory in every iteration, so a case has as many matrices, and pages, as no cache holds,
and takes them in turn. Sizes are few: seconds go with the elements of a matrix, and with heads and their width. Leaves
out passes over activations, which lie in caches, and everything of Python between two iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import cycle

import torch

from gnomon.compiler.kernels import stored
from gnomon.compiler.kernels.stored import PackedStored
from gnomon.hardware import Axis
from gnomon.hardware.served import (
    BEFORE,
    BLOCK,
    FORMS,
    GROUPS,
    HEAD,
    KEYS,
    KV_HEADS,
    NEW,
    PROMPT_HEADS,
    ROWS,
    SEQUENCES,
    SIDE,
)
from gnomon.runtime.calibrate.cases import Case, Point, Timed
from gnomon.runtime.ops.paged import PagedPool, Spans, Visibility, attend
from gnomon.storage.names import storage_of

UNCACHED_BYTES = 1 << 27
"""Of the matrices of a form, or the pages of a case, together: more than the caches that cores share."""


def served_cases(*, fine: bool) -> list[Case]:
    """Those that this machine has kernels for. fine: full grids, else a few points."""
    forms = [form for form in (FORMS if fine else FORMS[:1]) if stored.kernel(_form(form)) is not None]

    def axes(**sizes: tuple[int, ...]) -> tuple[Axis, ...]:
        return tuple(Axis(name=name, sizes=points if fine else points[:2]) for name, points in sizes.items())

    listed = [
        Case(what="stored_linear", dtype=form, direction="", axes=axes(rows=ROWS), build=partial(_linear, form, fine))
        for form in forms
    ]
    if forms:
        listed += [
            Case(what="paged_decode", dtype="bf16", direction="", axes=axes(keys=KEYS, group=GROUPS), build=_decode),
            Case(what="paged_prompt", dtype="bf16", direction="", axes=axes(new=NEW, before=BEFORE), build=_prompt),
        ]
    return listed


def _form(name: str) -> stored.StoredForm:
    return stored.form_of(storage_of(name), {"fp32": "fp32", "bf16": "bf16"}.get(name, "int8"))  # type: ignore[arg-type]


@cache
def _matrices(form: str, fine: bool) -> Iterator[PackedStored]:
    weight = torch.linspace(-1.0, 1.0, SIDE * SIDE).view(SIDE, SIDE)
    first = stored.pack(weight, storage_of(form), {"fp32": "fp32", "bf16": "bf16"}.get(form, "int8"))  # type: ignore[arg-type]
    assert isinstance(first, PackedStored)

    def another() -> PackedStored:
        scales = None if first.scales is None else first.scales.clone()
        return PackedStored(
            shape=first.shape, storage=first.storage, form=first.form, codes=first.codes.clone(), scales=scales,
            zeros=first.zeros,
        )  # fmt: skip

    return cycle([another() for _ in range(1 + UNCACHED_BYTES // first.bytes if fine else 1)])


def _linear(form: str, fine: bool, point: Point, dtype: torch.dtype, direction: str) -> Timed:
    matrices = _matrices(form, fine)
    x = torch.linspace(-1.0, 1.0, point["rows"] * SIDE).view(point["rows"], SIDE)
    x = x if form == "fp32" else x.bfloat16()
    return lambda: next(matrices), lambda matrix: stored.linear(x, matrix)


def _pages(keys: int, sequences: int, new: int, heads: int, kv_heads: int) -> Callable[[], Callable[[], object]]:
    """Attention of the last `new` queries of sequences, in pages that are taken in turn."""
    blocks = -(-keys // BLOCK)
    # Keys and values, two bytes each.
    size = sequences * blocks * BLOCK * kv_heads * HEAD * 2 * 2
    # scores that differ: of equal ones the first is the largest, and no later span has anything to do over again
    draw = torch.Generator().manual_seed(0)
    pages = torch.empty(2, sequences * blocks, kv_heads, HEAD * BLOCK, dtype=torch.bfloat16).uniform_(
        -1, 1, generator=draw
    )

    def another() -> PagedPool:
        own = pages.clone()
        return PagedPool(
            keys=own[0].unflatten(-1, (HEAD, BLOCK)), values=own[1].unflatten(-1, (BLOCK, HEAD)), v_dim=HEAD
        )

    pools = cycle(another() for _ in range(1 + min(64, UNCACHED_BYTES // size)))
    spans = Spans(
        begins=torch.arange(sequences + 1) * new, lengths=torch.full((sequences,), keys),
        table=torch.arange(sequences * blocks, dtype=torch.int32).view(sequences, blocks),
        threads=torch.get_num_threads(),
    )  # fmt: skip
    q = torch.empty(sequences * new, heads, HEAD, dtype=torch.bfloat16).uniform_(-1, 1, generator=draw)
    k = torch.full((sequences * new, kv_heads, HEAD), 0.25, dtype=torch.bfloat16)
    seen = Visibility(scale=HEAD**-0.5)

    def prepare() -> Callable[[], object]:
        pool = next(pools)
        call = pool.call(seen) if pool.fits else None
        return lambda: attend(pool, seen, spans, q, (k, k), call)

    return prepare


def _decode(point: Point, dtype: torch.dtype, direction: str) -> Timed:
    prepare = _pages(point["keys"], SEQUENCES, 1, KV_HEADS * point["group"], KV_HEADS)
    return prepare, lambda run: run()


def _prompt(point: Point, dtype: torch.dtype, direction: str) -> Timed:
    prepare = _pages(point["before"] + point["new"], 1, point["new"], PROMPT_HEADS, KV_HEADS)
    return prepare, lambda run: run()
