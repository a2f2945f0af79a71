"""A decoder's Graph as an engine runs it: every op of every layer bound to its weights, on rows of many sequences.

`Decoder(graph, weights, …)` compiles the blocks once; `forward(rows)` returns the logits that are wanted. The Graph and
its kinds are those of training; what differs is that ops that look beyond a token (attention, rotary angles, scans)
read what earlier iterations left in pages and states. Linears that read the same tensor run as one product. Leaves out
gradients and models that are no decoders. What one rank of several holds, and which collectives stand between its ops,
says a `ModelShare` (`division`).
Shapes: activations are (1, tokens, …), with a torch dim for each dim of the Graph's tensor, products flattened.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gnomon.compiler.kernels import stored
from gnomon.compiler.kernels.stored import AnyPacked
from gnomon.errors import InputError, PlanError
from gnomon.graph import Block, Graph, Layer, Op
from gnomon.graph import Tensor as GraphTensor
from gnomon.runtime.module.crossings import reads, writes
from gnomon.runtime.module.moves import Move
from gnomon.runtime.module.moves import run as move
from gnomon.runtime.ops import check_runnable, function_of
from gnomon.runtime.ops.alibi import slopes_of
from gnomon.runtime.ops.attention import inverse_frequencies, shared_tables
from gnomon.runtime.ops.paged import seen_of
from gnomon.runtime.ops.places import places
from gnomon.runtime.ops.routing import Routing, routing_of
from gnomon.runtime.ops.site import Site
from gnomon.runtime.parameters.files import disk_folder
from gnomon.runtime.parameters.packed import Codes
from gnomon.serve.adapters import Adapter, Linear, added
from gnomon.serve.copies import ExpertCopies, PathRecorder
from gnomon.serve.division import ModelShare, Moves
from gnomon.serve.forward import ForwardProgram
from gnomon.serve.latent import Latent, LatentPages, latent_of, skipped
from gnomon.serve.matrices import Forms, Matrices, Part, Weights, matmul_by
from gnomon.serve.paged import Pages, Room
from gnomon.serve.rows import TokenRows, Turn
from gnomon.serve.scan import LayerScan
from gnomon.serve.sizes import Sizes
from gnomon.serve.streamed import Streams
from gnomon.serving.kv_blocks import KvBlocks
from gnomon.sharding.homes import routed_tensors

Run = Callable[..., Any]
"""(rows, *activations) -> what an op writes: a tensor, or several."""


@dataclass(frozen=True, slots=True)
class DecoderStep:
    """An op, or several that run as one."""

    run: Run
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    last: tuple[str, ...]
    """What no later step reads."""


class Decoder:
    """The layers of a model, bound to weights, with their pages and states."""

    def __init__(
        self,
        share: ModelShare,
        weights: Weights,
        sizes: Sizes,
        forms: Forms,
        adapters: Sequence[Adapter] = (),
        resident_bytes: int | None = None,
        expert_copies: int = 0,
    ) -> None:
        """Takes the share of a model without its loss (`graph.outputs.without_loss`), which `check_decoder` takes,
        resident_bytes of matrices of layers in memory, where others are read from a disk (`streamed`; None: all), and
        expert_copies, how many copies of other ranks' experts a layer has room for (`copies`)."""
        graph = share.graph
        check_runnable(graph)
        self.share, self.graph, self.dtype, self.sizes, self.forms = share, graph, forms.dtype, sizes, forms
        self.windows, self.adapters = sizes.windows, tuple(adapters)
        self.pages: list[Pages | LatentPages] = []
        self.scans: list[LayerScan] = []
        self._outputs = deque[Tensor]()
        self._weights, self._read = weights, dict[str, Tensor]()
        self.streams = None
        if resident_bytes is not None:
            layers = [_matrix_bytes(graph, layer, forms) for layer in graph.layers()]
            self.streams = Streams(resident_bytes, layers, _several_readers(graph), disk_folder())
        self._matrices = Matrices(weights, forms, self.streams)
        if self.streams is not None and not self._matrices.have_kernels():
            raise InputError("layers are read from a disk as kernels have them: fp32 or bf16, with a C++ compiler")
        self.routed = {layer.label: at for at, layer in enumerate(one for one in graph.layers() if _routes(graph, one))}
        """Layers with experts -> their numbers among these."""
        self.recorder: PathRecorder | None = None
        """Who is told what routers choose."""
        self.copies = None
        if expert_copies:
            experts = {_experts(graph.block(layer.call.block)) for layer in graph.layers() if _routes(graph, layer)}
            if len(experts) != 1 or len(self.routed) < 2 or share.ep.ranks == 1:
                raise InputError(
                    "copies of experts (--expert-copies) are of a stage with several layers of equally many experts, "
                    "dealt out over --expert-parallel-size above 1; leave them out"
                )
            self.copies = ExpertCopies(share, len(self.routed), experts.pop(), expert_copies, disk_folder())
        self._ends = {source.partition(".")[0] for source in graph.outputs} if share.is_last else set[str]()
        self._matrices_of_head = matrices_of_head(graph)
        self._shared = _several_readers(graph)
        self.layers: list[tuple[list[DecoderStep], dict[str, str], dict[str, str], bool]] = []
        self.program = ForwardProgram.of(share, self._matrices, self._pages, sizes, adapters)
        if self.program is None:
            self.pages.clear()
            for number, layer in enumerate(graph.layers()):
                if self.streams is not None:
                    self.streams.layer(number)
                block = graph.block(layer.call.block)
                steps = self._compiled(layer, block)
                self.layers.append((steps, reads(layer), writes(graph, layer), layer.call.name in self._ends))
                if self.streams is not None:
                    weights.let_go()
        self.why = tuple(self._matrices.why())
        """Which kernels multiply by sparse matrices, and why, in lines."""
        del self._weights, self._matrices  # and the files that they were read from
        if self.streams is not None:
            self.streams.start()
        if self.copies is not None:
            self.copies.start()
        # Later layers overwrite earlier ones here, so that each name is left with the last layer that reads it.
        # `_values` lets a value go there.
        last = {name: index for index, (_, read, _, _) in enumerate(self.layers) for name in read.values()}
        outputs = {*graph.outputs}
        self.unread = [
            [name for name, at in last.items() if at == index and name not in outputs]
            for index in range(len(self.layers))
        ]

    @property
    def ranks(self) -> int:
        """Processes that compute an iteration together."""
        return self.share.ways.ranks

    @property
    def vocab_size(self) -> int:
        """Tokens that logits are about."""
        return self.share.vocab_size

    def adapter(self, name: str) -> int:
        """Its number, -1 for the model as it is (no name). InputError for one that it has not."""
        names = [adapter.name for adapter in self.adapters]
        if name and name not in names:
            raise InputError(f"there is no adapter {name!r}; there are {', '.join(names) or 'none'}")
        return names.index(name) if name else -1

    def blocks(self, *, prefix_cache: bool) -> KvBlocks:
        """Whose the pages are: nobody's yet."""
        sizes = self.sizes
        return KvBlocks(
            sizes.blocks,
            sizes.block_tokens,
            windows=self.windows,
            window_blocks=[sizes.window_blocks(window) for window in self.windows],
            slots=sizes.max_seqs if sizes.scans else 0,
            snapshots=sizes.snapshots,
            prefix_cache=prefix_cache,
        )

    @torch.inference_mode()
    def forward(self, rows: TokenRows) -> Tensor:
        """Returns (wanted, vocabulary): logits after the wanted tokens."""
        [logits] = self.outputs(rows, ())
        return logits

    @torch.inference_mode()
    def outputs(self, rows: TokenRows, entering: Sequence[Tensor]) -> list[Tensor]:
        """What its layers make: logits (wanted, vocabulary), or what later stages read. entering: what they read of
        earlier stages, as the graph's inputs list it."""
        if self.program is not None:
            values_out = [self.program.run(rows, *entering)]
        else:
            values = self._values(rows, entering)
            values_out = [values[name] for name in self.graph.outputs]
            if self.share.is_last:
                values_out = [values_out[0][0]]
        return [move(values_out[0], self.share.end)] if self.share.is_last and self.share.end else values_out

    @property
    def entering(self) -> list[GraphTensor]:
        """What its layers read of earlier stages."""
        return [tensor for tensor in self.graph.inputs if tensor.name != "input_ids"]

    def empty(self, tensor: GraphTensor, tokens: int) -> Tensor:
        """Room for one of them."""
        return torch.empty((1, tokens, *[math.prod(a.size or 1 for a in d.atoms) for d in tensor.dims[2:]]),
                           dtype=self.dtype if tensor.is_float else torch.int64)  # fmt: skip

    def _values(self, rows: TokenRows, entering: Sequence[Tensor]) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {"input_ids": rows.ids.unsqueeze(0)}
        values |= {tensor.name: x for tensor, x in zip(self.entering, entering, strict=True)}
        for index, (steps, read, written, ends) in enumerate(self.layers):
            # From here on `own` has the only reference to what no later layer reads: a step can free it as soon as it
            # has run.
            own = {name: values[source] for name, source in read.items()}
            # The last layer works token by token. Tokens whose logits nobody wants are dropped before its matmul over
            # the whole vocabulary.
            if ends and not rows.all_wanted:
                own = {name: x.index_select(1, rows.logit_rows) for name, x in own.items()}
            for name in self.unread[index]:
                values.pop(name, None)
            if self.streams is not None:
                self.streams.take(index)
            for step in steps:
                out = step.run(rows, *[own[name] for name in step.reads])
                for name in step.last:
                    del own[name]
                if len(step.writes) == 1:
                    own[step.writes[0]] = out
                else:
                    own.update(zip(step.writes, out, strict=True))
            if self.streams is not None:
                self.streams.release(index)
            for name, full in written.items():
                values[full] = own[name]
        return values

    def start(self, turn: Turn) -> None:
        """Runs an iteration, whose logits `logits` hands out."""
        self.copy(turn)
        self._outputs.append(self.forward(turn.rows()))

    def logits(self) -> Tensor:
        """(wanted, vocabulary) of the iteration that began first."""
        return self._outputs.popleft()

    def copy(self, turn: Turn) -> None:
        """What an iteration wants copied first: blocks of the layers that see all tokens, states of scans."""
        for source, target in turn.copies:
            for pages in self.pages:
                if pages.group == 0:
                    pages.copy(source, target)
        for source, target in turn.states:
            for scan in self.scans:
                scan.copy(source, target)

    # --- compiling

    def _compiled(self, layer: Layer, block: Block) -> list[DecoderStep]:
        steps: list[DecoderStep] = []
        done = set(skipped(block))
        for op in block.ops:
            if op.path in done or op.does == "measures distance":
                continue
            if op.does == "attends" and (found := latent_of(block, op)) is not None:
                steps.append(self._latent(layer, block, op, found))
                continue
            together = self._together(block, op)
            done |= {one.path for one in together}
            run_op = self._joined(layer, block, together) if len(together) > 1 else self._op(layer, block, op)
            inputs = tuple(name for name in op.inputs if block.tensor(name).is_activation)
            if op.does == "attends":
                inputs = op.inputs[:3]
            run_op = self._moving(block, together, inputs, run_op)
            steps.append(DecoderStep(run_op, inputs, tuple(out for one in together for out in one.outputs), ()))
        # From the end backwards, the first step that is met to read a name is the last one that runs with it, and lets
        # it go. Outputs of the block outlive all its steps.
        seen, freeing_steps = set(block.outputs), []
        for step in reversed(steps):
            gone = tuple(dict.fromkeys(name for name in step.reads if name not in seen))
            seen |= set(gone)
            freeing_steps.append(DecoderStep(step.run, step.reads, step.writes, gone))
        return freeing_steps[::-1]

    def _moving(self, block: Block, ops: Sequence[Op], inputs: Sequence[str], run: Run) -> Run:
        """Wraps a run with the collectives before and after it."""
        around = [moves for op in ops if (moves := self.share.around(block, op)) is not None]
        if not around:
            return run
        # Linears that run as one read the same tensor in the same layout (`_together` compares it), so the first one's
        # collectives are those of all.
        there = [next((m.there[name] for m in around if name in m.there), ()) for name in inputs]
        leave = [next((m.leave[name] for m in around if name in m.leave), ()) for op in ops for name in op.outputs]
        return partial(_moved, run, there, leave)

    def _together(self, block: Block, op: Op) -> list[Op]:
        """Linears that read what this one reads, from it on."""
        if not op.is_dense_linear or op.attr("factor", 1.0) != 1.0:
            return [op]
        alike = [
            other
            for other in block.ops[block.ops.index(op) :]
            if other.is_dense_linear and other.inputs[0] == op.inputs[0] and other.attr("factor", 1.0) == 1.0
            and other.contracts == op.contracts and self._there(block, other) == self._there(block, op)
        ]  # fmt: skip
        return alike if len(alike) > 1 else [op]

    def _there(self, block: Block, op: Op) -> tuple[Move, ...]:
        moves: Moves | None = self.share.around(block, op)
        return () if moves is None else moves.there.get(op.inputs[0], ())

    def _has_bias(self, block: Block, op: Op) -> bool:
        """Whether this rank adds it: of what ranks add up one does."""
        return len(op.inputs) > 2 and not (self.share.tp.index and self.share.sums(block, op))

    def _parts(self, layer: Layer, block: Block, op: Op) -> list[Part]:
        """A linear's matrix (outputs, inputs): numbers, or what the folder has packed."""
        if codes := self._weights.codes(layer.call.parameter_name(op.inputs[1], layer.index)):
            return [*codes]
        site = Site(op=op, block=block)
        weight, rows = self._raw_weight(layer, block, op.inputs[1], packed=True), site.weight_rows
        if site.inner_first:
            return [weight.reshape(math.prod(weight.shape[:rows]), -1).T]
        return [weight.reshape(math.prod(weight.shape[:rows]), -1)]

    def _joint_matmul(self, layer: Layer, block: Block, ops: Sequence[Op]) -> Callable[[Tensor], Tensor]:
        """Makes the matmul of linears that read the same rows, side by side."""
        name = " ".join(layer.call.parameter_name(op.inputs[1], layer.index) for op in ops)
        bias = None
        if any(self._has_bias(block, op) for op in ops):
            bias = torch.cat([
                self._weight(layer, block, op.inputs[2]).flatten()
                if self._has_bias(block, op)
                else torch.zeros(math.prod(matrix_dims(block, op)[0]), dtype=self.dtype)
                for op in ops
            ])  # fmt: skip

        def parts() -> list[Part]:
            return [part for op in ops for part in self._parts(layer, block, op)]

        return matmul_by(self._matrix_of(name, parts, head=layer.call.name in self._ends), bias)

    def _matrix_of(self, name: str, parts: Callable[[], list[Part]], *, head: bool = False) -> AnyPacked | Tensor:
        """Packed where this machine has kernels."""
        if self._matrices.have_kernels():
            return self._matrices.packed(name, parts, head=head)
        whole = [(part.widened() if isinstance(part, Codes) else part).to(self.dtype) for part in parts()]
        return torch.cat(whole)  # of one too: it may lie in a file

    def _joined(self, layer: Layer, block: Block, ops: Sequence[Op]) -> Run:
        outs = [matrix_dims(block, op)[0] for op in ops]
        widths, inner = [math.prod(out) for out in outs], matrix_dims(block, ops[0])[1]
        matmul = self._joint_matmul(layer, block, ops)
        names = [layer.call.parameter_name(op.inputs[1], layer.index) for op in ops]
        if not any(name in adapter.low for name in names for adapter in self.adapters):
            return partial(_several, matmul, widths, outs, inner)

        def run(rows: TokenRows, x: Tensor) -> list[Tensor]:
            outputs, flat = _several(matmul, widths, outs, inner, rows, x), _flat(x, inner)
            return [self._adapted(name, rows, flat, one) for name, one in zip(names, outputs, strict=True)]

        return run

    def _adapted(self, parameter: str, rows: TokenRows, x: Tensor, y: Tensor) -> Tensor:
        """What a linear wrote, with what adapters add to it."""
        low_rank = added(self.adapters, parameter, rows.adapters, x)
        return y if low_rank is None else y + low_rank.view(y.shape)

    def _op(self, layer: Layer, block: Block, op: Op) -> Run:
        match op.does:
            case "multiplies":
                out, inner = matrix_dims(block, op)
                one = partial(
                    _one, self._joint_matmul(layer, block, [op]), out, inner, float(_number(op, "factor", 1.0))
                )
                name = layer.call.parameter_name(op.inputs[1], layer.index)
                if not any(name in adapter.low for adapter in self.adapters):
                    return one
                return lambda rows, x: self._adapted(name, rows, _flat(x, inner), one(rows, x))
            case "attends":
                return self._attention(layer, block, op)
            case "rotates":
                return partial(_rotary, op, int(block.tensor(op.inputs[0]).dims[-1].size or 0))
            case "normalises":
                return self._norm(layer, block, op)
            case "scans":
                return self._scan(layer, block, op)
            case "looks up":
                return self._lookup(layer, block, op)
            case "dispatches":
                experts = _experts(block)
                here = experts // self.share.ep.ranks
                first = self.share.ep.index * here
                return partial(self._dispatch, self.routed[layer.label], partial(_dispatch, experts, first, here))
            case "multiplies rows":
                return self._rows(layer, block, op)
            case "combines":
                return _combine
            case _:
                return self._plain(layer, block, op)

    def _plain(self, layer: Layer, block: Block, op: Op) -> Run:
        """An op that does not look beyond a token, by its own torch function."""
        site, function = Site(op=op, block=block), function_of(op.kind)
        weights = {n: self._weight(layer, block, n) for n in op.inputs if not block.tensor(n).is_activation}
        if not weights:
            return lambda rows, *inputs: function(site, *inputs)

        def run(rows: TokenRows, *inputs: Tensor) -> Any:
            own = iter(inputs)
            return function(site, *(weights[name] if name in weights else next(own) for name in op.inputs))

        return run

    def _norm(self, layer: Layer, block: Block, op: Op) -> Run:
        fn = op.attr("fn", "rms")
        if fn not in ("rms", "layer"):
            raise PlanError(f"{op.path}: the engine norms by rms or layer, not by {fn!r}")
        weights = {name.rpartition(".")[2]: self._weight(layer, block, name) for name in op.inputs[1:]}
        weight, bias = weights.get("weight"), weights.get("bias")
        eps, offset = float(_number(op, "eps", 1e-5)), float(_number(op, "offset", 0.0))
        if fn == "layer" and not offset and (weight is None or weight.dim() == 1):
            return lambda rows, x: functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
        return partial(_norm, fn == "layer", weight, bias, eps, offset)

    def _attention(self, layer: Layer, block: Block, op: Op) -> Run:
        pages = self._pages(layer, block, op)
        return lambda rows, q, k, v: pages.attend(rows, q[0], k[0], v[0]).unsqueeze(0)

    def _pages(self, layer: Layer, block: Block, op: Op) -> Pages:
        q, k, v = (block.tensor(name) for name in op.inputs[:3])
        k_dim, v_dim = (int(t.dims[-1].size or 0) for t in (k, v))
        heads, kv_heads = (math.prod(a.size or 1 for a in t.dims[-2].atoms) for t in (q, k))
        slopes = sinks = None
        if len(op.inputs) > 3:
            maker = next((other for other in block.ops if op.inputs[3] in other.outputs), None)
            if op.attr("sinks", False):
                sinks = self._weight(layer, block, op.inputs[3])
            elif maker is not None and maker.does == "measures distance":
                slopes = self._slopes(heads)
        seen = seen_of(Site(op=op, block=block), k_dim, slopes=slopes, sinks=sinks)
        sizes, window = self.sizes, seen.window
        room = Room(
            blocks=sizes.lanes * (sizes.window_blocks(window) if window else sizes.blocks),
            size=sizes.block_tokens,
            kv_heads=kv_heads,
            k_dim=k_dim,
            v_dim=v_dim,
            dtype=self.dtype,
            group=self.windows.index(window) + 1 if window else 0,
        )
        layer_pages = Pages(room, seen)
        self.pages.append(layer_pages)
        return layer_pages

    def _latent(self, layer: Layer, block: Block, op: Op, found: Latent) -> DecoderStep:
        """Attention, with the up-projection of its keys and values and what joins them."""
        dims = {dim.atoms[0].name: at for at, dim in enumerate(block.tensor(found.up.inputs[1]).dims)}
        [rank] = found.up.contracts
        wide = next(name for name in dims if name not in ("heads", rank))
        weight = self._weight(layer, block, found.up.inputs[1]).permute(dims["heads"], dims[wide], dims[rank])
        nope, rope = (int(block.tensor(name).dims[-1].size or 0) for name in found.join.inputs)
        seen = seen_of(Site(op=op, block=block), nope + rope)
        pages = LatentPages(self.sizes.lanes * self.sizes.blocks, self.sizes.block_tokens, weight, (nope, rope), seen)
        name = layer.call.parameter_name(found.up.inputs[1], layer.index)
        for number, adapter in enumerate(self.adapters):
            if name in adapter.low:
                pages.adapt(number, adapter.low[name])
        self.pages.append(pages)
        reads = (op.inputs[0], *found.reads)
        around = [moves for one in (op, found.up, found.join) if (moves := self.share.around(block, one)) is not None]
        there = [next((m.there[name] for m in around if name in m.there), ()) for name in reads]
        own = self.share.around(block, op)
        leave = [() if own is None else own.leave.get(op.outputs[0], ())]

        def run(rows: TokenRows, q: Tensor, latent: Tensor, rotated: Tensor) -> Tensor:
            return pages.attend(rows, q[0], latent[0], rotated[0]).unsqueeze(0)

        return DecoderStep(partial(_moved, run, there, leave), reads, op.outputs, ())

    def _slopes(self, heads: int) -> Tensor:
        """Returns the slopes of this rank's heads."""
        tp = self.share.tp
        # A head's slope depends on how many heads the whole model has: this rank's are a slice of all.
        every = torch.tensor(slopes_of(heads * tp.ranks), dtype=torch.float32)
        return every[heads * tp.index : heads * (tp.index + 1)].contiguous()

    def _scan(self, layer: Layer, block: Block, op: Op) -> Run:
        weights = {name.rpartition(".")[2]: self._weight(layer, block, name) for name in op.inputs[1:]}
        steps = float(_number(op, "step_min", 0.0)), float(_number(op, "step_max", math.inf))
        scan = LayerScan(weights, int(_number(op, "chunk", 128)), steps, self.sizes.lanes * self.sizes.slots)
        self.scans.append(scan)
        return scan.run

    def _lookup(self, layer: Layer, block: Block, op: Op) -> Run:
        name = layer.call.parameter_name(op.inputs[1], layer.index)
        if block.tensor(op.inputs[0]).is_activation:
            if self.share.sums(block, op):
                return partial(_own_rows, self._weight(layer, block, op.inputs[1]), self.share.tp.index)
            if name in self._matrices_of_head and self._matrices.have_kernels():
                table_weight = self._raw_weight(layer, block, op.inputs[1], packed=True)
                packed = self._matrices.packed(name, lambda: [table_weight.flatten(1)], head=True)
                return lambda rows, ids: stored.rows_of(packed, ids[0]).to(self.dtype).unsqueeze(0)
            table = self._weight(layer, block, op.inputs[1])
            return lambda rows, ids: functional.embedding(ids, table)
        place, table = op.inputs[0], self._weight(layer, block, op.inputs[1])
        return lambda rows: functional.embedding(places(block, place, rows.positions), table).unsqueeze(0)

    def _rows(self, layer: Layer, block: Block, op: Op) -> Run:
        """Experts' matrices, each for itself."""
        name = layer.call.parameter_name(op.inputs[1], layer.index)
        bias = list(self._weight(layer, block, op.inputs[2])) if len(op.inputs) > 2 else None
        if self.share.etp.index and any(
            other.does == "combines" and op.outputs[0] in other.inputs and self.share.sums(block, other)
            for other in block.ops
        ):
            bias = None  # of what an expert makes, which its ranks add up, one rank adds it
        inner_first = block.tensor(op.inputs[1]).dims[1].atoms[0].name in op.contracts
        parts: list[Part] = [*self._weights.codes(name)]
        if len(parts) != (block.tensor(op.inputs[1]).dims[0].size or 0) // self.share.ep.ranks:
            weight = self._raw_weight(layer, block, op.inputs[1], packed=True)
            parts = [*(weight.transpose(1, 2) if inner_first else weight)]
        matrices = [self._matrix_of(f"{name}.{index}", lambda part=part: [part]) for index, part in enumerate(parts)]  # type: ignore[misc]
        matmuls = [matmul_by(matrix, None if bias is None else bias[index]) for index, matrix in enumerate(matrices)]
        if self.copies is None:
            return partial(_grouped, matmuls)
        number = self.routed[layer.label]
        place = len(self.copies.kept[number])
        self.copies.keep(number, matrices, bias)
        return partial(_grouped_with_copies, matmuls, self.copies, place)

    def _dispatch(self, number: int, own: Run, rows: TokenRows, x: Tensor, indices: Tensor) -> Tensor:
        """Rows of what this rank computes of a layer. number: of the layer among those with experts."""
        if self.recorder is not None:
            self.recorder.note(number, indices)
        if self.copies is None:
            made: Tensor = own(rows, x, indices)
            return made
        return self.copies.dispatch(number, rows, x, indices)

    def _weight(self, layer: Layer, block: Block, name: str) -> Tensor:
        """A parameter with one torch dim for each dim of the Graph's tensor, as it is computed with."""
        return self._raw_weight(layer, block, name).to(self.dtype)

    def _raw_weight(self, layer: Layer, block: Block, name: str, *, packed: bool = False) -> Tensor:
        """The same, in its file's dtype. packed: it is copied at once, so that it may be the file's own memory."""
        full = layer.call.parameter_name(name, layer.index)
        shape = [math.prod(atom.size or 1 for atom in dim.atoms) for dim in block.tensor(name).dims]
        if self.share.ep.ranks > 1 and name in routed_tensors(block):
            shape[0] //= self.share.ep.ranks
        if full not in self._shared:
            return (self._weights.mapped(full) if packed else self._weights[full]).view(shape)
        if full not in self._read:
            self._read[full] = self._weights[full].to(self.dtype)
        return self._read[full].view(shape)


