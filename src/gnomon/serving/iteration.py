"""Seconds of one iteration of an engine: the same op prices as training, for a batch of prompt pieces and decodes.

`IterationPrice` is made once for a model, layout, device and engine: it tabulates what depends on the number of tokens
only (products, experts, passes, sums over ranks), and keeps what decodes pay for each key as a number, so that many
iterations are summed at once. `program_s` is the same iteration op by op, without tables: what they are held against.
Times are whole ticks (2⁻⁵⁰ s), so that sums do not depend on how they are taken. Leaves out waits between ranks whose
batches differ, and clocks that fall under load beyond what the curves say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from gnomon.errors import InputError, UnpricedError
from gnomon.graph import BF16, Graph
from gnomon.hardware.types import Cluster, Device
from gnomon.ops.state_space import Scan
from gnomon.prices import gemm_seconds, stream_seconds
from gnomon.prices.attention import attention_seconds
from gnomon.prices.collectives import collective_seconds, p2p_seconds
from gnomon.prices.curves import Array, Curves, serving_curves
from gnomon.prices.decoding import (
    Ggml,
    assumptions,
    attention_row,
    experts_seconds,
    ggml_row,
    ggml_seconds,
    half_peak,
    kv_seconds_per_token,
    one_shot_seconds,
    touched_experts,
)
from gnomon.prices.dispatch import dispatch_seconds, holders
from gnomon.prices.links import AxisLink, axis_link
from gnomon.prices.state_space import scan_seconds
from gnomon.prices.stored import StoredPrices
from gnomon.serving.layout import Serving, kv_bits, weight_format
from gnomon.serving.scheduler import Batch, PromptPiece
from gnomon.serving.streaming import streamed
from gnomon.serving.weights import (
    BlockShape,
    RankAttention,
    RankExperts,
    RankModel,
    ServedMatmul,
    encoder_blocks,
    shape_of,
)
from gnomon.software.engine import Engine

TICKS_PER_S = 2**50
"""Ticks a second: the grid of the replay's time."""

SCAN_STEP_S, SCAN_STATE_SHARE = 6e-6, 0.8
"""Seconds of the kernels of a scan's layer in an iteration of decodes, and the part of the memory's peak at which
states are read and written: linear_attention_aiconfigurator.csv, causal_conv1d_update and
fused_recurrent_gated_delta_rule_packed_decode on H100 and B200, 2 to 128 requests, within 15 %; 2026-11-29."""

_PLAIN: Mapping[str, Any] = {"draft": "none", "draft_tokens": 0, "acceptance": 0.0, "dp": 1, "ep": 1}
"""Fields of `Serving` that a draft model's own serving has not."""

QUERY_BLOCK = 128
"""Queries of a block of attention kernels."""


def ticks(seconds: float) -> int:
    """Rounds seconds to the nearest point of the grid."""
    return round(seconds * TICKS_PER_S)


