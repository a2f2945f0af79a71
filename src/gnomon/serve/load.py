"""A folder in Hugging Face's layout as an engine that answers: `open_model(folder, …)`.

Weights are read once, each in the dtype that is computed in, and matrices that are multiplied together are joined, so
that memory is the weights' and the pages'. Leaves out tokenizers (`text`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from gnomon.errors import InputError
from gnomon.graph import Dtypes, Graph
from gnomon.graph.outputs import without_loss
from gnomon.late import load_late, without_collection
from gnomon.plans import Layout, Mesh
from gnomon.runtime.checkpoint.pretrained import model_of, values_of
from gnomon.runtime.module.apply import DTYPES, slots_of
from gnomon.runtime.parameters.packed import Codes, PackedFolder, codes_of, sparse_as
from gnomon.runtime.parameters.parameters import Slot
from gnomon.runtime.parameters.weights import WeightReader
from gnomon.serve.adapters import Linear, read_adapter
from gnomon.serve.decoder import Decoder, check_decoder, linears_of, windows_of
from gnomon.serve.division import ModelShare, check_division, divide, whole
from gnomon.serve.engine import Engine
from gnomon.serve.graph_head import IDENTITY, GraphHead, without_head
from gnomon.serve.latent import latent_of, row_of
from gnomon.serve.matrices import AS_STORED, Forms
from gnomon.serve.sampling import Sampling
from gnomon.serve.sizes import ALONE, Sizes, Ways
from gnomon.sharding import shard_graph
from gnomon.software.engine import Engine as Rules
from gnomon.storage.form import Storage
from gnomon.storage.integers import Integers
from gnomon.units import show_bytes

SERVED = ("fp32", "bf16", "fp64")
"""What the engine computes in."""
DEFAULT_LEN = 4096
"""Tokens of a model whose config.json does not say how long it may be."""


def is_seq2seq(folder: Path) -> bool:
    """Whether a folder's model reads one text and writes another (T5)."""
    config = (folder if folder.is_dir() else folder.parent) / "config.json"
    return config.is_file() and bool(json.loads(config.read_text(encoding="utf-8")).get("is_encoder_decoder", False))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """What a folder has, before weights are read."""

    graph: Graph
    """As it is trained, whose parameters the weights are."""
    graph_without_loss: Graph
    """Without its loss."""
    ways: Ways
    """Into how many parts it is divided."""
    sizes: Sizes
    forms: Forms
    """How matrices are stored meanwhile."""
    max_model_len: int
    """Tokens of prompt and answer."""


def look(
    folder: Path,
    rules: Rules,
    *,
    dtype: str,
    kv_bytes: int,
    weights: str = AS_STORED,
    max_model_len: int | None = None,
    longest_asked: int | None = None,
    ways: Ways = ALONE,
) -> ModelFolder:
    """Looks at a folder before it is loaded. kv_bytes: of keys and values of a process. InputError or PlanError for a
    folder without weights, a model that is no decoder or does not divide so, too little memory, or weights that are not
    served so."""
    if dtype not in SERVED:
        raise InputError(f"the engine computes in {', '.join(SERVED)}, not in {dtype!r}")
    forms = Forms.of(weights, DTYPES[dtype])
    graph = model_of(folder).graph
    cut = without_loss(graph)
    check_decoder(cut)
    longest = max_len_of(folder)
    requested_tokens = min(longest, max_model_len or longest)
    if max_model_len is not None and max_model_len > longest:
        raise InputError(f"max_model_len {max_model_len} is above the {longest} tokens of its config.json; lower it")
    if ways != ALONE:
        check_division(cut, ways)
    sizes = sizes_of(
        cut, rules, DTYPES[dtype], kv_bytes, min(requested_tokens, longest_asked or requested_tokens), ways
    )
    values_of(folder, graph)  # the files' headers: what is missing or misshapen
    return ModelFolder(
        graph=graph, graph_without_loss=cut, ways=ways, sizes=sizes, forms=forms, max_model_len=requested_tokens
    )