def _experts(block: Block) -> int:
    """Experts that a block's tokens are sent to."""
    op = next(op for op in block.ops if op.does == "dispatches")
    return next(d.size for t in block.tensors for d in t.atoms if d.name == op.attr("experts", "")) or 0


def _routes(graph: Graph, layer: Layer) -> bool:
    """Whether a layer sends tokens to experts."""
    return graph.block(layer.call.block).does("dispatches")


def _matrix_bytes(graph: Graph, layer: Layer, forms: Forms) -> int:
    """Estimates the bytes that a layer multiplies by; 0 for one before or after the layers that are alike, which
    stays."""
    if layer.call.first is None:
        return 0
    block = graph.block(layer.call.block)
    names = {op.inputs[1] for op in block.ops if op.does in ("multiplies", "multiplies rows")}
    elements = sum(math.prod(a.size or 1 for a in block.tensor(name).atoms) for name in names)
    return int(elements * forms.bits / 8)


def check_decoder(graph: Graph) -> None:
    """PlanError for a model that does not go on from its own tokens."""
    names = [tensor.name for tensor in graph.inputs]
    causal = all(op.attr("causal", False) for b in graph.blocks for op in b.ops if op.does == "attends")
    if names != ["input_ids"] or not causal:
        why = f"it reads {', '.join(names)}" if names != ["input_ids"] else "its tokens see those after them"
        raise PlanError(f"{graph.name} is no decoder ({why}); words are generated by decoders, which read input_ids")
    if any(op.captured is not None for block in graph.blocks for op in block.ops):
        raise PlanError(f"{graph.name} was captured, and the engine runs the models that Gnomon has; give a folder")