def _grid(most: int) -> Array:
    """Numbers of tokens that are tabulated: all to 64, then both sides of each edge of a tile of 32 rows, to 512, and
    of 64, up to `most`: between edges prices are lines."""
    edges = [*range(64, 512, 32), *range(512, most + 64, 64)]
    points = {*range(1, 65), *edges, *(edge + 1 for edge in edges)}
    return np.array(sorted(point for point in points if point < most) + [most], dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SideModels:
    """Other models that run with the one that is served."""

    draft: Graph | None
    """The small model that guesses, where `Serving.draft` is one."""
    vision: Graph | None
    """The encoder of one image that each prompt begins with; None: text alone."""
    image_tokens: int
    """Patches of that image, which are as many tokens of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPrice:
    """What decodes pay in the attention layers of one kind, on one device."""

    base_s: float
    """Seconds of all these layers, whoever decodes."""
    per_decode_s: float
    """Seconds more for each request that decodes."""
    per_key_s: float
    """Seconds more for each key."""
    window: int
    """Keys that a request attends to at most; 0: all."""


class IterationPrice:
    """Prices of the iterations of one engine on one layout. `share`: tokens of ranks of other dp groups are as many."""

    def __init__(
        self,
        graph: Graph,
        cluster: Cluster,
        serving: Serving,
        engine: Engine,
        side_models: SideModels | None = None,
        ggml: Ggml | None = None,
    ) -> None:
        """side_models: other models that run with it. ggml: rates of its matmuls, where the engine's are ggml's; None:
        those on record."""
        draft = side_models.draft if side_models is not None else None
        _check(graph, cluster, serving, engine)
        if (serving.draft == "model") != (draft is not None):
            raise InputError("a draft model is priced by its graph: give both or neither (--draft-model NAME)")
        self.engine, self.serving = engine, serving
        self.device: Device = cluster.devices[0]
        vulkan, is_ggml = engine.kernels == "ggml-vulkan", engine.kernels.startswith("ggml")
        self.ggml = (ggml or ggml_row(self.device, vulkan=vulkan)) if is_ggml else None
        self.stored = StoredPrices.of(self.device) if engine.kernels == "stored" else None
        self.curves: Curves = serving_curves(self.device)
        self.shape: RankModel = shape_of(graph, serving)
        if self.shape.encoder:
            self.stored = None  # what reads whole texts multiplies by oneDNN's matrices, the decoder beside it too
        self.assumed: tuple[str, ...] = (*self.curves.assumptions, *assumptions(self.device))
        tp, group = serving.tp, serving.tp * serving.dp
        self.tp_link = axis_link(cluster, np.arange(tp)[None]) if tp > 1 else None
        self.ep_link = axis_link(cluster, np.arange(group)[None]) if serving.dp > 1 else None
        self.pp_link = self._stages(cluster) if serving.pp > 1 else None
        self.kv_bits = kv_bits(serving.kv)
        self._matmul_prices: dict[tuple[ServedMatmul, int], float] = {}
        self.checked = 1 + serving.draft_tokens
        """Rows of a request that decodes: the last token and the guesses."""
        most = engine.max_batched_tokens + engine.max_seqs * self.checked
        self.grid = _grid(most)
        body, head = self._bodies(self.grid), self._head(self.grid)
        kernels = self._kernels()
        self.launch_floor_s = kernels * engine.launch_s
        self.read_s = self._read_s(cluster)
        """Seconds in which the disk gives the layers that are not in memory, which an iteration takes at least."""
        # Prices are piecewise linear in tokens between the grid's points, so a table for every number of tokens is
        # exact on the grid.
        self._body = self._dense(body, most)
        self._heads = self._dense(head, most)
        self.call_s = engine.attention_call_s if self.shape.encoder else 0.0
        self.keys: tuple[KeyPrice, ...] = tuple(self._keys(a, count) for a, count in self.shape.attentions)
        self.crossed: tuple[KeyPrice, ...] = tuple(self._keys(a, count) for a, count in self.shape.crossed)
        """Of attention to what an encoder read."""
        # what an iteration gives is shared by the tokens that it makes: all that decodes pay is of one token
        check_tokens = serving.tokens_a_check
        self._check_tokens = check_tokens
        scanning = sum(block.count for block in self.shape.blocks if block.scan is not None)
        self._draft: IterationPrice | None = None
        if draft is not None:
            self._draft = IterationPrice(draft, cluster, replace(serving, **_PLAIN), engine)
        guessed = self._draft.full_s * serving.draft_tokens if self._draft is not None else 0.0
        if serving.draft == "mtp":
            layers = sum(count for _, count in self.shape.attentions) or 1
            guessed = sum(key.per_key_s for key in self.keys) / layers * serving.draft_tokens
        self.full_s: float = sum(key.per_key_s for key in self.keys if not key.window)
        attending = (*self.keys, *self.crossed)
        self._base = ticks((sum(key.base_s for key in attending) + scanning * SCAN_STEP_S) / check_tokens)
        self._each = ticks((sum(key.per_decode_s for key in attending) + self._state_s()) / check_tokens)
        self._source = ticks(sum(key.per_key_s for key in self.crossed))
        self._crossing = ticks(sum(key.base_s + key.per_decode_s for key in self.crossed))
        self._full = ticks((self.full_s + guessed) / check_tokens)
        self._windows = tuple((key.window, ticks(key.per_key_s / check_tokens)) for key in self.keys if key.window)
        self._host, self._host_each = ticks(engine.host_step_s), ticks(engine.host_sequence_s)
        self._host_made, self._host_each_made = (
            ticks(engine.host_step_s / check_tokens),
            ticks(engine.host_sequence_s / check_tokens),
        )
        self._floor = ticks(self.launch_floor_s)
        self._floor_made = ticks(self.launch_floor_s / check_tokens)
        self._read, self._read_made = ticks(self.read_s), ticks(self.read_s / check_tokens)
        self._graph_most = max(engine.graph_sizes, default=0)
        self._decode_memo: dict[int, int] = {}
        self._piece_memo: dict[tuple[int, int], int] = {}
        self._piece_base = ticks(self.attention_s(1, 0)) if self.keys else 0
        has_scans = any(block.scan is not None for block in self.shape.blocks)
        scans = np.array([self.scan_s(int(tokens)) for tokens in self.grid]) if has_scans else None
        self._encoder = (
            ticks(self._encoder_s(side_models)) if side_models is not None and side_models.vision is not None else 0
        )
        self._scans = [] if scans is None else self._dense(scans, most)
        self._least_token: float | None = None
        self._source_rows: list[int] = []
        self._seen_memo: dict[int, int] = {}

    def limited(self, serving: Serving, engine: Engine) -> IterationPrice:
        """The same prices under other limits, none above these: `max_seqs`, `max_batched_tokens` and replicas may
        differ. Tables are shared."""
        assert engine.max_batched_tokens + engine.max_seqs * self.checked < len(self._body)
        limited_price = copy(self)
        limited_price.serving, limited_price.engine = serving, engine
        return limited_price

    def _read_s(self, cluster: Cluster) -> float:
        nbytes, _ = streamed(self.shape, self.serving)
        if not nbytes:
            return 0.0
        nodes = [group.node for group in cluster.groups]
        if any(node.disk_read_bytes_per_s is None for node in nodes):
            raise UnpricedError(
                f"the disk of {cluster.name} has no rate, and layers are read from it; gnomon calibrate measures this "
                f"machine's, a cluster file gives disk_read_bytes_per_s of the node"
            )
        # processes of a node share its disks
        readers = self.serving.tp * self.serving.pp * self.serving.dp * self.serving.replicas / cluster.num_nodes
        return nbytes * max(1.0, readers) / min(node.disk_read_bytes_per_s or 1.0 for node in nodes)

    def _encoder_s(self, side_models: SideModels) -> float:
        """Seconds of an image's way through the encoder, alone."""
        assert side_models.vision is not None
        blocks = encoder_blocks(side_models.vision, replace(self.serving, dp=1, ep=1, pp=1))
        at = np.array([float(side_models.image_tokens)])
        return float(self._rows_s(blocks, at)[0]) + self._seen_s(blocks, side_models.image_tokens)

    def _rows_s(self, blocks: Sequence[BlockShape], tokens: Array) -> Array:
        """Seconds of layers but for their attention, for so many rows."""
        return sum((self._block(b, tokens) * b.count for b in blocks), np.zeros_like(tokens))

    def _seen_s(self, blocks: Sequence[BlockShape], tokens: int) -> float:
        """Seconds of the attention of layers in which all tokens of a text see each other."""
        total = 0.0
        for block in blocks:
            if (a := block.attention) is not None:
                total += block.count * float(
                    attention_seconds(
                        1, tokens, tokens, a.heads, a.kv_heads, a.width, causal=False, device=self.device,
                        dtype=self._wide, curves=self.curves,
                    )
                )  # fmt: skip
                total += block.count * self.call_s
        return total

    @property
    def _wide(self) -> Literal["bf16", "fp16", "fp32"]:
        """What attention multiplies in."""
        peak = self.device.dense_peak
        return "bf16" if peak.bf16 else "fp16" if peak.fp16 else "fp32"

    def _source_rows_s(self, tokens: Array) -> Array:
        """Seconds of an encoder but for its attention, and of keys and values of all decoder layers, for so many tokens
        of all texts that are read together."""
        total = self._rows_s(self.shape.encoder, tokens)
        ops = sum(b.count * (len(b.matmuls) + b.pass_kernels) for b in self.shape.encoder)
        ops += sum(b.count * len(b.source_matmuls) for b in self.shape.blocks)
        total = total + self.engine.op_call_s * ops
        for block in self.shape.blocks:
            source_times = (self.matmul_s(p, tokens) for p in block.source_matmuls)
            total = total + sum(source_times, np.zeros_like(tokens)) * block.count
        return np.asarray(total)

    def sources_s(self, texts: Sequence[int]) -> float:
        """Seconds in which an encoder reads texts of so many tokens together, each seeing itself."""
        rows = float(self._source_rows_s(np.array([float(sum(texts))]))[0])
        return rows + sum(self._seen_s(self.shape.encoder, tokens) for tokens in texts)

    def sources_ticks(self, texts: Sequence[int]) -> int:
        """Ticks of `sources_s`, by tables."""
        if not self._source_rows:
            most = max(int(self.grid[-1]), self.serving.max_model_len)
            grid = self.grid if most == int(self.grid[-1]) else _grid(most)
            self._source_rows += self._dense(self._source_rows_s(grid), most, grid)
        known = self._seen_memo
        for tokens in texts:
            if tokens not in known:
                known[tokens] = ticks(self._seen_s(self.shape.encoder, tokens))
        return self._source_rows[sum(texts)] + sum(known[tokens] for tokens in texts)

    def _adapters_s(self, block: BlockShape, tokens: Array) -> Array:
        """Seconds of adapters of a layer: for each matrix one kernel to the rank and one back, each reading the weights
        of as many adapters as there are rows, at most all."""
        # At most one adapter a row, and no more than there are.
        used = np.minimum(tokens, self.serving.lora_slots)
        rank, total = self.serving.lora_rank, np.zeros_like(tokens)
        for p in block.matmuls:
            read = (used * rank + tokens) * (p.n + p.k) * p.batch * 2.0
            total = total + stream_seconds(read / 2, read / 2, self.device, self.curves, kernels=2, kind="reduce")
        return total

    def _stages(self, cluster: Cluster) -> AxisLink:
        step = self.serving.tp * self.serving.dp
        return axis_link(
            cluster, np.array([[stage * step, (stage + 1) * step] for stage in range(self.serving.pp - 1)])
        )

    def _dense(self, values: Array, most: int, grid: Array | None = None) -> list[int]:
        """Ticks for every number of tokens from 0, lines between the points of the grid."""
        at = np.arange(1, most + 1, dtype=np.float64)
        return [0, *(int(v) for v in np.rint(np.interp(at, self.grid if grid is None else grid, values) * TICKS_PER_S))]

    # -- what depends on tokens only

    def _bodies(self, tokens: Array) -> Array:
        """Seconds of all layers but attention's own, for so many new tokens on a rank."""
        total = np.zeros_like(tokens)
        for block in self.shape.blocks:
            if not block.is_head:
                total = total + self._block(block, tokens) * block.count
        if self.shape.encoder:
            total = total + self.engine.op_call_s * self._kernels()
        if self.pp_link is not None:
            sent = p2p_seconds(tokens * self.shape.hidden * 2, self.pp_link)
            # Activations pass every stage border once.
            total = total + sent * (self.serving.pp - 1)
        return total

    def _head(self, rows: Array) -> Array:
        """Seconds of the head for so many rows, its logits gathered."""
        total = np.zeros_like(rows)
        rounded = self.stored is not None and weight_format(self.serving.weights).bits < 16
        for block in self.shape.blocks:
            if block.is_head:  # of rounded layers, the engine keeps the head in eight bits
                own = tuple(replace(p, bits=min(p.bits, 8.0)) for p in block.matmuls) if rounded else block.matmuls
                total = total + self._block(replace(block, matmuls=own), rows)
        if self.tp_link is not None:
            total = total + collective_seconds(
                "all_gather", rows * self.shape.vocab * self.serving.tp * 2, self.tp_link
            )
        return total

    def _block(self, block: BlockShape, tokens: Array) -> Array:
        total = sum((self.matmul_s(p, tokens) for p in block.matmuls), np.zeros_like(tokens))
        if self.serving.lora_rank and not block.is_head:
            total = total + self._adapters_s(block, tokens)
        if block.pass_kernels and self.stored is not None:
            total = total + self.stored.pass_s(tokens * block.pass_bytes)
        elif block.pass_kernels and self.ggml is not None:
            rate = self.device.memory_bytes_per_s * self.ggml.memory_share
            total = total + block.pass_kernels * self.ggml.start_s + tokens * block.pass_bytes / rate
        elif block.pass_kernels:
            moved = tokens * block.pass_bytes
            total = total + stream_seconds(
                moved / 2, moved / 2, self.device, self.curves, kernels=block.pass_kernels, kind="reduce"
            )
        if block.has_table:
            moved = tokens * block.hidden * 2
            total = total + stream_seconds(moved, moved, self.device, self.curves, kind="gather")
        if block.experts is not None:
            total = total + self.experts_s(block.experts, tokens)
        if block.sums and self.tp_link is not None:
            total = total + block.sums * self._sum_s(tokens * block.hidden * 2)
        if block.dispatches and block.experts is not None:
            total = total + self._dispatch_s(block.experts, tokens)
        return np.asarray(total)

    def matmul_s(self, matmul: ServedMatmul, tokens: Array) -> Array:
        """Seconds of a product with weights as they are stored; wide where the device has no units for the format."""
        dtype, device = matmul.compute_dtype, self.device
        if self.stored is not None:
            elements = matmul.batch * matmul.n * matmul.k
            if (own := self.stored.linear_s(elements, matmul.bits, np.maximum(tokens, 1.0))) is not None:
                return own
        if self.ggml is not None:
            elements = matmul.batch * matmul.n * matmul.k
            moved = elements * matmul.bits / 8 + tokens * matmul.batch * (matmul.k + matmul.n) * 2
            return ggml_seconds(
                tokens, elements=elements, bits=matmul.bits, moved_bytes=moved, device=device, row=self.ggml
            )
        # Operand bits by format; the device may lack units for it and multiply wider (`_multiplied`).
        width = 8 if dtype in ("fp8", "int8") else 4 if dtype == "fp4" else 32 if dtype == "fp32" else 16
        dtype, width = _multiplied(device, dtype, width)
        # Weights as stored, rows as multiplied, results in 16 bits.
        moved = matmul.batch * (
            matmul.n * matmul.k * matmul.bits / 8 + tokens * matmul.k * max(width, 8) / 8 + tokens * matmul.n * 2
        )
        seconds = gemm_seconds(
            tokens,
            matmul.n,
            matmul.k,
            matmul.batch,
            dtype=dtype,
            device=device,
            curves=self.curves,
            moved_bytes=moved,
        )
        if matmul.compute_dtype in ("fp8", "int8", "fp4") and dtype != "bf16":  # rows are cast in a pass of their own
            seconds = seconds + stream_seconds(
                tokens * matmul.k * 2, tokens * matmul.k * width / 8, device, self.curves
            )
        return np.asarray(seconds)

    def experts_s(self, experts: RankExperts, tokens: Array) -> Array:
        """Seconds of the experts of the busiest device: all wait for it."""
        tokens = tokens * self.serving.expert_load
        if self.ggml is not None:
            rows = tokens * experts.topk * experts.local_share
            touched = touched_experts(tokens, experts.experts, experts.topk) * experts.local_share
            elements = touched * experts.elements
            return ggml_seconds(
                rows / touched,
                elements=elements,
                bits=experts.bits,
                moved_bytes=elements * experts.bits / 8 + rows * experts.row_elements * 2,
                device=self.device,
                row=self.ggml,
                experts=True,
            )
        dtype = {"fp8": "fp8", "fp4": "fp4", "int8": "int8"}.get(experts.compute_dtype, "bf16")
        dtype, _ = _multiplied(self.device, dtype, 8)
        peak = half_peak(self.device) if dtype == "bf16" else self.device.flops_per_s(dtype)
        return experts_seconds(tokens * self.serving.dp, experts, peak=peak, device=self.device)

    def _sum_s(self, nbytes: Array) -> Array:
        link = self.tp_link
        assert link is not None
        library = np.asarray(collective_seconds("all_reduce", nbytes, link))
        single = one_shot_seconds(nbytes, link) if self.engine.one_shot_reduce else None
        return library if single is None else np.minimum(library, single)

    def _dispatch_s(self, experts: RankExperts, tokens: Array) -> Array:
        """Rows to the ranks of their experts and back, narrow on the way out where the products are."""
        link = self.ep_link
        assert link is not None
        # Distinct ranks (and nodes) that a token's experts lie on, as a share of its experts.
        places = holders(link.ranks, experts.experts, experts.topk) / experts.topk
        nodes = holders(link.nodes, experts.experts, experts.topk) / experts.topk
        rows = tokens * experts.topk * experts.hidden
        out = 1 if experts.compute_dtype in ("fp8", "fp4", "int8") else 2
        return np.asarray(
            dispatch_seconds(rows * out, link, nodes=nodes, ranks=places)
            + dispatch_seconds(rows * 2, link, nodes=nodes, ranks=places)
        )

    def _kernels(self) -> int:
        """Kernels of an iteration, which the host launches one by one outside a graph."""
        return sum(
            b.count
            * (
                len(b.matmuls) + b.pass_kernels + 2 * (b.attention is not None) + (b.cross is not None)
                + 6 * (b.experts is not None) + b.sums
            )
            for b in self.shape.blocks
        )  # fmt: skip

    # -- decodes

    def _keys(self, attention: RankAttention, layers: int) -> KeyPrice:
        if self.stored is not None:
            kv_heads = attention.heads if attention.latent else attention.kv_heads
            width = (attention.width + attention.width_v) // 2
            query_s, key_s = self.stored.decode_s(attention.heads / kv_heads, width, kv_heads)
            return KeyPrice(
                base_s=0.0, per_decode_s=layers * query_s, per_key_s=layers * key_s, window=attention.window
            )
        row = attention_row(self.device, self.kv_bits)
        per_key = kv_seconds_per_token(
            row,
            bytes_per_token=attention.kv_elements * self.kv_bits / 8,
            flops_per_token=attention.flops_per_key * self.checked,
            device=self.device,
        )
        heads = 1 if attention.latent else attention.kv_heads
        return KeyPrice(
            base_s=layers * row.t0_s,
            per_decode_s=layers * (row.per_head_s * heads + self.call_s),
            per_key_s=layers * per_key,
            window=attention.window,
        )

    def _state_s(self) -> float:
        """Seconds of the states of scans for each request that decodes, read and written once, in 32 bits."""
        # Read and written once: 2 x 4 bytes an element.
        moved = self.shape.state_elements * 8
        return float(moved / (self.device.memory_bytes_per_s * SCAN_STATE_SHARE))

    def _fixed(self, decodes: int) -> int:
        """Ticks of an iteration of decodes alone, without keys and host."""
        known = self._decode_memo.get(decodes)
        if known is None:
            rows = min(self.engine.padded(decodes) * self.checked, len(self._body) - 1)
            # Divided by the tokens that an iteration makes: with guesses it counts for several.
            known = round((self._body[rows] + self._heads[rows] + self._guesses(decodes)) / self._check_tokens)
            known += self._base + self._each * decodes
            self._decode_memo[decodes] = known
        return known

    def _guesses(self, decodes: int) -> int:
        """Ticks of the guesses of an iteration, but for what they pay a key."""
        count = self.serving.draft_tokens
        if self._draft is not None:
            return self._draft._fixed(decodes) * count
        if self.serving.draft != "mtp":
            return 0
        layers = sum(block.count for block in self.shape.blocks if not block.is_head and not block.has_table)
        rows = min(self.engine.padded(decodes), len(self._body) - 1)
        # A guess by MTP is one more layer and the head: a layer's part of the body.
        one = self._body[rows] + ticks(sum(k.base_s + k.per_decode_s * decodes for k in self.keys))
        return (one // layers + self._heads[rows]) * count

    def least_decode_ticks(self, most: int) -> tuple[float, float]:
        """(device's, host's) ticks that no decode falls under in an iteration of at most so many: the least share of
        one, without its keys, padding and prompts."""
        device, host = math.inf, math.inf
        for decodes in range(1, most + 1):
            rows = decodes * self.checked
            least_ticks = (
                int((self._body[rows] + self._heads[rows]) / self._check_tokens) + self._base + self._each * decodes
            )
            device = min(device, least_ticks / decodes)
            host = min(host, (self._host_made + self._host_each_made * decodes) / decodes)
        return device, host

    def keys_ticks(self, decodes: int, prompt: int, last: int) -> int:
        """Ticks of the keys that the last `decodes` of a request's first `last` decodes see, after so long a prompt."""
        # Arithmetic series: the i-th decode sees prompt + i keys.
        first = prompt + last - decodes + 1
        seen = decodes * (first + prompt + last) // 2
        total = self._full * seen
        for window, price in self._windows:
            within = min(max(window - first, 0), decodes)  # of them, those that see fewer than the window
            total += price * (within * (2 * first + within - 1) // 2 + (decodes - within) * window)
        return total

    @property
    def source_key_ticks(self) -> int:
        """Ticks of one key of what an encoder read."""
        return self._source

    def least_token_ticks(self) -> float:
        """Ticks that no token of a prompt falls under, whatever it is computed with: its share of the layers without
        attention; 0 where an encoder reads prompts."""
        if self.shape.encoder:
            return 0.0
        if self._least_token is None:  # between points of the grid the price is a line, so the least share is at one
            self._least_token = min(self._body[int(n)] / int(n) for n in self.grid)
        return self._least_token

    def _floor_of(self, decodes: int) -> int:
        """Ticks that the host needs at least: its work of a step, and launches outside graphs."""
        host = self._host_made + self._host_each_made * decodes
        # Prepared meanwhile (host_overlap): the longer of host and device; otherwise the host comes on top.
        launches = max(self._read_made, 0 if decodes <= self._graph_most else self._floor_made)
        return max(host, launches) if self.engine.host_overlap else launches

    def _behind(self, decodes: int) -> int:
        """Ticks of the host that the device waits for."""
        return 0 if self.engine.host_overlap else self._host_made + self._host_each_made * decodes

    def decode_ticks(self, decodes: int, keys: int, count: int = 1, sources: int = 0) -> int:
        """Ticks of `count` iterations of so many decodes each; `keys` of the first, each next has `decodes` more;
        `sources`: keys of what an encoder read for them."""
        if count == 1:
            device = self._fixed(decodes) + self._full * keys + self._source * sources
            for window, price in self._windows:
                device += price * min(keys, decodes * window)
            floor = self._floor_of(decodes)
            return (device if device > floor else floor) + self._behind(decodes)
        # Between bends the price is a line in the number of the iteration: the sum is the mean of first and last times
        # the count, exact in ticks.
        total, done = 0, 0
        for stop in self._bends(decodes, keys, count, sources):
            first = self.decode_ticks(decodes, keys + done * decodes, 1, sources)
            last = self.decode_ticks(decodes, keys + (stop - 1) * decodes, 1, sources)
            total += (first + last) * (stop - done) // 2  # a line between whole ticks: the sum is exact
            done = stop
        return total

    def decodes_until(self, room: int, most: int, decodes: int, keys: int, sources: int = 0) -> int:
        """Iterations as `decode_ticks` has them, from 1 to `most`, of which the last is the first to end after `room`
        ticks or more; `most` where none does."""
        if most <= 1 or room <= 0:
            return min(most, 1)
        first = self.decode_ticks(decodes, keys, 1, sources)
        if first >= room:
            return 1
        # as if each took as much longer than the one before as the second does: right but for bends of the price
        added_ticks = self.decode_ticks(decodes, keys + decodes, 1, sources) - first
        half = first - added_ticks / 2
        # n iterations take n·first + added·n(n - 1)/2; `guess` is the n at which that is `room`.
        guess = (
            room / first if added_ticks <= 0 else (math.sqrt(half * half + 2 * added_ticks * room) - half) / added_ticks
        )
        high = min(most, math.ceil(guess))
        low = 0
        # Most often these are the two sides of the answer; only where a bend misleads the guess is it found by halving.
        for tried in (high, high - 1):
            if tried <= low:
                break
            if self.decode_ticks(decodes, keys, tried, sources) >= room:
                high = tried
            else:
                low = tried
        if low >= high:  # none of the first `high` ends so late
            high = most
            if low == most or self.decode_ticks(decodes, keys, most, sources) < room:
                return most
        while high - low > 1:
            middle = (low + high) // 2
            if self.decode_ticks(decodes, keys, middle, sources) >= room:
                high = middle
            else:
                low = middle
        return high

    def _bends(self, decodes: int, keys: int, count: int, sources: int) -> list[int]:
        """Iterations after which the price stops being a line: windows fill, the device takes over from the host."""
        stops = set()
        # keys + j·decodes reaches decodes·window: from there the windowed layers cost no more.
        for window, _ in self._windows:
            full = -(-(decodes * window - keys) // decodes)  # the first whose keys fill it
            stops |= {full, full + 1}
        floor = self._floor_of(decodes)
        low, high = 0, count
        edge = floor + self._behind(decodes)
        if self.decode_ticks(decodes, keys, 1, sources) > edge:
            high = 0
        elif self.decode_ticks(decodes, keys + (count - 1) * decodes, 1, sources) <= edge:
            low = count
        while low < high:  # the device's time rises with keys
            middle = (low + high) // 2
            if self.decode_ticks(decodes, keys + middle * decodes, 1, sources) > floor + self._behind(decodes):
                high = middle
            else:
                low = middle + 1
        stops |= {low, low + 1, count}
        return sorted(stop for stop in stops if 0 < stop <= count)

    # -- prompts

    def piece_ticks(self, new: int, prefix: int) -> int:
        """Ticks of the attention and scans of one piece of a prompt in all layers.

        Kernels take whole blocks of queries, and their time in a block goes with the keys that it sees: known at whole
        blocks and on a grid of prefixes, lines between. A last block that is not full sees fewer keys, as if the prefix
        were as much shorter."""
        # under a block its time goes with the queries that there are: known in eighths
        # Above a block of 128 queries time steps by block; below, by eighths of one.
        whole = QUERY_BLOCK if new > QUERY_BLOCK else QUERY_BLOCK // 8 if new > QUERY_BLOCK // 8 else 1
        blocks = -(-new // whole) * whole
        prefix -= (blocks - new) // 2
        if prefix < 0:
            # A piece whose prefix would be negative sees fewer keys than its block: interpolate towards the base price.
            known, base = self._known(blocks, 0), self._piece_base
            # The mean query of a block sees blocks/2 keys of its own; p = prefix < 0 of them are missing, which leaves
            # (blocks + 2p)/blocks.
            device = base + (max(known - base, 0) * (blocks + 2 * prefix)) // blocks
        else:
            low, high = _grid_around(prefix)
            device = self._known(blocks, low)
            if high > low:
                device += (self._known(blocks, high) - device) * (prefix - low) // (high - low)
        return device + (self._scans[new] if self._scans else 0)

    def _known(self, new: int, prefix: int) -> int:
        known = self._piece_memo.get((new, prefix))
        if known is None:
            known = self._piece_memo[new, prefix] = ticks(self.attention_s(new, prefix))
        return known

    def piece_s(self, new: int, prefix: int) -> float:
        """Seconds of the attention of `new` tokens after `prefix`, and of their scans, in all layers."""
        return self.attention_s(new, prefix) + self.scan_s(new)

    def attention_s(self, new: int, prefix: int) -> float:
        """Seconds of the attention of `new` tokens after `prefix`, in all layers."""
        total = 0.0
        for attention, layers in self.shape.attentions:
            if self.stored is not None:
                before = min(prefix, attention.window) if attention.window else prefix
                width = (attention.width + attention.width_v) // 2
                total += layers * self.stored.prompt_s(new, before, attention.heads, width)
                continue
            kv = prefix + new
            # Causal pairs: each of the new tokens sees the prefix and on average half of the new ones.
            pairs = new * (prefix + new / 2)
            # A window cuts that: a ramp until it is full, then `window` keys each.
            if attention.window and attention.window < kv:
                low = max(0, attention.window - prefix)
                ramp = min(low, new)
                pairs = ramp * (prefix + ramp / 2) + (new - ramp) * attention.window
            one = attention_seconds(
                1,
                new,
                kv,
                attention.heads,
                attention.kv_heads,
                attention.width,
                head_dim_v=attention.width_v,
                causal=True,
                pairs=max(pairs, 1.0),
                dtype=self._wide,
                device=self.device,
                curves=self.curves,
            )
            total += float(one) * layers / (self.ggml.attention_share if self.ggml is not None else 1.0)
            total += layers * self.call_s
            if attention.latent and prefix:  # keys of the prefix are made again from the latent ones
                again = ServedMatmul(
                    # latent - latent_v rotary elements of a key are kept as they are; the rest of the key and the value
                    # are made again.
                    n=attention.heads * (attention.width - attention.latent + attention.latent_v + attention.width_v),
                    k=attention.latent_v,
                    bits=16,
                    compute_dtype="bf16",
                )
                total += float(self.matmul_s(again, np.array([float(prefix)]))[0]) * layers
        return total

    def scan_s(self, new: int) -> float:
        """Seconds of the scans of `new` tokens, in all layers."""
        total = 0.0
        for block in self.shape.blocks:
            if block.scan is not None:
                op, where = block.scan
                scan = Scan.of(op, where, {**{a.name: a.size or 1 for a in where.dims}, "batch": 1, "seq": new})
                scan = replace(
                    scan,
                    # Groups that are fewer than ranks are on several of them, so a rank has one at least.
                    width=-(-scan.width // self.serving.tp),
                    heads=-(-scan.heads // self.serving.tp),
                    groups=max(1, scan.groups // self.serving.tp),
                )
                total += float(scan_seconds(scan, BF16, self.device, self.curves, backward=False)) * block.count
        return total

    def batch_ticks(self, batch: Batch) -> int:
        """Ticks of one iteration, prompts and decodes together."""
        if not batch.pieces:
            return self.decode_ticks(batch.decodes, batch.kv_tokens, 1, batch.sources)
        if self.checked > 1 and batch.decodes:
            # prompts whole, and of the checks beside them the part that one token pays
            prefill_only = Batch(batch.pieces, 0, 0, batch.preempted)
            return self.batch_ticks(prefill_only) + self.decode_ticks(batch.decodes, batch.kv_tokens)
        # tokens: rows of the layers. ends: rows of the head, which is computed for last tokens alone.
        tokens, ends, device = batch.decodes, batch.decodes, 0
        for piece in batch.pieces:
            tokens += piece.new
            ends += piece.last
            # An image stands at the beginning of its prompt, so it is read with the first piece.
            device += self.piece_ticks(piece.new, piece.prefix) + (0 if piece.prefix else self._encoder)
            if piece.source:
                device += (self._crossing + self._source * piece.source) * piece.new
        if self.shape.encoder and (texts := [piece.source for piece in batch.pieces if piece.source]):
            device += self.sources_ticks(texts)
        # Rows as they are: only batches of decodes alone are padded to the sizes of captured graphs (`_fixed`).
        device += self._body[tokens] + self._heads[ends]
        if batch.decodes:
            device += self._base + self._each * batch.decodes + self._full * batch.kv_tokens
            device += self._source * batch.sources
            for window, price in self._windows:
                device += price * min(batch.kv_tokens, batch.decodes * window)
        requests = batch.decodes + len(batch.pieces)
        host = self._host + self._host_each * requests
        launches = max(self._read, 0 if tokens <= self._graph_most else self._floor)
        if self.engine.host_overlap:
            return max(device, host, launches)
        return max(device, launches) + host

    def program_s(self, batch: Batch) -> float:
        """Seconds of an iteration op by op, without tables or a grid: what `batch_ticks` is held against."""
        if self.checked > 1:
            raise InputError("an iteration that checks guesses is priced by the token that it makes: use batch_ticks")
        tokens = batch.decodes + batch.new_tokens
        ends = batch.decodes + sum(piece.last for piece in batch.pieces)
        # Captured graphs exist for some sizes only; a batch with prompts is not padded to them.
        rows = self.engine.padded(tokens) if not batch.pieces else tokens
        heads = self.engine.padded(ends) if not batch.pieces else ends
        device = float(self._bodies(np.array([float(rows)]))[0])
        device += float(self._head(np.array([float(heads)]))[0]) if heads else 0.0
        device += sum(self.piece_s(piece.new, piece.prefix) for piece in batch.pieces)
        device += self._encoder / TICKS_PER_S * sum(not piece.prefix for piece in batch.pieces)
        for piece in batch.pieces:
            for key in self.crossed:
                device += (key.base_s + key.per_decode_s + key.per_key_s * piece.source) * piece.new
        if texts := [piece.source for piece in batch.pieces if piece.source]:
            device += self.sources_s(texts)
        if batch.decodes:
            for key in self.crossed:
                device += key.base_s + key.per_decode_s * batch.decodes + key.per_key_s * batch.sources
            for key in self.keys:
                keys = batch.kv_tokens if not key.window else min(batch.kv_tokens, batch.decodes * key.window)
                device += key.base_s + key.per_decode_s * batch.decodes + key.per_key_s * keys
            device += self._state_s() * batch.decodes
            device += SCAN_STEP_S * sum(block.count for block in self.shape.blocks if block.scan is not None)
        requests = batch.decodes + len(batch.pieces)
        host = self.engine.host_step_s + self.engine.host_sequence_s * requests
        launches = max(self.read_s, 0.0 if tokens <= self._graph_most else self.launch_floor_s)
        return max(device, host, launches) if self.engine.host_overlap else max(device, launches) + host


def _grid_around(value: int) -> tuple[int, int]:
    """The points of a grid with 16 points to a doubling, on either side."""
    # 16 points a doubling: the step is 1/16 of the power of two below.
    if value < 32:
        return value, value
    step = 1 << (value.bit_length() - 5)
    low = value // step * step
    return (low, low) if low == value else (low, low + step)


def _multiplied(device: Device, dtype: str, width: int) -> tuple[str, int]:
    """(dtype, bits of its operand) that matmuls really run in: the narrowest that the device has, from `dtype` up."""
    order: Sequence[tuple[str, int]] = {
        "fp4": (("fp4", 4), ("fp8", 8), ("bf16", 16), ("fp16", 16), ("fp32", 32)),
        "fp8": (("fp8", 8), ("bf16", 16), ("fp16", 16), ("fp32", 32)),
        "int8": (("int8", 8), ("bf16", 16), ("fp16", 16), ("fp32", 32)),
        "fp32": (("fp32", 32),),
    }.get(dtype, (("bf16", 16), ("fp16", 16), ("fp32", 32)))
    has: Callable[[str], bool] = lambda name: getattr(device.dense_peak, name) is not None  # noqa: E731
    return next((pair for pair in order if has(pair[0])), (dtype, width))


def _check(graph: Graph, cluster: Cluster, serving: Serving, engine: Engine) -> None:
    kinds = {device.kind for device in cluster.devices}
    if not kinds <= set(engine.devices):
        raise InputError(
            f"{engine.name} does not run on a {cluster.devices[0].kind} ({cluster.devices[0].name}); it runs on: "
            f"{', '.join(engine.devices)}"
        )
    if serving.devices > cluster.num_devices:
        raise InputError(
            f"tp {serving.tp} x pp {serving.pp} x dp {serving.dp} x replicas {serving.replicas} needs "
            f"{serving.devices} devices, and {cluster.name} has {cluster.num_devices}; lower an axis or name a larger "
            f"cluster"
        )
    if len({device.name for device in cluster.devices}) > 1:
        raise UnpricedError(f"{cluster.name} mixes devices; a replica is served on devices of one kind: name one")
    if graph.name == "":
        raise InputError("the model has no name")


def pieces_of(input_len: int, budget: int, *, is_read: bool = False) -> tuple[PromptPiece, ...]:
    """One prompt cut at the budget, as an engine alone with it computes it. is_read: an encoder reads it."""
    if is_read:
        return (PromptPiece(0, 0, 1, True, input_len),)
    return tuple(
        PromptPiece(0, start, min(budget, input_len - start), start + budget >= input_len)
        for start in range(0, input_len, budget)
    )
