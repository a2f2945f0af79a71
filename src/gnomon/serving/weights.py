"""A Graph as a server sees it: what each kind of layer computes on one rank for some tokens, and what it caches.

`shape_of(graph, serving)` walks the blocks once and returns a `RankModel`: for each block its products (rows joined
where an engine joins them: q, k and v; gate and up), its attention, experts, scan, passes over activations and sums
over ranks, with local sizes. InputError where an axis does not divide what it should. Leaves out seconds (`iteration`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Literal

from gnomon.errors import InputError
from gnomon.graph import BF16, Block, Dim, Graph, Op, Setting, forward_work
from gnomon.ops.state_space import Scan
from gnomon.serving.layout import Format, Serving, weight_format

ONE_TOKEN = {"batch": 1, "seq": 1, "enc_seq": 1}
"""Sizes of an activation of one token."""

SPLIT = ("heads", "kv_heads", "ffn", "shared_ffn", "vocab", "ssm_groups", "ssm_heads")
"""Dims (without their scope) that tensor parallelism divides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedMatmul:
    """Rows times a matrix of n columns and k rows, `batch` of them; sizes on one rank."""

    n: int
    """Columns of the matrix."""
    k: int
    """Its rows."""
    bits: float
    """Bits of a weight as it is stored."""
    compute_dtype: str
    """The dtype that it multiplies in."""
    batch: int = 1
    """The number of matrices (heads of absorbed projections)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAttention:
    """Attention of a layer on one rank."""

    heads: int
    """Query heads on the rank."""
    kv_heads: int
    """Key-value heads on the rank."""
    width: int
    """Head size of q and k."""
    width_v: int
    """Head size of v."""
    window: int
    """Keys that a query sees; 0: all."""
    latent: int = 0
    """Elements of a token's latent keys (MLA), which decodes read in place of keys and values; 0: none."""
    latent_v: int = 0
    """Those of the latent elements that are values."""
    causal: bool = True
    """Whether a token sees only tokens before it."""

    @property
    def kv_elements(self) -> int:
        """Elements of a token in the cache of one layer."""
        return self.latent or self.kv_heads * (self.width + self.width_v)

    @property
    def flops_per_key(self) -> int:
        """FLOPs of a decode for each key that it sees."""
        # Latent attention: scores over latent + rope elements, values over the latent ones, for every head.
        if self.latent:
            return 2 * self.heads * (self.latent + self.latent_v)
        # q kᵀ over width, p v over width_v, 2 FLOPs a multiply-add.
        return 2 * self.heads * (self.width + self.width_v)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExperts:
    """Experts of a layer on one rank."""

    experts: int
    """The number of experts of all ranks."""
    topk: int
    """The number of experts that a token chooses."""
    local_share: float
    """Share of the experts that a rank has."""
    elements: int
    """Weights of one expert on a rank, in elements."""
    hidden: int
    """Size of a token's hidden state."""
    stored: float
    """Weights as an engine stores them, filled up, over those of the model."""
    row_elements: int
    """Activations read and written for a (token, expert) pair."""
    bits: float
    """Bits of a weight as it is stored."""
    compute_dtype: str
    """The dtype that they multiply in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """One kind of block."""

    name: str
    """Name of the block in the graph."""
    count: int
    """How many of it are in the model."""
    matmuls: tuple[ServedMatmul, ...]
    """Its matmuls on one rank."""
    attention: RankAttention | None
    """Its self-attention; None where it has none."""
    experts: RankExperts | None
    """Its routed experts; None where it has none."""
    scan_elements: int
    """Elements of the state of a scan for each sequence; 0: none."""
    taps_elements: int
    """Elements of the last inputs of a scan's convolution for each sequence."""
    scan: tuple[Op, Block] | None
    cross: RankAttention | None
    """Of a decoder beside an encoder: attention to what that read."""
    source_matmuls: tuple[ServedMatmul, ...]
    """Keys and values of that, made once for each text."""
    pass_bytes: int
    """Bytes of passes over activations for each token: norms, activations, rotary, router."""
    pass_kernels: int
    """The number of kernels of those passes."""
    sums: int
    """The number of sums over tensor-parallel ranks."""
    dispatches: int
    """How often rows of experts are sent to other ranks and back: 0 or 1."""
    hidden: int
    """Size of a token's hidden state."""
    weight_bytes: float
    """Bytes of its weights on one rank."""
    is_head: bool
    """Whether it is computed for rows of last tokens only."""
    has_table: bool
    """Whether it looks rows up in a table of the vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankModel:
    """A model on one rank."""

    blocks: tuple[BlockShape, ...]
    """Computed for each token that is made: of an encoder with a decoder, those of the decoder."""
    encoder: tuple[BlockShape, ...]
    """Computed once for a text that is answered; none where there is no encoder."""
    hidden: int
    """Size of a token's hidden state."""
    vocab: int
    """Rows of the vocabulary."""
    ffn: int
    """Columns of the widest matmul on one rank."""
    context: int | None
    """Positions that it has a table for; None: no limit known."""

    @property
    def weight_bytes(self) -> float:
        """Returns the bytes of weights on one rank, over all stages."""
        return sum(block.weight_bytes * block.count for block in (*self.encoder, *self.blocks))

    @property
    def attentions(self) -> tuple[tuple[RankAttention, int], ...]:
        """Kinds of attention with the number of their layers."""
        found: dict[RankAttention, int] = {}
        for block in self.blocks:
            if block.attention is not None:
                found[block.attention] = found.get(block.attention, 0) + block.count
        return tuple(found.items())

    @property
    def crossed(self) -> tuple[tuple[RankAttention, int], ...]:
        """Kinds of attention to what an encoder read, with the number of their layers."""
        return tuple((block.cross, block.count) for block in self.blocks if block.cross is not None)

    @property
    def state_elements(self) -> int:
        """Elements of scans' states for each sequence, all layers."""
        return sum(block.scan_elements * block.count for block in self.blocks)