def matrices_of_head(graph: Graph) -> frozenset[str]:
    """Parameters that the layer before the logits multiplies by; a table of embeddings may be one."""
    ends = {source.partition(".")[0] for source in graph.outputs}
    return frozenset(
        layer.call.parameter_name(op.inputs[1], layer.index)
        for layer in graph.layers()
        if layer.call.name in ends
        for op in graph.block(layer.call.block).ops
        if op.is_dense_linear
    )


def linears_of(graph: Graph) -> list[Linear]:
    """Lists linears of the layers before the logits, those that may have adapters: not multiplied by a factor of their
    own."""
    ends = {source.partition(".")[0] for source in graph.outputs}
    return [
        Linear(
            parameter=layer.call.parameter_name(op.inputs[1], layer.index),
            shape=(math.prod(matrix_dims(block, op)[0]), _inputs(block, op)),
            inner_first=Site(op=op, block=block).inner_first,
        )
        for layer in graph.layers()
        if layer.call.name not in ends
        for block in [graph.block(layer.call.block)]
        for op in block.ops
        if op.is_dense_linear and op.attr("factor", 1.0) == 1.0
    ]


def _inputs(block: Block, op: Op) -> int:
    """Elements that a linear sums over."""
    return math.prod(a.size or 1 for a in block.tensor(op.inputs[1]).atoms if a.name in op.contracts)


