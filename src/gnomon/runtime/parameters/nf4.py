"""Weights in four bits: NF4 in blocks of 64, whose scales are in eight bits (QLoRA), as bitsandbytes stores them.

`quantised(weight)` makes `Nf4Blocks` of a tensor, `Nf4Blocks.part(…)` takes what one rank holds of it, and a `Form`
lays that out as bytes and makes it wide again. A number is code[four bits] · scale of its block; the scale is in fp32,
or dynamic[eight bits] · scale of 256 blocks + the mean of all scales. Of two numbers the first is in a byte's upper
half. Each is rounded to its nearest code, as bitsandbytes does on GPUs (its build for CPUs rounds scales by a table of
65,536 entries). Leaves out fp4, other sizes of blocks, and where weights come from (`weights`). Source: Dettmers et al.
2023 (NF4, double quantization), Dettmers et al. 2022 (dynamic data type); bitsandbytes 0.50.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from gnomon.errors import PlanError
from gnomon.storage.tables import NF4_BLOCK, NF4_CODES, NF4_GROUP


@lru_cache(maxsize=4)
def code(device: torch.device) -> Tensor:
    """The numbers (16) that four bits stand for, as shares of the largest of a block."""
    return torch.tensor(NF4_CODES, dtype=torch.float32, device=device)


@lru_cache(maxsize=4)
def _pairs(device: torch.device) -> Tensor:
    """The two numbers (256, 2) that each byte stands for, the upper half first."""
    # One lookup a byte in place of two shifts and two lookups a number: weights are widened in every forward.
    byte = torch.arange(256, device=device)
    return torch.stack((code(device)[byte >> 4], code(device)[byte & 15]), dim=1)


@lru_cache(maxsize=4)
def dynamic(device: torch.device) -> Tensor:
    """Returns (256): what eight bits of a scale stand for: seven decades with twice as many steps in each next one,
    both signs, and 0 and 1. Ascending."""
    numbers = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        # The middles of 2**decade equal parts of 0.1 … 1, times the decade's power of ten.
        steps = 10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)
        numbers += [*steps.tolist(), *(-steps).tolist()]
    return torch.tensor(sorted(numbers), dtype=torch.float32, device=device)


def _nearest(x: Tensor, codes: Tensor) -> Tensor:
    """Numbers of the codes, which ascend, that are nearest."""
    # Codes ascend, so the nearest one is found by the number of midpoints below x.
    return torch.bucketize(x, (codes[:-1] + codes[1:]) / 2, out_int32=True).to(torch.uint8)


def _largest(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(x in rows of `size`, the last filled up with zeros; the largest magnitude of each)."""
    rows = torch.nn.functional.pad(x, (0, -x.numel() % size)).view(-1, size)
    return rows, rows.abs().amax(dim=1)


def _scaled(rows: Tensor, largest: Tensor) -> Tensor:
    # A block of zeros stays zeros. The reciprocal may round up, so that the largest would lie beyond 1.
    return (rows * (1 / largest.clamp(min=1e-38))[:, None]).clamp(-1, 1).flatten()