def _base(dim: Dim) -> str:
    return dim.name.rpartition(".")[2]


def _is_read(block: Block, name: str) -> bool:
    """Whether a tensor has the tokens of a text that an encoder reads."""
    return any(_base(dim) == "enc_seq" for dim in block.tensor(name).dims)


def _is_source(block: Block, name: str) -> bool:
    """Whether a decoder's block has it of what an encoder read."""
    return name in {t.name for t in block.tensors} and _is_read(block, name) and not _is_read(block, block.outputs[0])


class _BlockWalk:
    """One block's ops, gathered."""

    def __init__(
        self, block: Block, serving: Serving, count: int, multiples: tuple[int, ...], elsewhere: Collection[str] = ()
    ) -> None:
        """elsewhere: parameters that are a later block's too, and counted there."""
        self.multiples, self.elsewhere = multiples, elsewhere
        self.block, self.serving, self.count = block, serving, count
        self.format = weight_format(serving.weights)
        self.sizes: dict[str, int] = {}
        for tensor in block.tensors:
            for dim in tensor.atoms:
                if dim.size is not None:
                    self.sizes[dim.name] = self._local(dim)

    def _local(self, dim: Dim) -> int:
        assert dim.size is not None
        serving, base, size = self.serving, _base(dim), dim.size
        # Experts' inner dim is divided over the ranks that share an expert: all of tp x dp but those of ep.
        if base == "expert_ffn":
            parts = serving.tp * serving.dp // serving.ep
            return self._divided(size, parts, dim.name)
        # Fewer key heads than ranks: each head is copied to tp / kv_heads of them.
        if base == "kv_heads" and size < serving.tp:
            if serving.tp % size:
                raise InputError(f"tp {serving.tp} neither divides nor is a multiple of {size} kv_heads")
            return 1
        if base in SPLIT:
            if base == "vocab":  # engines fill it up
                return -(-size // serving.tp)
            # Fewer groups than ranks: copied, as key heads are.
            if base == "ssm_groups" and size < serving.tp:
                return 1
            return self._divided(size, serving.tp, dim.name)
        return size

    def _divided(self, size: int, parts: int, name: str) -> int:
        if size % parts:
            legal = [n for n in range(1, size + 1) if size % n == 0 and n <= 2 * parts]
            near = min(legal, key=lambda n: (abs(n - parts), n))
            raise InputError(f"tp {parts} does not divide the {size} {name}; the nearest that does is {near}")
        return size // parts

    def size(self, dims: tuple[Dim, ...]) -> int:
        """Local elements of dims that are not tokens."""
        atoms = [atom for dim in dims for atom in dim.atoms]
        return prod(self.sizes[atom.name] for atom in atoms if atom.name in self.sizes)

    def split(self, dims: tuple[Dim, ...]) -> bool:
        return self.serving.tp > 1 and any(_base(a) in SPLIT for d in dims for a in d.atoms)

    def stored(self, kind: str) -> Format:
        form = self.format
        return form if form.covers == "all" or form.covers == kind or kind == "experts" else weight_format(form.rest)

    def shape(self) -> BlockShape:
        block = self.block
        linears = [op for op in block.ops if op.does == "multiplies"]
        grouped = [op for op in block.ops if op.does == "multiplies rows"]
        cores = [op for op in block.ops if op.does == "attends"]
        crossing = [op for op in cores if _is_source(block, op.inputs[1])]
        cores = [op for op in cores if op not in crossing]
        scans = [op for op in block.ops if op.does == "scans"]
        names = {_base(atom): atom for tensor in block.tensors for atom in tensor.atoms}
        latent = "kv_rank" in names and bool(cores)
        is_head = any(op.does in ("compares labels", "compares") for op in block.ops)
        table = next((op for op in block.ops if op.does == "looks up"), None)
        # Linears that read one input in one format are joined: an engine runs q, k, v (or gate, up) as one matmul. A
        # partial result (row-parallel) and a router stay alone.
        joined: dict[tuple[str, float], list[ServedMatmul]] = {}
        sums = 0
        for op in linears:
            weight = block.tensor(op.inputs[1])
            # inner: dims that are summed over; outer: those of the result.
            inner = tuple(
                d for d in weight.dims if d.name in op.contracts or any(a.name in op.contracts for a in d.atoms)
            )
            outer = tuple(d for d in weight.dims if d not in inner)
            form = self.stored("head" if is_head else "matrices")
            router = "experts" in {_base(atom) for atom in weight.atoms}
            if router:
                form = weight_format("bf16")  # routers are not quantised
            out, into = self.size(outer), self.size(inner)
            matmul = ServedMatmul(n=out, k=into, bits=form.bits, compute_dtype=form.compute_dtype)
            if latent and any(_base(a) == "kv_rank" for d in inner for a in d.atoms):
                # absorbed into queries and outputs: a small product a head on either side
                # MLA absorbed: W_UK goes into the query (per head: nope x rank), W_UV into the output (per head: rank x
                # value).
                heads = self.sizes[names["heads"].name]
                form = weight_format("bf16")
                nope = self.sizes[names["qk_nope_dim"].name] if "qk_nope_dim" in names else out // heads // 2
                value = out // heads - nope
                joined[op.path, 0.0] = [
                    ServedMatmul(n=into, k=nope, batch=heads, bits=form.bits, compute_dtype=form.compute_dtype),
                    ServedMatmul(n=value, k=into, batch=heads, bits=form.bits, compute_dtype=form.compute_dtype),
                ]
                continue
            partial = self.split(inner)
            # Row-parallel linears end in a sum over tp; of a mixture only those of shared experts have one of their
            # own.
            if partial and not block.does("combines"):
                sums += 1
            elif partial and "shared" not in op.path:
                sums += 1
            joined.setdefault((op.path if partial or router else op.inputs[0], form.bits), []).append(matmul)
        matmuls, of_source = list[ServedMatmul](), list[ServedMatmul]()
        for (of, _), same in joined.items():
            joint = of_source if _is_source(block, of) else matmuls
            if len(same) > 1 and len({(p.k, p.bits, p.batch, p.compute_dtype) for p in same}) == 1:
                first = same[0]
                joint.append(
                    ServedMatmul(
                        n=sum(p.n for p in same), k=first.k, bits=first.bits, compute_dtype=first.compute_dtype
                    )
                )
            else:
                joint += same
        experts = self._experts(grouped) if grouped else None
        dispatches = 0
        if experts is not None:
            # With attention groups (dp) tokens travel to their experts; with tp alone every rank has all tokens and the
            # outputs are summed.
            if self.serving.dp > 1:
                dispatches = 1
            elif self.serving.tp > 1:
                sums += 1
        pass_bytes, pass_kernels = self._passes()
        attention = self._attention(cores[0], latent) if cores else None
        weights = sum(p.n * p.k * p.batch * p.bits / 8 for p in (*matmuls, *of_source))
        if experts is not None:
            experts_here = (experts.experts + self.serving.redundant_experts) * experts.local_share
            # copies lie in two rooms that all layers use in turn (serve.copies), not in each of them
            experts_here += 2 * self.serving.expert_copies / self.count
            weights += experts.elements * experts.stored * experts.bits / 8 * experts_here
        if table is not None and table.inputs[1] not in self.elsewhere:
            weights += self.size(block.tensor(table.inputs[1]).dims) * self.stored("table").bits / 8
        named = {block.tensor(name).name for op in (*linears, *grouped) for name in op.inputs[1:2]}
        named |= {table.inputs[1]} if table is not None else set()
        small = [t for t in block.parameters if t.name not in named]
        weights += sum(self.size(t.dims) * 2 for t in small)
        scan = Scan.of(scans[0], block, {**self.sizes, **ONE_TOKEN}) if scans else None
        hidden = self.sizes.get(names["hidden"].name, 0) if "hidden" in names else 0
        return BlockShape(
            name=block.name,
            count=self.count,
            matmuls=tuple(matmuls),
            attention=attention,
            experts=experts,
            scan_elements=int(scan.width * scan.state) if scan is not None else 0,
            taps_elements=_taps(scans[0], block, scan) if scan is not None else 0,
            scan=(scans[0], block) if scans else None,
            cross=self._attention(crossing[0], latent=False) if crossing else None,
            source_matmuls=tuple(of_source),
            pass_bytes=pass_bytes,
            pass_kernels=pass_kernels,
            sums=sums,
            dispatches=dispatches,
            hidden=hidden,
            weight_bytes=weights,
            is_head=is_head,
            has_table=table is not None,
        )

    def _experts(self, grouped: list[Op]) -> RankExperts:
        block, serving = self.block, self.serving
        weights = [block.tensor(op.inputs[1]) for op in grouped]
        experts = weights[0].dims[0].size
        assert experts is not None
        topk = next(
            a.size for op in grouped for a in block.tensor(op.outputs[0]).atoms if _base(a) == "topk" and a.size
        )
        if experts % serving.ep:
            raise InputError(f"ep {serving.ep} does not divide the {experts} experts")
        form = self.stored("experts")
        width = self.size(weights[0].dims[1:2])
        hidden = self.size(weights[-1].dims[1:2])
        return RankExperts(
            experts=experts,
            topk=topk,
            local_share=1 / serving.ep,
            elements=sum(self.size(w.dims[1:]) for w in weights),
            stored=self._filled(hidden, width) if form.bits < 6 else 1.0,
            hidden=hidden,
            # Read the row and its output, and read and write of what lies between gate, up and down.
            row_elements=2 * hidden + 3 * width,
            bits=form.bits,
            compute_dtype=form.compute_dtype,
        )

    def _filled(self, hidden: int, width: int) -> float:
        """Weights of experts as they are loaded, over those that are computed with."""
        rows, columns = (
            -(-size // many) * many / size for size, many in zip((hidden, width), self.multiples, strict=True)
        )
        return rows * columns

    def _attention(self, op: Op, latent: bool) -> RankAttention:
        q, k, v = (self.block.tensor(name) for name in op.inputs[:3])
        window = op.attr("window", 0)
        names = {_base(a): self.sizes.get(a.name, 0) for t in self.block.tensors for a in t.atoms}
        heads = next(self.sizes[a.name] for a in q.atoms if _base(a) == "heads")
        kv = next((self.sizes[a.name] for a in k.atoms if _base(a) in ("kv_heads", "heads")), 1)
        width = self.sizes[q.atoms[-1].name]
        width_v = self.sizes[v.atoms[-1].name]
        return RankAttention(
            heads=heads,
            kv_heads=kv,
            width=width,
            width_v=width_v,
            window=int(window) if isinstance(window, int) else 0,
            latent=names["kv_rank"] + names.get("rope_dim", 0) if latent else 0,
            latent_v=names["kv_rank"] if latent else 0,
            causal=bool(op.attr("causal", False)),
        )

    def _passes(self) -> tuple[int, int]:
        """(bytes for a token, kernels) of what an engine runs between products; sums with a residual are part of the
        norm that follows, rotary of q and k and the write of keys are one kernel each."""
        setting = Setting(sizes={**self.sizes, **ONE_TOKEN}, dtypes=BF16, causal_flops="half")
        total, kernels, once = 0.0, 0, set[str]()
        for op in self.block.ops:
            served = op.rules.served
            if served in ("apart", "free") or op.captured is not None:
                continue
            if "experts." in op.path and "shared" not in op.path:
                continue  # in the price of the experts
            work = forward_work(op, self.block, setting)
            own = sum(
                self.size(self.block.tensor(n).dims) * 2 for n in op.inputs if self.block.tensor(n).kind == "parameter"
            )
            total += max(0, int(work.read_bytes) + int(work.write_bytes) - own)
            kernels += served == "kernel" or (served == "kernel a block" and op.kind not in once)
            once.add(op.kind)
        writes_keys = self.block.does("attends")  # keys and values go to their pages in one kernel
        return int(total), kernels + writes_keys


def _taps(op: Op, block: Block, scan: Scan) -> int:
    """Elements of the inputs that a scan's convolution keeps: all its taps but the one of the newest token."""
    taps = block.tensor(op.inputs[1]).dims[-1].size or 1
    return int((taps - 1) * (scan.width + 2 * scan.groups * scan.state))


def _first_place(block: Block, table: str) -> int:
    """Row of a table of positions that the first token reads."""
    first = next((op.attr("first", 0) for op in block.ops if op.does == "looks up" and op.inputs[1] == table), 0)
    return first if isinstance(first, int) else 0


def _counted_later(graph: Graph) -> dict[str, set[str]]:
    """Block -> its parameters that are a later block's too: a table is counted where it is used last, as the head's
    matrix where it is that."""
    last: dict[str, str] = {}
    for call in graph.calls:
        for tensor in graph.block(call.block).parameters:
            last[call.parameter_name(tensor.name)] = call.block
    found: dict[str, set[str]] = {call.block: set() for call in graph.calls}
    for call in graph.calls:
        for tensor in graph.block(call.block).parameters:
            if last[call.parameter_name(tensor.name)] != call.block:
                found[call.block].add(tensor.name)
    return found


def encoder_blocks(graph: Graph, serving: Serving) -> tuple[BlockShape, ...]:
    """Kinds of blocks of an encoder of images on one rank."""
    counts: dict[str, int] = {}
    for call in graph.calls:
        counts[call.block] = counts.get(call.block, 0) + call.repeat
    plain = replace(serving, weights="bf16")
    return tuple(_BlockWalk(graph.block(name), plain, count, (1, 1)).shape() for name, count in counts.items())


def adapter_bytes(shape: RankModel, serving: Serving) -> float:
    """Bytes of all adapters that are held on one rank, in 16 bits: rank · (rows + columns) of every matrix of the
    layers."""
    each = sum((p.n + p.k) * p.batch * b.count for b in shape.blocks if not b.is_head for p in b.matmuls)
    return float(serving.lora_slots * serving.lora_rank * each * 2)


Places = Literal["relative", "learned", "fixed"]
"""How an encoder with a decoder knows where a token stands: a bias on scores by distance (T5), a table that is trained
(BART), one that is not (Marian)."""


def places_of(graph: Graph) -> Places | None:
    """Returns the places of an encoder with a decoder; None for another model."""
    input_names = {tensor.name for tensor in graph.inputs}
    if not {"input_ids", "decoder_input_ids"} <= input_names:
        return None
    ops = [(block, op) for block in graph.blocks for op in block.ops]
    if any(op.does == "attends" and len(op.inputs) > 3 for _, op in ops):
        return "relative"
    looked_up = [block.tensor(op.inputs[0]).kind for block, op in ops if op.does == "looks up"]
    return "learned" if "state" in looked_up else "fixed"


def _split_encoder(graph: Graph, serving: Serving, blocks: tuple[BlockShape, ...]) -> tuple[BlockShape, ...]:
    """The encoder's blocks of them. InputError for what is not served so."""
    of_encoder = {b.name for b in graph.blocks if any(_is_read(b, name) for name in b.outputs)}
    if not of_encoder:
        return ()
    if places_of(graph) is None:
        raise InputError(
            f"{graph.name} has an encoder that reads no text (input_ids); --serve predicts what answers texts: "
            f"decoders (llama-3.1-8b), encoders (bert-base), and encoders with a decoder (t5-base)"
        )
    for name, is_set in (("pp", serving.pp > 1), ("lora_rank", serving.lora_rank), ("draft", serving.draft != "none"),
                       ("resident_bytes", serving.resident_bytes is not None)):  # fmt: skip
        if is_set:
            raise InputError(
                f"{graph.name} has an encoder beside its decoder, which is served whole and without {name}; leave it "
                f"out"
            )
    for block in blocks:
        if block.cross is not None and block.attention is not None:
            kv_elements, read = block.attention.kv_elements, block.cross.kv_elements
            if kv_elements != read:
                raise InputError(
                    f"{graph.name} keeps {kv_elements} elements of a token that it makes and {read} of one "
                    "that it reads; "
                    f"only models that keep as many of both are predicted"
                )
    return tuple(block for block in blocks if block.name in of_encoder)


class _Same:
    """A graph as a key: itself, not one that is equal, which would cost a comparison of all its ops."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def __hash__(self) -> int:
        return id(self.graph)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.graph is self.graph


def shape_of(graph: Graph, serving: Serving, multiples: tuple[int, ...] = (1, 1)) -> RankModel:
    """The shape of a model on one rank. multiples: `Engine.expert_multiples`.

    InputError for a model that makes no tokens one after another.
    """
    return _shape_of(_Same(graph), replace(serving, replicas=1, max_model_len=1), multiples)


@lru_cache(maxsize=1024)
def _shape_of(same: _Same, serving: Serving, multiples: tuple[int, ...]) -> RankModel:
    graph = same.graph
    counts: dict[str, int] = {}
    for call in graph.calls:
        counts[call.block] = counts.get(call.block, 0) + call.repeat
    later = _counted_later(graph)
    blocks = tuple(
        _BlockWalk(graph.block(name), serving, count, multiples, later[name]).shape() for name, count in counts.items()
    )
    encoder = _split_encoder(graph, serving, blocks)
    blocks = tuple(b for b in blocks if b not in encoder)
    cores = [b.attention for b in blocks if b.attention is not None]
    if not any(b.is_head and b.matmuls for b in blocks) or any(not core.causal for core in cores):
        raise InputError(
            f"{graph.name} makes no tokens one after another; --serve wants a decoder such as llama-3.1-8b"
        )
    if serving.ep > 1 and not any(b.experts for b in blocks):
        raise InputError(f"ep {serving.ep} deals out experts, and {graph.name} has none; leave it out")
    if serving.dp > 1 and not any(b.experts for b in blocks):
        raise InputError(
            f"dp {serving.dp} lets attention groups share experts, and {graph.name} has none; use replicas"
        )
    layers = sum(b.count for b in blocks if not b.is_head and not b.has_table)
    if serving.pp > layers:
        raise InputError(f"pp {serving.pp} is more than the {layers} layers of {graph.name}")
    hidden = max(b.hidden for b in blocks)
    head = next(b for b in blocks if b.is_head)
    positions = [
        a.size - _first_place(block, t.name)
        for block in graph.blocks
        for t in block.parameters
        for a in t.atoms
        if _base(a) in ("positions", "max_positions") and a.size
    ]
    return RankModel(
        blocks=blocks,
        encoder=encoder,
        hidden=hidden,
        vocab=max(p.n for p in head.matmuls),
        ffn=max((p.n for b in blocks if not b.is_head for p in b.matmuls), default=hidden),
        context=min(positions, default=None),
    )