def _several_readers(graph: Graph) -> frozenset[str]:
    """Parameters that several layers read, which are held once."""
    names = [
        layer.call.parameter_name(tensor.name, layer.index)
        for layer in graph.layers()
        for tensor in graph.block(layer.call.block).parameters
    ]
    return frozenset(name for name, count in Counter(names).items() if count > 1)


def windows_of(graph: Graph) -> tuple[int, ...]:
    """Sliding windows of its attention, rising, without those that see all tokens."""
    found = {int(_number(op, "window", 0)) for block in graph.blocks for op in block.ops if op.does == "attends"}
    return tuple(sorted(found - {0}))


def matrix_dims(block: Block, op: Op) -> tuple[tuple[int, ...], int]:
    """Returns for a linear the sizes of the output's dims that its weight makes, and how many of the input's are
    contracted."""
    site, weight = Site(op=op, block=block), block.tensor(op.inputs[1])
    sizes = tuple(math.prod(atom.size or 1 for atom in dim.atoms) for dim in weight.dims)
    rows = site.weight_rows
    return (sizes[rows:], rows) if site.inner_first else (sizes[:rows], len(sizes) - rows)


def _number(op: Op, name: str, default: float) -> float:
    value = op.attr(name, default)
    assert isinstance(value, int | float)
    return value