def open_model(
    folder: Path,
    rules: Rules,
    *,
    dtype: str,
    kv_bytes: int,
    weights: str = AS_STORED,
    max_model_len: int | None = None,
    longest_asked: int | None = None,
    adapters: Sequence[tuple[str, Path]] = (),
    resident_bytes: int | None = None,
    head: str = "exact",
) -> Engine:
    """Opens a model. kv_bytes: of all keys and values. weights: how matrices are stored meanwhile, as `matrices.Forms`
    reads it. max_model_len: tokens of prompt and answer; None: as many as the model's config.json says. longest_asked:
    of the only request that there will be. adapters: (name, folder in PEFT's layout) of those that requests may ask
    for. resident_bytes: of layers in memory, where others stay on a disk. head: `graph` searches for the likeliest
    tokens in a graph over the vocabulary (`graph_head`). Errors as `look` has them."""
    if is_seq2seq(folder):
        if weights != AS_STORED or adapters or resident_bytes is not None or head != "exact":
            raise InputError(
                "an encoder with a decoder is served as its folder has it; leave --weights, --lora, --head and "
                "--stream-weights out"
            )
        engine: Engine = load_late("gnomon.serve.seq2seq:open_seq2seq")(
            folder, rules, dtype=dtype, kv_bytes=kv_bytes, max_model_len=max_model_len or longest_asked
        )
        return engine
    found = look(
        folder,
        rules,
        dtype=dtype,
        kv_bytes=kv_bytes,
        weights=weights,
        max_model_len=max_model_len,
        longest_asked=longest_asked,
    )
    if head == "graph":
        return _with_graph_head(folder, rules, found, adapters, resident_bytes)
    model = load_share(folder, found, whole(found.graph_without_loss), adapters, resident_bytes)
    return Engine(model, rules, max_model_len=found.max_model_len)


TRIED_PROMPTS, TRIED_TOKENS = 16, 6
"""Made-up prompts, and tokens of answers to them, whose states a graph over the vocabulary is calibrated by."""