@dataclass(frozen=True, slots=True, kw_only=True)
class Nf4Blocks:
    """A whole tensor in four bits."""

    codes: Tensor
    """uint8 (elements / 2, rounded up)."""
    scales: Tensor
    """(blocks): fp32, or uint8 where these are quantised too."""
    groups: Tensor | None = None
    """fp32 (blocks / 256, rounded up): scales of the scales; None where these are in fp32."""
    mean: float = 0.0
    """Of the scales."""
    dtype: torch.dtype = torch.float32
    """That the weight had: what is made of it is rounded to it."""

    def part(self, name: str, whole: Sequence[int], offset: Sequence[int], shape: Sequence[int]) -> tuple[Form, Tensor]:
        """(how a range of a tensor of shape `whole` is laid out, its bytes). PlanError where the range cuts a block."""
        form = Form(
            blocks=tuple(_cut(name, whole, offset, shape)),
            elements=prod(shape),
            doubled=self.groups is not None,
            num_groups=0 if self.groups is None else self.groups.numel(),
            dtype=self.dtype,
        )
        # A rank's part has whole blocks only (`_cut`), so the tensor's number of elements is a multiple of a block
        # here.
        codes = self.codes if form.is_whole else form.pick_blocks(self.codes.view(-1, NF4_BLOCK // 2)).flatten()
        scales = form.pick_blocks(self.scales)
        if self.groups is None:
            parts = [scales.float().view(torch.uint8), codes]
        else:
            # The layout of `Form.ends`: [mean, scales of groups] in fp32, then scales, then codes.
            first = torch.cat((torch.tensor([self.mean], dtype=torch.float32), self.groups.cpu().float())).view(
                torch.uint8
            )
            parts = [first, scales.cpu(), codes.cpu()]
        packed = torch.cat([part.contiguous().flatten() for part in parts])
        return form, torch.nn.functional.pad(packed, (0, form.nbytes - packed.numel()))


def _cut(name: str, whole: Sequence[int], offset: Sequence[int], shape: Sequence[int]) -> list[tuple[int, int, int]]:
    """Blocks of a range of a tensor: (how many, the first, how many of them) for each dim that it has as blocks; empty
    where it is the whole tensor."""
    cut = [dim for dim, size in enumerate(whole) if shape[dim] != size]
    if not cut:
        return []
    # Blocks run through the tensor row after row. Dims behind the last that is cut are whole, so each index of the dims
    # before it has one run of consecutive elements: offset * inner … (offset + shape) * inner.
    last, inner = cut[-1], prod(whole[cut[-1] + 1 :])
    run = (whole[last] * inner, offset[last] * inner, shape[last] * inner)
    if any(size % NF4_BLOCK for size in run):
        raise PlanError(
            f"{name} is in four bits in blocks of {NF4_BLOCK}, and a rank would have {run[2]:,} of every {run[0]:,} "
            f"elements, from {run[1]:,} on, which cuts blocks; use a smaller tp"
        )
    lead = list(zip(whole[:last], offset[:last], shape[:last], strict=True))
    return [*lead, (run[0] // NF4_BLOCK, run[1] // NF4_BLOCK, run[2] // NF4_BLOCK)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a rank's part of a tensor in four bits lies in its bytes: scales of groups and their mean, scales, codes."""

    blocks: tuple[tuple[int, int, int], ...]
    """Which blocks of the tensor it has: dim by dim (how many there are, the first, how many of them); (): all."""
    elements: int
    """Numbers in it."""
    doubled: bool
    """Whether scales are in eight bits."""
    num_groups: int
    """Groups of scales of the whole tensor, all of which it has."""
    dtype: torch.dtype
    """That the weight had."""

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return not self.blocks

    @property
    def num_blocks(self) -> int:
        """Counts the blocks in it."""
        return -(-self.elements // NF4_BLOCK)

    @property
    def ends(self) -> tuple[int, int, int]:
        """One past the last byte of groups with their mean, of scales, of codes."""
        groups = 4 * (1 + self.num_groups) if self.doubled else 0
        scales = groups + self.num_blocks * (1 if self.doubled else 4)
        return groups, scales, scales + -(-self.elements // 2)

    @property
    def nbytes(self) -> int:
        """All of it, filled up to a multiple of four."""
        return -(-self.ends[-1] // 4) * 4

    def pick_blocks(self, of_blocks: Tensor) -> Tensor:
        """Picks this part's blocks from values that the whole tensor has for each block (blocks, …)."""
        if self.is_whole:
            return of_blocks
        rest = of_blocks.shape[1:]
        found = of_blocks.view(*(count for count, _, _ in self.blocks), *rest)
        for dim, (_, first, length) in enumerate(self.blocks):
            found = found.narrow(dim, first, length)
        return found.reshape(self.num_blocks, *rest)

    def scales(self, packed: Tensor) -> Tensor:
        """The scales (blocks) in fp32 that are stored in the bytes `packed`."""
        groups, end, _ = self.ends
        if not self.doubled:
            return packed[:end].view(torch.float32)
        mean = packed[:4].view(torch.float32)
        blocks = prod(count for count, _, _ in self.blocks) if self.blocks else self.num_blocks
        # A block's group follows from its number in the whole tensor, whichever of the blocks this rank has.
        group = self.pick_blocks(torch.arange(blocks, dtype=torch.int32, device=packed.device) // NF4_GROUP)
        eight = dynamic(packed.device).index_select(0, packed[groups:end].int())
        return eight * packed[4:groups].view(torch.float32).index_select(0, group) + mean

    def wide(self, packed: Tensor) -> Tensor:
        """The numbers (elements) that the bytes `packed` stand for, in the dtype that the weight had."""
        _, begin, end = self.ends
        pairs = _pairs(packed.device).index_select(0, packed[begin:end].int()).flatten()[: self.elements]
        scales = self.scales(packed)
        # The last block is not full: scales are spread over elements. Otherwise blocks are rows, which copies less.
        if self.elements % NF4_BLOCK:
            return (pairs * scales.repeat_interleave(NF4_BLOCK)[: self.elements]).to(self.dtype)
        return pairs.view(-1, NF4_BLOCK).mul_(scales[:, None]).flatten().to(self.dtype)


def quantised(weight: Tensor) -> Nf4Blocks:
    """A weight in four bits, with scales in eight bits."""
    rows, largest = _largest(weight.flatten().float(), NF4_BLOCK)
    numbers = _nearest(_scaled(rows, largest)[: weight.numel()], code(weight.device))
    # The upper half of the last byte is unused where the number of elements is odd.
    numbers = torch.nn.functional.pad(numbers, (0, weight.numel() % 2))
    # Scales are all positive; without their mean both signs of the eight-bit code are used (QLoRA, section 3).
    mean = largest.mean()
    grouped, of_group = _largest(largest - mean, NF4_GROUP)
    scales = _nearest(_scaled(grouped, of_group)[: largest.numel()], dynamic(weight.device))
    return Nf4Blocks(
        codes=numbers[::2] << 4 | numbers[1::2],
        scales=scales,
        groups=of_group,
        mean=float(mean),
        dtype=weight.dtype if weight.dtype in (torch.bfloat16, torch.float16) else torch.float32,
    )