# --- what ops run


def _moved(
    run: Run, there: Sequence[tuple[Move, ...]], leave: Sequence[tuple[Move, ...]], rows: TokenRows, *inputs: Tensor
) -> Any:
    out = run(rows, *[move(x, moves) for x, moves in zip(inputs, there, strict=True)])
    if isinstance(out, Tensor):
        return move(out, leave[0])
    return [move(x, moves) for x, moves in zip(out, leave, strict=True)]


def _own_rows(table: Tensor, index: int, rows: TokenRows, ids: Tensor) -> Tensor:
    """Looks up rows of a table that ranks divide: zeros for what others have."""
    # Ids whose rows other ranks have are clamped to a row that is here, so that the lookup stays within the table. The
    # mask zeroes what it reads, and the sum over ranks leaves the one row that counts.
    local = ids - index * len(table)
    mine = (local >= 0) & (local < len(table))
    return functional.embedding(local.clamp(0, len(table) - 1), table) * mine.unsqueeze(-1)


def _flat(x: Tensor, inner: int) -> Tensor:
    return x.flatten(-inner) if inner > 1 else x


def _several(
    matmul: Callable[[Tensor], Tensor],
    widths: Sequence[int],
    outs: Sequence[tuple[int, ...]],
    inner: int,
    rows: TokenRows,
    x: Tensor,
) -> list[Tensor]:
    outputs = matmul(_flat(x, inner)).split(list(widths), dim=-1)
    return [part.unflatten(-1, out) if len(out) > 1 else part for part, out in zip(outputs, outs, strict=True)]


