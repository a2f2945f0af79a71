"""What the generator of products with stored weights (`stored`) is told of an instruction set: one row a set.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """An instruction set, and what its kernels are given of a weight."""

    name: str
    header: str
    side: int
    """Outputs of a panel: numbers of 32 bits of a register."""
    needs: frozenset[str]
    """The processor's flags in /proc/cpuinfo."""
    dots: frozenset[str]
    """Those that activations in eight bits need beside them."""
    flags: str
    """Of the compiler for activations in eight bits, beside those of the machine's set."""
    vnni: bool
    """Whether it multiplies four codes by one instruction."""
    pair_bytes: int
    """Bytes of two numbers of x that meet two of bfloat16: these, or floats."""
    instructions: Mapping[int, float] = field(hash=False)
    """Of a row and a register of weights, by the bits of activations."""
    few_bits: float
    """Of a row and a register of codes of fewer than eight bits, with activations in eight."""

    def needed(self, bits: int) -> frozenset[str]:
        """Flags that kernels for activations of so many bits need."""
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
"""From the widest."""


def sets_for(bits: int) -> Iterator[Lanes]:
    """Those that this machine has for activations of so many bits, from the widest."""
    return (one for one in SETS if has_features(one.needed(bits)))


def lanes_for(bits: int) -> Lanes:
    """The widest of them."""
    return next(sets_for(bits))


def lanes_of(outputs: int, bits: int) -> Lanes:
    """Chooses the lanes whose kernel takes the least for a weight of so many outputs, by the tile model: lanes that
    its panels have, those beyond the last output among them, times instructions. Of equal ones the widest."""
    return min(sets_for(bits), key=lambda one: -(-outputs // one.side) * one.side * one.instructions[bits])
