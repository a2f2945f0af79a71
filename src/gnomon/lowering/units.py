"""What each data-parallel worker's microbatches hold where sequences differ in length, or a method cuts and packs them.

`worker_units(plan, workload)` gives the units of each worker; empty where all microbatches are alike, so that their
number says all. `units_of_lengths` gives them for the sequences of one batch, alike or not. Leaves out the order of
units on pipeline ranks, and prices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from gnomon.errors import PlanError
from gnomon.graph import Graph, numel
from gnomon.lowering.chunked import chunk_pass, chunks
from gnomon.lowering.packed import gds, skrull_pass
from gnomon.plans import Plan, Unit, Workload, batch, normalised
from gnomon.plans.parts import GROUP_BY_LENGTH, PACKING, PADDING


def worker_units(graph: Graph, plan: Plan, workload: Workload) -> tuple[tuple[Unit, ...], ...]:
    """The units of one step by data-parallel worker; () where every microbatch is whole sequences of one length.

    PlanError as in `units_of_lengths`.
    """
    lengths = workload.sequence_lengths()
    if not plan.schedule.makes_units and len(set(lengths)) == 1:
        return ()
    return units_of_lengths(graph, plan, lengths)


def units_of_lengths(graph: Graph, plan: Plan, lengths: Sequence[int]) -> tuple[tuple[Unit, ...], ...]:
    """The units of a step with these sequences (lengths: tokens of each), by data-parallel worker.

    Without a method, a worker has the sequences of its microbatches in batch order, `micro_batch_size` of them packed
    behind each other without padding; with `group_by_length` the longest first, and with `padding` each as long as the
    longest of its microbatch (pieces end beyond the sequence). With `chunkflow` workers get sequences by tokens,
    longest first to the one with fewest, and cut and pack their own; with `packing` they pack without cutting; with
    `skrull` they get sequences by FLOPs. PlanError for pipeline stages that differ in their numbers of workers or
    shares, for a microbatch that does not divide over the workers, and for a worker without a sequence.
    """
    chunked, packed = chunk_pass(plan.schedule), skrull_pass(plan.schedule)
    # A microbatch of all workers together has so many sequences.
    num_microbatches, microbatch_sequences = batch(plan, Workload(lengths=tuple(lengths)))
    workers = {plan.stage_mesh(stage).data_ranks for stage in range(plan.num_stages)}
    if len(workers) > 1 or any(stage.shares for stage in plan.stages):
        raise PlanError(
            "sequences of several lengths over stages with other shares or workers than each other have no "
            "rows; give all stages the same data parallelism"
        )
    ranks = workers.pop()
    if chunked is not None or (packed_tokens := packing_tokens(plan)) is not None:
        # Packed microbatches are as long as the longest sequence at least, so that `chunks` cuts none.
        chunk_tokens = chunked.chunk_size if chunked is not None else max(packed_tokens or 0, max(lengths))
        shares = dealt(lengths, ranks, lambda tokens: tokens)
        return tuple(_in_batch(share, chunks([lengths[i] for i in share], chunk_tokens)) for share in shares)
    if packed is not None:
        units = gds(lengths, data_ranks=ranks, capacity=packed.capacity, cp=plan.mesh.cp, work=work_of(graph))
        return tuple(
            normalised([replace(unit, worker=0) for unit in units if unit.worker == worker]) for worker in range(ranks)
        )
    if microbatch_sequences % ranks:
        raise PlanError(
            f"{microbatch_sequences} sequences of several lengths do not divide over {ranks} workers; give a batch "
            "that does"
        )
    micro_batch_size, order = microbatch_sequences // ranks, list(range(len(lengths)))
    names = {method.name for method in plan.schedule.passes}
    if GROUP_BY_LENGTH in names:
        # Longest first: if the largest microbatch does not fit, that is seen at once.
        order.sort(key=lambda i: (-lengths[i], i))
    pads = PADDING in names

    def unit(group: Sequence[int]) -> Unit:
        longest = max(lengths[i] for i in group)
        return Unit(pieces=tuple((i, 0, longest if pads else lengths[i]) for i in group))

    # Microbatch m holds sequences m x microbatch_sequences … of the order; worker w has the w-th part of each.
    return tuple(
        normalised([
            unit(order[first : first + micro_batch_size])
            for first in range(worker * micro_batch_size, num_microbatches * microbatch_sequences, microbatch_sequences)
        ])
        for worker in range(ranks)
    )  # fmt: skip


def packing_tokens(plan: Plan) -> int | None:
    """Tokens up to which `packing` fills a microbatch; 0 for as many as the longest sequence has; None without that
    method."""
    packing = next((packing for packing in plan.schedule.passes if packing.name == PACKING), None)
    if packing is None:
        return None
    tokens = dict(packing.params).get("tokens", 0)
    return tokens if isinstance(tokens, int) else 0


def unlike_numbers(plan: Plan, units: str) -> str | None:
    """Why data-parallel workers cannot run the plan where they differ in their numbers of `units` (the word for
    microbatches in the sentence), and what to change; None where they can: where they meet only at the end of a
    step."""
    mesh = plan.mesh
    if plan.optimizer.zero == 3 and mesh.data_ranks > 1:
        return f"ZeRO 3 gathers parameters in step on all workers, whose numbers of {units} differ; use zero <= 1"
    if plan.optimizer.zero == 2 and mesh.data_ranks > 1:
        return f"ZeRO 2 reduces gradients after each of a worker's {units}, whose numbers differ; use zero <= 1"
    if mesh.data_ranks > 1 and mesh.ep * mesh.etp > mesh.cp * mesh.tp:
        return (
            f"ep x etp = {mesh.ep * mesh.etp} ranks exchange tokens in each of their {units}, and workers have other "
            f"numbers of them; use ep x etp of at most cp x tp = {mesh.cp * mesh.tp}"
        )
    return None


def dealt(lengths: Sequence[int], workers: int, work: Callable[[int], float]) -> list[list[int]]:
    """Deals sequences to workers greedily: the one with most work goes to the worker that has least so far.

    work: of a sequence of so many tokens. Returns indices into `lengths` for each worker, in batch order. PlanError for
    fewer sequences than workers.
    """
    if len(lengths) < workers:
        raise PlanError(f"{len(lengths)} sequences do not give each of {workers} data-parallel workers one")
    shares: list[list[int]] = [[] for _ in range(workers)]
    load = [0.0] * workers
    for sequence in sorted(range(len(lengths)), key=lambda i: (-work(lengths[i]), i)):
        worker = min(range(workers), key=load.__getitem__)
        shares[worker].append(sequence)
        load[worker] += work(lengths[sequence])
    return [sorted(share) for share in shares]


def work_of(graph: Graph) -> Callable[[int], int]:
    """Returns the function tokens -> FLOPs of the forward of a sequence: two for each weight and token, and those of
    causal attention."""
    blocks = [graph.block(layer.call.block) for layer in graph.layers()]
    # Summed over attentions: heads x head_dim of their queries, whose last two dims these are.
    query_width = sum(
        int(numel(block.tensor(op.inputs[0]).dims[-2:], {}))
        for block in blocks
        for op in block.ops
        if op.does == "attends"
    )
    weights = graph.num_active_parameters() + graph.num_frozen()
    # QKᵀ and PV take 2 FLOPs for each pair of tokens and unit of width, and a causal mask leaves half of the pairs:
    # (2 + 2) / 2 · width · tokens².
    return lambda tokens: 2 * weights * tokens + 2 * query_width * tokens * tokens


def _in_batch(share: Sequence[int], units: Sequence[Unit]) -> tuple[Unit, ...]:
    """Renumbers the sequences of a worker's units, from their place in its share to that in the global batch."""
    return tuple(
        replace(unit, pieces=tuple((share[at], start, stop) for at, start, stop in unit.pieces)) for unit in units
    )