def _one(
    matmul: Callable[[Tensor], Tensor], out: tuple[int, ...], inner: int, factor: float, rows: TokenRows, x: Tensor
) -> Tensor:
    y = matmul(_flat(x, inner))
    if factor != 1.0:
        y = y * factor
    return y.unflatten(-1, out) if len(out) > 1 else y


def _norm(
    center: bool, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, rows: TokenRows, x: Tensor
) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if center:
        wide = wide - wide.mean(-1, keepdim=True)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if offset and weight is not None:  # Gemma multiplies before it narrows
        normed = normed * (weight.to(normed.dtype) + offset)
        return (normed if bias is None else normed + bias.to(normed.dtype)).to(x.dtype)
    out = normed.to(x.dtype)
    if weight is not None:
        out = out * weight
    return out if bias is None else out + bias


def _rotary(op: Op, head: int, rows: TokenRows, x: Tensor) -> Tensor:
    """Turns x by its positions. x: (1, tokens, …, head)."""
    width = int(head * _number(op, "fraction", 1.0))
    # Queries and keys of all layers turn by the same angles: they are computed once an iteration, under all that they
    # depend on.
    key = ("rotary", op.attrs, width, x.dtype)
    if (angles := rows.shared_values.get(key)) is None:
        angles = rows.shared_values[key] = _angles(op, width, rows, x.dtype)
    cos, sin = angles
    if x.dim() > 3:
        shape = (1, x.shape[1], *[1] * (x.dim() - 3), width // 2)
        cos, sin = cos.view(shape), sin.view(shape)
    turned, rest = x[..., :width], x[..., width:]
    if op.attr("interleaved", False):
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned[..., : width // 2], turned[..., width // 2 :]
    # An interleaved head leaves as two halves, not in pairs again, as in training. Queries and keys are reordered
    # alike, which no product of theirs shows.
    parts = [a * cos - b * sin, b * cos + a * sin]
    return torch.cat([*parts, rest] if width < head else parts, dim=-1)


def _angles(op: Op, width: int, rows: TokenRows, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cosines, sines), (1, tokens, width / 2) each."""
    if op.attr("scaling", "") not in ("dynamic", "longrope"):
        longest = int(rows.lengths.max())
        positions = 1 << max(8, (longest - 1).bit_length())  # so that a table is made anew a few times only
        cos, sin = shared_tables(op.attrs, positions, width, dtype, rows.ids.device)
        return cos[rows.positions].unsqueeze(0), sin[rows.positions].unsqueeze(0)
    # angles depend on how long a sequence is when a token is computed: its prompt, or up to the token itself
    work = torch.promote_types(dtype, torch.float32)
    counts = torch.diff(rows.begins)
    lengths = torch.maximum(rows.positions + 1, rows.prompts.repeat_interleave(counts))
    angle = torch.empty((len(lengths), width // 2), dtype=work)
    for length in lengths.unique().tolist():
        mine = lengths == length
        angle[mine] = rows.positions[mine, None].to(work) * inverse_frequencies(op.attrs, width, work, length)
    factor = _number(op, "attention_factor", 1.0)
    return (angle.cos() * factor).to(dtype).unsqueeze(0), (angle.sin() * factor).to(dtype).unsqueeze(0)


def _dispatch(experts: int, first: int, here: int, rows: TokenRows, x: Tensor, indices: Tensor) -> Any:
    """Rows of this rank's experts: `here` of them from the first on."""
    routing = routing_of(indices, experts)
    if here < experts:
        # Rows are sorted by expert: those of experts that follow each other are one slice of the order.
        begin, counts = sum(routing.counts[:first]), routing.counts[first : first + here]
        order = routing.order[begin : begin + sum(counts)]
        routing = Routing(order=order, counts=counts, topk=routing.topk)
    # The products and the combination that follow read it there. A layer's dispatch overwrites that of the layer
    # before.
    rows.shared_values["routing"] = routing
    return x.reshape(-1, x.shape[-1]).index_select(0, routing.order // routing.topk)


def _grouped(matmuls: Sequence[Callable[[Tensor], Tensor]], rows: TokenRows, x: Tensor) -> Tensor:
    """Each row by the matrix of its own expert; experts without rows are not touched."""
    routing: Routing = rows.shared_values["routing"]
    # Expert e has the rows [at[e], at[e + 1]).
    at = list(accumulate(routing.counts, initial=0))
    parts = [matmuls[one](x[at[one] : at[one + 1]]) for one, count in enumerate(routing.counts) if count]
    if not parts:  # no token has chosen an expert of this rank
        # The product of one row of zeros, cut to none, is empty and has the width and dtype that others expect.
        return matmuls[0](x.new_zeros((1, x.shape[-1])))[:0]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _grouped_with_copies(
    products: Sequence[Callable[[Tensor], Tensor]], copies: ExpertCopies, place: int, rows: TokenRows, x: Tensor
) -> Tensor:
    """The same, of this rank's experts and of those in its slots. place: of the op among the layer's."""
    return _grouped([*products, *copies.products[rows.shared_values["room"]][place]], rows, x)


def _combine(rows: TokenRows, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    routing: Routing = rows.shared_values["routing"]
    # The order numbers choices as token x topk + place, so weights as one row are indexed by it, and its quotient by
    # topk is the token.
    by_row = weights.reshape(-1).index_select(0, routing.order).unsqueeze(-1).to(x.dtype)
    # A token none of whose experts is on this rank keeps its zeros: the sum over ranks adds what others made of it.
    out = torch.zeros((indices.shape[1], x.shape[-1]), dtype=x.dtype)
    return out.index_add_(0, routing.order // routing.topk, x * by_row).unsqueeze(0)
