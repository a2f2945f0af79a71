"""What an inference engine does, as data: the order of its queue, its budgets, its memory, its host's time.

`engine(name)` returns the frozen `Engine` on record for a program at the version that its file names, or of a user's
own `.toml` file; `engines()` lists the names. Each record says where its facts are from. What a user sets on the
command line replaces a field (`dataclasses.replace`). Leaves out how an engine's options are spelled (room `formats`)
and everything that differs by model or device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal

from gnomon import schema
from gnomon.errors import CatalogueError, InputError, nearest
from gnomon.hardware.types import Device
from gnomon.units import Bytes, Seconds

Preemption = Literal["recompute", "none"]
"""recompute: its blocks are freed and its tokens computed again when it is admitted again. none: what is admitted has
blocks for all it may ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFact:
    """The source from which some of an engine's fields are known."""

    fields: tuple[str, ...]
    """Names of the fields."""
    source: str
    """Code, document or measurement."""
    date: str
    """When it was read or fitted, YYYY-MM-DD."""
    confidence: Literal["checked", "unchecked"] = "unchecked"
    """unchecked: an estimate, or remembered and not looked up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallerDefaults:
    """Limits of an engine on devices with less memory, or of some names."""

    below_bytes: Bytes
    """Devices with less memory than this are under it."""
    names: tuple[str, ...]
    """So are devices with one of these in their names, whatever their memory."""
    max_batched_tokens: int
    """Token budget of an iteration."""
    max_seqs: int
    """Requests that run at the same time."""
    words: str
    """Those devices, for people: `an A100 or less than 70 GiB`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An inference program. A field has no default: what is not said is an error of its file."""

    SCHEMA: ClassVar[str] = "gnomon.engine/1"

    name: str
    """The field's name, lower case."""
    version: str
    """Release that the facts are of."""
    devices: tuple[Literal["gpu", "cpu", "tpu"], ...]
    """Kinds of devices that it runs on."""
    mixed: bool
    """Whether pieces of prompts and decodes share an iteration; otherwise prompts go first, alone."""
    chunked_prefill: bool
    """Whether a prompt may be computed in pieces; otherwise only whole ones that fit the token budget are admitted."""
    max_batched_tokens: int
    """Token budget of an iteration: new tokens of prompts, and one for each decode."""
    max_seqs: int
    """Requests that run at the same time."""
    preemption: Preemption
    """What happens when the blocks run out."""
    reserved_output: float
    """Share of the output tokens asked for, for which blocks must be free before a request is admitted."""
    watermark: float
    """Share of all blocks that admission leaves free."""
    block_tokens: int
    """Tokens of a KV block."""
    prefix_cache: bool
    """Whether blocks of an earlier prompt's same beginning are used again."""
    graph_sizes: tuple[int, ...]
    """Numbers of decodes for which graphs are captured, rising; a batch is padded to the next. Empty: launched."""
    memory_fraction: float
    """Share of memory taken, as `memory_of` says."""
    memory_of: Literal["total", "static", "free"]
    """total: of the device's memory, weights, activations and all included. static: of what is free before weights are
    loaded, for weights and keys alone. free: of what is free once weights are loaded."""
    hybrid_cache: Literal["grouped", "window", "full"]
    """KV memory of layers that differ. grouped: pools of equal pages, layers grouped by kind and filled up. window:
    each layer what it needs. full: as if every layer saw everything."""
    hybrid_tokens: Literal["length", "groups"]
    """What is printed as KV tokens of layers that differ. length: requests of the longest length that fit, times that
    length. groups: blocks of one group, times the tokens of a block."""
    expert_multiples: tuple[int, ...]
    """Multiples to which (hidden size, width on a rank) of 4-bit experts are filled up as they are loaded; (1, 1): they
    are not."""
    reserved_bytes: Bytes
    """Context, libraries' workspaces and graphs' own memory on each device."""
    logits_copies: float
    """Copies of the fp32 logits of `max_seqs` rows that live when its memory peaks."""
    host_step_s: Seconds
    """Host's time of an iteration: scheduling, inputs, sampling, outputs."""
    host_sequence_s: Seconds
    """More of it for each running request."""
    host_overlap: bool
    """Whether the host prepares the next iteration while the device computes."""
    launch_s: Seconds
    """Host's time of one kernel outside a graph."""
    op_call_s: Seconds
    """Host's time of each op of an encoder with a decoder, where layers run op by op and the device waits for it; 0 s:
    they do not, or it does not."""
    attention_call_s: Seconds
    """Host's time of attention to one text in one layer of an encoder with a decoder, where each text is a call of its
    own; 0 s: one kernel for all."""
    request_s: Seconds
    """From a request's arrival to the scheduler: server, tokenizer, processes between."""
    request_token_s: Seconds
    """More of it for each token of the prompt: splitting text into tokens, sending it between processes."""
    poll_steps: int
    """Iterations of decodes alone between two looks at what has come in; 1: it looks before each."""
    group_wait_steps: int
    """Iterations for which an attention group holds back a prompt until other groups have one too; 0: none."""
    kernels: Literal["vendor", "ggml", "ggml-vulkan", "stored"]
    """Who multiplies: the maker's libraries and what is written next to them; ggml, in the maker's language or in
    Vulkan; or kernels of our own with packed weights (`compiler.stored`), where they were measured."""
    one_shot_reduce: bool
    """Whether small sums over tensor-parallel ranks run as one kernel over NVLink in place of the library's."""
    plans_weights: tuple[str, ...]
    """Formats of weights that a search tries besides the devices' own 16 bits; none: no other."""
    plans_axes: tuple[Literal["tp", "pp", "dp", "ep"], ...]
    """Axes over which it divides a model; none: copies of it alone."""
    partial_experts: bool
    """Whether ep may be less than the devices of tp x dp and more than one."""
    plans_kv: tuple[str, ...]
    """Formats of cached keys that it tries besides 16 bits."""
    encoder_decoders: tuple[Literal["relative", "learned", "fixed"], ...]
    """Encoders with a decoder that it serves, by how they know where a token stands: relative (T5), learned (BART,
    mBART), fixed (Marian, M2M100); none: it serves none."""
    disaggregates: bool
    """Whether engines that compute prompts can hand keys to engines that answer."""
    streams_weights: bool
    """Whether it can read layers from a disk as they run, where memory does not hold them."""
    sparse_weights: bool
    """Whether it multiplies by weights of which some are not stored."""
    smaller_defaults: tuple[SmallerDefaults, ...]
    """Limits that it takes in place of `max_batched_tokens` and `max_seqs` on smaller devices; the first row that a
    device is under holds. Empty: it takes the same everywhere."""
    facts: tuple[EngineFact, ...]
    """Where it is known from; every field but the name is in one of them."""

    def __post_init__(self) -> None:
        what = f"engine {self.name!r}"
        for name in ("max_batched_tokens", "max_seqs", "block_tokens", "poll_steps"):
            if getattr(self, name) < 1:
                raise InputError(f"{what}: {name} must be at least 1, got {getattr(self, name)}")
        for name in ("reserved_output", "watermark", "memory_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{what}: {name} must be from 0 to 1, got {getattr(self, name):g}")
        if self.memory_fraction == 0:
            raise InputError(f"{what}: memory_fraction 0 leaves no memory; give a share such as 0.9")
        if list(self.graph_sizes) != sorted(set(self.graph_sizes)):
            raise InputError(f"{what}: graph_sizes must rise")
        # Without blocks for its whole answer a request could wait for ever for one that waits for it.
        if self.preemption == "none" and self.reserved_output < 1:
            raise InputError(f"{what}: without preemption reserved_output must be 1, or admitted requests could starve")

    def smaller(self, devices: Sequence[Device]) -> SmallerDefaults | None:
        """The limits that it takes on these devices in place of its own; None where it takes its own."""
        # One device that is under a row is enough: the limits are those of the whole engine.
        for row in self.smaller_defaults:
            if any(d.memory_bytes < row.below_bytes or any(name in d.name for name in row.names) for d in devices):
                return row
        return None

    def padded(self, decodes: int) -> int:
        """Rows that a batch of so many decodes is computed with."""
        # Batches beyond the largest graph are launched as they are.
        for size in self.graph_sizes:
            if size >= decodes:
                return size
        return decodes


ALIASES = {
    "trtllm": "tensorrt-llm",
    "trt": "tensorrt-llm",
    "llamacpp": "llama.cpp",
    "llama-cpp": "llama.cpp",
    "ov": "openvino",
}
"""Other names -> names of records."""


@cache
def engines() -> tuple[str, ...]:
    """Names of the engines on record, sorted."""
    return tuple(sorted(path.stem for path in (Path(__file__).parent / "engines").glob("*.toml")))


def engine(name: str) -> Engine:
    """The record of an engine, or a file of one, as in `mine.toml`. CatalogueError with the nearest names if there is
    none."""
    # A path that is not there is still a path: the error should be of a missing file.
    if name.endswith(".toml") and (Path(name).is_file() or Path(name).name != name):
        return schema.load_file(Engine, name)
    known = ALIASES.get(name.lower(), name.lower())
    if known not in engines():
        raise CatalogueError(
            f"no engine {name!r} is on record{nearest(name, [*engines(), *ALIASES])}; known: {', '.join(engines())}"
        )
    return _read(known)


@cache
def _read(name: str) -> Engine:
    return schema.load_packaged(Engine, Path(__file__).parent / "engines" / f"{name}.toml")