def _with_graph_head(
    folder: Path, rules: Rules, found: ModelFolder, adapters: Sequence[tuple[str, Path]], resident_bytes: int | None
) -> Engine:
    """The engine without the model's head, and the head as a graph; which of both is used is told."""
    if found.forms.layers is not None:
        raise InputError("--head graph has the head's matrix in full; leave --weights out")
    cut = without_head(found.graph_without_loss)
    weights = Weights(folder, found.graph, whole(found.graph_without_loss))
    table, bias = weights[cut.weight], weights[cut.bias] if cut.bias else None
    head = GraphHead(table.flatten(1).to(found.forms.dtype), None if bias is None else bias.flatten())
    del weights, table
    model = load_share(
        folder,
        replace(found, graph_without_loss=cut.graph),
        whole(cut.graph),
        adapters,
        resident_bytes,
        identity=cut.width,
    )
    engine = Engine(model, rules, max_model_len=found.max_model_len)
    engine.head = head
    draw, longest = random.Random(0), min(found.max_model_len, engine.scheduler.longest())
    answer = max(1, min(TRIED_TOKENS, longest // 2))
    for _ in range(TRIED_PROMPTS):
        prompt = [draw.randrange(head.vocab_size) for _ in range(max(1, min(8, longest - answer)))]
        engine.add(prompt, Sampling(max_tokens=answer, temperature=0.0))
        while engine.has_work:
            engine.step()
    calibrated = head.calibrate(torch.cat(head.seen))
    print(f"gnomon: {calibrated.summary(head.vocab_size)}", file=sys.stderr, flush=True)
    head.searched = head.multiplied = 0
    return engine


def load_share(
    folder: Path,
    found: ModelFolder,
    share: ModelShare,
    adapters: Sequence[tuple[str, Path]] = (),
    resident_bytes: int | None = None,
    *,
    identity: int = 0,
    expert_copies: int = 0,
) -> Decoder:
    """What one rank holds. identity: rows of the identity that stands in the head's place. expert_copies: as `Decoder`
    has them. Errors as `look` has them."""
    with _large_apart(), without_collection():
        weights = Weights(folder, found.graph, share, identity)
        linears = weights.linears(found.graph_without_loss) if adapters else {}
        lows = [read_adapter(name, path, linears, share.slots) for name, path in adapters]
        model = Decoder(share, weights, found.sizes, found.forms, lows, resident_bytes, expert_copies)
        del weights
    for line in model.why:
        print(f"gnomon: {line}", file=sys.stderr, flush=True)
    return model


M_MMAP_THRESHOLD, LARGE, USUAL = -3, 1 << 19, 1 << 25
"""Of glibc's malloc.h: from how many bytes on an array has pages of its own, while weights are packed and after."""


@contextlib.contextmanager
def _large_apart() -> Iterator[None]:
    """Arrays that are made on the way from a file to packed codes go back to the system as they are freed. Between
    those that stay they would be holes: as much again as weights of eight bits, measured."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        yield
        return
    library.mallopt(M_MMAP_THRESHOLD, LARGE)
    yield
    library.mallopt(M_MMAP_THRESHOLD, USUAL)
    library.malloc_trim(0)  # smaller ones between them go back too: a third of weights of four bits, measured


LOOKED_AT = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Dtypes of weights that are looked at for what is no number."""


class Weights:
    """Each parameter by its full name, in full, dim by dim as in the Graph and in the file's dtype; read anew each time
    that it is asked for, since what is packed is not kept twice. Of one rank of several, its part."""

    def __init__(self, folder: Path, graph: Graph, share: ModelShare, identity: int = 0) -> None:
        """Takes identity, the rows of the matrix `graph_head.IDENTITY`, where the head is a graph over the
        vocabulary."""
        self.identity = identity
        reader = values_of(folder, graph)
        assert isinstance(reader, WeightReader), "a folder's"
        self.reader = reader
        self.slots = share.slots or {slot.name: slot for slot in whole_slots(graph)}
        self.sparse_as = sparse_as(reader.folder.path)
        """How the folder says that its matrices are sparse; None: it does not."""

    def __getitem__(self, name: str) -> Tensor:
        if name == IDENTITY:
            return torch.eye(self.identity)
        slot = self.slots[name]
        value = self.reader(slot)
        assert value is not None, "values_of has looked at what is there"
        return self._checked(name, value).view(slot.shape)

    def mapped(self, name: str) -> Tensor:
        """The same, where it lies in its file if it lies there as the Graph has it: for what is packed at once, since
        copying first takes as long as packing."""
        value = None if name == IDENTITY else self.reader.mapped(self.slots[name])
        return self[name] if value is None else self._checked(name, value)

    def _checked(self, name: str, value: Tensor) -> Tensor:
        # their least and largest take a tenth of the time of copying them, and are numbers only where all are
        if value.dtype in LOOKED_AT and value.numel() and not all(x.isfinite() for x in value.aminmax()):
            raise InputError(
                f"{name} of {self.reader.folder.path} has {int((~value.isfinite()).sum())} weights that are no numbers "
                f"(NaN or infinite): the file was damaged, or training has failed; fetch it again"
            )
        return value

    def let_go(self) -> None:
        """What was read of the files takes no memory any more."""
        self.reader.folder.let_go()

    def codes(self, name: str) -> Sequence[Codes]:
        """What the folder has packed of a matrix, rows one below the other; nothing where it has numbers, or this rank
        a part of it, which is read as numbers."""
        if name == IDENTITY:
            return ()
        slot = self.slots[name]
        return codes_of(self.reader, name) if slot.shape == slot.whole else ()

    def linears(self, graph: Graph) -> dict[str, Linear]:
        """Maps linears of the layers of `graph` by the module that the folder's files name, where it has a tensor of
        its own."""
        by_name = {}
        for linear in linears_of(graph):
            pieces = self.reader.layout.pieces[linear.parameter]
            if len(pieces) == 1 and not pieces[0].pick and pieces[0].tensor.endswith(".weight"):
                by_name[pieces[0].tensor.removesuffix(".weight")] = linear
        return by_name

    @property
    def packed_as(self) -> Storage | None:
        """How the folder has matrices packed; None: it has not."""
        folder = self.reader.folder
        if not isinstance(folder, PackedFolder) or not folder.packed:
            return None
        storage = folder.stored(min(folder.packed))[0]
        return storage if isinstance(storage, Integers) else None


def whole_slots(graph: Graph) -> list[Slot]:
    """Every parameter and frozen weight of a model on one process."""
    sharded = shard_graph(
        graph, Layout(), Mesh(), {"batch": 1, "seq": 2, "enc_seq": 2}, Dtypes(param="fp32", compute="fp32")
    )
    trained = slots_of(graph.layers(), sharded, {}, set())
    return [*trained, *slots_of(graph.layers(), sharded, {}, set(), frozen=True)]


def max_len_of(folder: Path) -> int:
    """Tokens that a model's config.json says its sequences have at most."""
    file = (folder if folder.is_dir() else folder.parent) / "config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    inner = values.get("text_config")
    for own in (values, inner if isinstance(inner, dict) else {}):
        for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"):
            if isinstance(own.get(name), int) and own[name] > 0:
                return int(own[name])
    return DEFAULT_LEN


def sizes_of(
    graph: Graph, rules: Rules, dtype: torch.dtype, kv_bytes: int, max_model_len: int, ways: Ways = ALONE
) -> Sizes:
    """Sizes caches: as many blocks as the bytes of a process hold, at most what all running requests may fill; the same
    on every rank. InputError where that is not even one request of the longest."""
    most = -(-max_model_len // rules.block_tokens)
    sizes = Sizes(
        blocks=rules.max_seqs * most,
        block_tokens=rules.block_tokens,
        max_seqs=rules.max_seqs,
        max_batched_tokens=max(rules.max_batched_tokens, rules.max_seqs),
        max_len=max_model_len,
        windows=windows_of(graph),
        scans=any(block.does("scans") for block in graph.blocks),
        lanes=ways.pp,
    )
    if sizes.scans and rules.prefix_cache and (state := state_bytes(graph, dtype)):
        # an eighth of the memory, or what four times the running requests have
        sizes = replace(sizes, snapshots=min(4 * sizes.max_seqs, kv_bytes // 8 // sizes.lanes // state))
        kv_bytes -= sizes.lanes * sizes.snapshots * state
    # Ranks of a stage have equal parts: one of each stage is looked at.
    shares = [graph] if ways == ALONE else [divide(graph, ways, rank).graph for rank in range(0, ways.ranks, ways.tp)]
    blocks = sizes.blocks
    for share in shares:
        block, windowed = block_bytes(share, sizes, dtype)
        if block:
            blocks = min(blocks, (kv_bytes // sizes.lanes - windowed) // block)
    if blocks < most:
        raise InputError(
            f"{show_bytes(kv_bytes)} of keys and values hold {max(0, blocks) * rules.block_tokens} tokens"
            f"{f' for each of {sizes.lanes} batches' if sizes.lanes > 1 else ''}, and a request may have "
            f"{max_model_len}; give more memory, or lower max_model_len"
        )
    return replace(sizes, blocks=blocks)


def block_bytes(graph: Graph, sizes: Sizes, dtype: torch.dtype) -> tuple[int, int]:
    """(bytes of a block in all layers that see all tokens, bytes of all blocks of layers with a window) of a batch."""
    every = windowed = 0
    for layer in graph.layers():
        block = graph.block(layer.call.block)
        for op in block.ops:
            if op.does != "attends":
                continue
            found = latent_of(block, op)
            row = sum(_row(block.tensor(name).atoms) for name in op.inputs[1:3])
            tokens = (row if found is None else row_of(block, found)) * dtype.itemsize
            window = op.attr("window", 0)
            assert isinstance(window, int)
            if window:
                windowed += sizes.window_blocks(window) * sizes.block_tokens * tokens
            else:
                every += sizes.block_tokens * tokens
    return every, windowed


def state_bytes(graph: Graph, dtype: torch.dtype) -> int:
    """Counts the bytes of the states of one request in all scans, and of the tokens that they convolve.

    dtype: of the weights. States are in float32, or wider where the weights are, as `LayerScan` holds them.
    """
    total, wide = 0, torch.promote_types(dtype, torch.float32).itemsize
    for layer in graph.layers():
        block = graph.block(layer.call.block)
        for op in block.ops:
            if op.does == "scans":
                named = {name.rpartition(".")[2]: block.tensor(name) for name in op.inputs[1:]}
                x, bc = (list(named[name].dims) for name in ("weight_x", "weight_bc"))
                width, taps, state = _row((*x[0].atoms, *x[1].atoms)), x[-1].size or 1, bc[2].size or 1
                channels = width + _row(atom for dim in bc[:-1] for atom in dim.atoms)
                total += wide * (width * state + channels * (taps - 1))
    return total


def _row(atoms: object) -> int:
    rows = 1
    for atom in atoms:  # type: ignore[attr-defined]
        rows *= atom.size or 1
    return rows
