"""Instruction sets for products with stored weights (`stored`), one row a set: what its kernels need and cost.

A set is a header (cpp/stored_*.h) that says in one vocabulary how registers are loaded and how they multiply; a weight
is laid in panels of as many outputs as a register has lanes. `lanes_for(bits)` is the widest that this machine has,
`lanes_of(outputs, bits)` that which is best for a shape. GNOMON_ISA_NAME asks for a narrower one, as everywhere in the
compiler. The generic set runs on any processor for which there is a compiler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gnomon.compiler.machine import has_features

AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "f16c"})
AVX2 = frozenset({"avx2", "fma", "f16c"})
"""Flags in /proc/cpuinfo that the kernels of a set need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """An instruction set, how weights are laid for it, and how many instructions its kernels take."""

    name: str
    """The name by which GNOMON_ISA_NAME asks for it."""
    header: str
    """The file in cpp/ that says how registers are loaded and multiplied."""
    side: int
    """Outputs of a panel of weights: the lanes of 32 bits of a register."""
    needs: frozenset[str]
    """Flags in /proc/cpuinfo that the processor must have."""
    dots: frozenset[str]
    """Flags that it must have besides where activations have eight bits."""
    flags: str
    """Options of the compiler for activations of eight bits, beside those of the machine's own set."""
    vnni: bool
    """Whether one instruction multiplies four pairs of eight-bit codes and adds them up."""
    pair_bytes: int
    """Bytes in which two activations lie beside two weights in bfloat16: 4 as bfloat16, 8 where they are floats."""
    instructions: Mapping[int, float] = field(hash=False)
    """Bits of an activation -> instructions of the inner loop for a row of activations and a register of weights."""
    few_bits: float
    """The same for weights of fewer than eight bits with activations of eight."""

    def needed(self, bits: int) -> frozenset[str]:
        """Flags in /proc/cpuinfo that kernels for activations of so many bits need."""
        return self.needs | self.dots if bits == 8 else self.needs


SETS = (
    Lanes(
        name="avx512", header="stored_avx512.h", side=16, needs=AVX512, dots=frozenset({"avx512_vnni"}),
        flags="-mavx512vnni", vnni=True, pair_bytes=4, instructions={8: 1, 16: 1, 32: 1}, few_bits=1,
    ),
    Lanes(
        name="avx2_vnni", header="stored_avx2.h", side=8, needs=AVX2, dots=frozenset({"avx_vnni"}),
        flags="-mavxvnni", vnni=True, pair_bytes=8, instructions={8: 1, 16: 3, 32: 1}, few_bits=1,
    ),
    Lanes(
        name="avx2", header="stored_avx2.h", side=8, needs=AVX2, dots=frozenset(),
        flags="", vnni=False, pair_bytes=8, instructions={8: 4, 16: 3, 32: 1}, few_bits=2.5,
    ),
    Lanes(
        name="generic", header="stored_generic.h", side=4, needs=frozenset(), dots=frozenset(),
        flags="", vnni=False, pair_bytes=8, instructions={8: 20, 16: 6, 32: 2}, few_bits=20,
    ),
)  # fmt: skip
"""All sets, the widest first."""


def sets_for(bits: int) -> Iterator[Lanes]:
    """Yields the sets that this machine has for activations of so many bits, the widest first."""
    return (one for one in SETS if has_features(one.needed(bits)))


def lanes_for(bits: int) -> Lanes:
    """The widest set that this machine has for activations of so many bits."""
    return next(sets_for(bits))


def lanes_of(outputs: int, bits: int) -> Lanes:
    """The set whose kernel takes fewest instructions for a weight of so many outputs; of equal ones the widest.

    Counted are the outputs rounded up to whole panels times the instructions of a register, so a narrow set may win
    where most of a wide panel would lie beyond the last output.
    """
    # `min` keeps the first of equals, and sets come from the widest on.
    return min(sets_for(bits), key=lambda one: -(-outputs // one.side) * one.side * one.instructions[bits])
