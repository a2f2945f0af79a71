"""What the compiler did and why: groups, tiles, the level of each edge, traffic, what bounds each, predicted and
measured.

`explained` gives plain data, `lines` the text of `gnomon compile --explain`. The predicted time of a group is
`tile_cost.cost` of its tiling at this machine's measured rates. Leaves out what ATen runs, which is only counted.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from gnomon.compiler.backend import CompiledGraph
from gnomon.compiler.kernels.chains import Chain
from gnomon.compiler.kernels.columns import Columns
from gnomon.compiler.kernels.convolutions import Pixels, Tiled
from gnomon.compiler.kernels.live import LiveMatmul
from gnomon.compiler.kernels.products import TriedMatmul
from gnomon.compiler.kernels.ragged import Places, RaggedMatmul
from gnomon.compiler.kernels.recurrent import Recurrent
from gnomon.compiler.machine import Machine, this_machine
from gnomon.compiler.program import PlannedGroup, symbols_in
from gnomon.compiler.stencil.call import StencilCall
from gnomon.compiler.tasks.steps import Run
from gnomon.compiler.tiles.sizes import hint, product
from gnomon.compiler.tiles.tile_cost import cost, rates
from gnomon.compiler.tiles.tiling import Nest, Tiling, tiling
from gnomon.compiler.tune.forms import Forms
from gnomon.compiler.tune.tried import TriedKernel

PICTURE = 48
"""Columns of a picture of memory."""


def explained(compiled: CompiledGraph) -> dict[str, Any]:
    """One compiled graph as data."""
    in_cpp = {unit for run in compiled.runs if run.kept for unit in run.units if isinstance(unit, torch.fx.Node)}
    aten = Counter(
        str(unit.target).removeprefix("aten.").removesuffix(".default")
        for unit in compiled.program.units
        if isinstance(unit, torch.fx.Node)
        and unit.op == "call_function"
        and unit.target is not operator.getitem  # one of several results, which nobody computes
        # A loop or a branch that C++ walks by itself.
        and not (unit in in_cpp and isinstance(unit.target, torch._ops.HigherOrderOperator))
        and not isinstance(
            unit.target, (Columns, Recurrent, TriedMatmul, TriedKernel, Places, RaggedMatmul, LiveMatmul)
        )
    )
    aten.update(one.name.split()[0] for one in compiled.products if not (one.kept or one.own_kept))
    onednn = Counter(one.name.split()[0] for one in compiled.products if one.kept)
    onednn.update("convolution" for one in compiled.convolutions if one.by_onednn)
    groups = [_group(compiled, planned) for planned in compiled.program.groups]
    columns = [
        {
            "count": one.count,
            "floats": one.width,
            "kept": bool(one.trial.kept),
            "measured_s": one.trial.verdict.get("kernel_s"),
            "aten_s": one.trial.verdict.get("aten_s"),
        }
        for one in compiled.columns
    ]
    recurrent = [_recurrent(one) for one in compiled.recurrent]
    calls = [_call(run) for run in compiled.runs]
    stencils = [_stencil(one) for one in compiled.stencils]
    others = {"onednn": dict(onednn.most_common()), "aten": dict(aten.most_common())}
    return {
        "groups": groups,
        "columns": columns,
        "recurrent": recurrent,
        "stencils": stencils,
        "chains": [_chain(one, many) for one, many in Counter(compiled.chains).items()],
        "convolutions": [_convolution(one) for one in compiled.convolutions if isinstance(one, (Pixels, Tiled))],
        "tried": _tried(compiled),
        "chosen": _chosen(compiled),
        "previews": [
            {"kept": one.kept, "apart": one.apart, "measured_s": one.times[0], "exact_s": one.times[1]}
            for one in compiled.previews
        ],
        "calls": calls,
        **others,
    }


def _tried(compiled: CompiledGraph) -> dict[str, dict[str, int]]:
    """How many of the operations that are tried by themselves a kernel runs, and how many PyTorch."""
    out = {}
    every: dict[str, Sequence[TriedKernel]] = {
        "pooling": compiled.pools,
        "random numbers": compiled.draws,
        "scan over time": compiled.scans,
        "dot products of pairs": compiled.pairs,
        "dot products of pairs of looked-up rows": compiled.table_pairs,
        "gradient of a table": compiled.tables,
        "attention": compiled.attention,
        "matmuls of experts": compiled.experts,
        "linear layer in eight bits": compiled.quantized,
        "matmul with the work around it": compiled.chains,
    }
    own = sum(one.own_kept for one in compiled.products)
    out["matmul"] = {"by a kernel": own}
    for name, calls in every.items():
        as_kernel = sum(one.kept for one in calls)
        out[name] = {"by a kernel": as_kernel, "given back to ATen": len(calls) - as_kernel}
    return out


def _chosen(compiled: CompiledGraph) -> list[dict[str, Any]]:
    """Products whose form is chosen in every call, by what is there."""
    ragged = [] if compiled.ragged is None else compiled.ragged.products
    every: list[tuple[str, RaggedMatmul | LiveMatmul]] = [("rows", one) for one in ragged]
    every += [("columns", one) for one in compiled.live]
    out = []
    for counts, one in every:
        out += [{"product": one.product.name, "counts": counts, **forms.why()} for forms in one.forms.values()]
        if not one.forms:
            out.append({"product": one.product.name, "counts": counts, **Forms().why()})
    return out


def _convolution(one: Pixels | Tiled) -> dict[str, Any]:
    """Explains a convolution with what surrounds it as one kernel."""
    names = [
        *(["relu"] if one.before else []),
        "convolution",
        *(["batch norm"] if one.eps is not None else []),
        *(["add"] if one.added else []),
    ]
    names += ["relu"] if one.relu else []
    images, channels, high, wide = one.image
    names += [str(target).split(".")[1] for target, _, _ in one.work]
    if isinstance(one, Pixels):
        how, out = "single pixels", [(size - 1) // one.stride[0] + 1 for size in (high, wide)]
    else:
        how, out = one.form.name, list(one.form.out_sizes(one.image))
    return {
        "operations": names,
        "how": how,
        "pixels": images * out[0] * out[1],
        "channels": channels,
        "kept": one.own_kept,
        "by_onednn": one.by_onednn,
        "measured_s": one.verdict.get("kernel_s"),
        "onednn_s": one.verdict.get("second", {}).get("kernel_s"),
        "aten_s": one.verdict.get("aten_s"),
    }


def _chain(one: Chain, many: int) -> dict[str, Any]:
    """Explains linear layers with what surrounds them as one kernel, of which a graph has so many."""
    return {
        "count": many,
        "operations": one.names,
        "layers": [list(sizes) for sizes in one.sizes],
        "saved_bytes": one.saved_bytes,
        "kept": one.kept,
        "measured_s": one.verdict.get("kernel_s"),
        "apart_s": one.verdict.get("aten_s"),
        "why": one.verdict.get("wrong", ""),
    }


def _stencil(one: StencilCall) -> dict[str, Any]:
    """Explains a stencil: how many stages are computed together, in which tiles, and why."""
    part = one.parts[0].tile
    return {
        "stages": len(one.made.stages),
        "steps": one.made.steps,
        "sizes": list(one.made.stages[-1].sizes),
        "together": one.tile.depth,
        "kernels": len(one.parts),
        "tile": list(part.size),
        "ring_bytes": part.ring_bytes,
        "level": part.level,
        "bound": part.bound,
        "predicted_s": sum(part.tile.seconds for part in one.parts),
        "alone_s": next(tile.seconds for tile in one.tiles if tile.depth == 1),
        "measured_s": one.verdict.get("kernel_s"),
        "aten_s": one.verdict.get("aten_s"),
        "kept": one.kept,
        "why": one.verdict.get("wrong", ""),
    }


def _call(run: Run) -> dict[str, Any]:
    """A stretch that is one call of C++: its steps, and where in its arena each finds and leaves what lies between."""
    verdict = run.trial.verdict if run.trial is not None else {}
    return {
        "steps": run.names,
        "arena_bytes": run.arena_bytes,
        "unshared_bytes": sum(one.size_bytes for one in run.slots),
        "placed": [(one.offset, one.size_bytes, one.first, one.last) for one in run.slots],
        "kept": run.kept,
        "called": bool(verdict) or run.kept,
        "measured_s": verdict.get("kernel_s"),
        "python_s": verdict.get("aten_s"),
        "workers": None if run.two_workers is None else _workers(run.two_workers),
    }


def _workers(run: Run) -> dict[str, Any]:
    """A stretch by two workers: what each does and when, as foretold, and what came of the trial."""
    verdict = run.trial.verdict if run.trial is not None else {}
    schedule = run.schedule
    assert schedule is not None
    return {
        "kept": run.kept,
        "predicted_s": schedule.predicted_s,
        "measured_s": verdict.get("kernel_s"),
        "one_s": verdict.get("aten_s"),
        "lists": [[(task.step, task.begin_s, task.end_s) for task in each] for each in schedule.lists],
        "wide": sorted(schedule.wide),
        "why": verdict.get("wrong", ""),
    }


STEPS = "0123456789abcdefghijklmnopqrstuvwxyz"
"""A step in a picture of workers: its number, of those above 35 what is left by 36."""


def _schedule(explanation: dict[str, Any]) -> list[str]:
    """A line a worker: its steps from left to right, as long as they are foretold to take; dots where it waits."""
    state = "kept" if explanation["kept"] else f"not kept{': ' + explanation['why'] if explanation['why'] else ''}"
    out = [
        f"    workers   2 in parallel ({state}): predicted {_us(explanation['predicted_s'])}, measured"
        f" {_us(explanation['measured_s'])}, one worker {_us(explanation['one_s'])}"
    ]
    for n, each in enumerate(explanation["lists"]):
        row = ["."] * PICTURE
        for step, begin_s, end_s in each:
            begin = min(int(begin_s * PICTURE / explanation["predicted_s"]), PICTURE - 1)
            end = max(begin + 1, int(end_s * PICTURE / explanation["predicted_s"]))
            row[begin:end] = STEPS[step % len(STEPS)] * (end - begin)
        out.append(f"      {n} |{''.join(row[:PICTURE])}|")
    return out


def _picture(call: dict[str, Any]) -> list[str]:
    """A line a step: the arena from left to right; # is written, = kept for a later step, : read for the last time."""
    wide = max(len(name) for name in call["steps"])
    out = []
    for n, name in enumerate(call["steps"]):
        row = [" "] * PICTURE
        for offset, size, first, last in call["placed"]:
            if first <= n <= last:
                begin = offset * PICTURE // call["arena_bytes"]
                end = max(begin + 1, -(-(offset + size) * PICTURE // call["arena_bytes"]))
                row[begin:end] = ("#" if n == first else ":" if n == last else "=") * (end - begin)
        out.append(f"    {n:>3} {name:<{wide}} |{''.join(row)}|")
    return out


def _recurrent(one: Recurrent) -> dict[str, Any]:
    verdict = next((trial.verdict for trial in reversed([*one.trials.values()])), {})
    return {
        "name": one.layers.name.upper(),
        "layers": one.layers.layers,
        "directions": one.layers.directions,
        "hidden": one.hidden,
        "kept": bool(verdict.get("kept")),
        "measured_s": verdict.get("kernel_s"),
        "aten_s": verdict.get("aten_s"),
    }


def _group(compiled: CompiledGraph, planned: PlannedGroup) -> dict[str, Any]:
    nest, environment = planned.kernel.nest, compiled.program.environment
    rows = hint(product(nest.sizes[a] for a in nest.outer), environment)
    points = hint(product(nest.sizes[a] for a in nest.inner), environment)
    last = hint(nest.sizes[nest.inner[-1]], environment) if nest.inner else 1
    tile = tiling(nest, rows, last, this_machine())
    moved = moved_bytes(planned, environment)
    foretold = cost(
        nest, tile, points // max(last, 1), sum(moved.values()), torch.get_num_threads(), rates(), this_machine()
    )
    trial = compiled.trials.get(planned.number)
    verdict = trial.verdict if trial is not None else {}
    return {
        "operations": [str(node.target).removeprefix("aten.").removesuffix(".default") for node in planned.group.work],
        "rows": rows,
        "points": points,
        "symbols": symbols_in(planned),
        "tile": {"rows": tile.chunk, "points": tile.tile, "tasks": tile.chunks * tile.tiles, "parallel": tile.parallel},
        "passes": len(nest.passes),
        "edges": _edges(nest, tile, this_machine()),
        "bytes": moved,
        "bound": foretold.bound,
        "predicted_s": foretold.seconds,
        "measured_s": verdict.get("kernel_s"),
        "aten_s": verdict.get("aten_s"),
        "kept": compiled.by_kernel(planned),
        "why": verdict.get("wrong", ""),
    }


def moved_bytes(planned: PlannedGroup, environment: Any) -> dict[str, int]:
    """Bytes that must come from and go to memory: each element once."""
    nest = planned.kernel.nest
    read = 0
    for slot in planned.kernel.slots:
        inp = nest.body.inputs[slot]
        axes = set(inp.strides)
        if inp.index is not None:
            axes |= set(nest.outer)
        read += inp.dtype.itemsize * hint(product(nest.sizes[a] for a in axes), environment)
    written = sum(
        out.dtype.itemsize * hint(product(nest.sizes[a] for a in out.strides), environment) for out in nest.outputs
    )
    return {"read": read, "written": written}


def _edges(nest: Nest, tile: Tiling, machine: Machine) -> list[str]:
    """Says where values live that more than one pass uses; all others are in registers."""
    # Scratch has room for doubles, whatever lies there (`nest`).
    row = tile.tile * len(nest.scratch) * 8
    level = "L1" if row <= machine.l1_bytes else "L2" if row <= machine.l2_bytes else "L3"
    out = []
    seen: dict[int, int] = {}
    for n, step in enumerate(nest.passes):
        for value, where in sorted(step.read_back.items()):
            name = nest.body.code[value].op
            place = f"scratch in {level}" if where == "scratch" else where
            out.append(f"{name} of pass {seen.get(value, 0) + 1} -> pass {n + 1}: {place}")
        for value in step.values:
            if value in seen and nest.body.code[value].op not in ("const", "extent", "load", "take"):
                out.append(f"{nest.body.code[value].op} of pass {seen[value] + 1} -> pass {n + 1}: computed again")
            seen.setdefault(value, n)
    return out


def lines(explanation: dict[str, Any], title: str) -> list[str]:
    out = [title]
    for n, group in enumerate(explanation["groups"]):
        state = "kept" if group["kept"] else f"given back to ATen{': ' + group['why'] if group['why'] else ''}"
        tile = group["tile"]
        out += [
            f"  group {n}: {' + '.join(group['operations'])} ({state})",
            f"    domain    {_many(group['rows'], 'row')} x {_many(group['points'], 'point')}"
            + (f", any {', '.join(group['symbols'])}" if group["symbols"] else ""),
            f"    tiles     {_many(tile['rows'], 'row')} x {_many(tile['points'], 'point')},"
            f" {_many(tile['tasks'], 'task')}"
            + (" that may run in parallel" if tile["parallel"] else " of one worker"),
            f"    passes    {_passes(group)}",
            f"    memory    reads {_mib(group['bytes']['read'])}, writes {_mib(group['bytes']['written'])};"
            f" bound by {group['bound']}",
            f"    time      predicted {_us(group['predicted_s'])}, measured {_us(group['measured_s'])},"
            f" ATen {_us(group['aten_s'])}",
        ]
    for one in explanation["chains"]:
        state = "kept" if one["kept"] else f"apart{': ' + one['why'] if one['why'] else ''}"
        layers = ", ".join("x".join(map(str, sizes)) for sizes in one["layers"])
        many = f", {one['count']} times" if one["count"] > 1 else ""
        out += [
            f"  chain {' + '.join(one['operations'])} of {layers}{many} ({state})",
            f"    memory    {_mib(one['saved_bytes'])} stay in registers and caches",
            f"    time      measured {_us(one['measured_s'])}, apart {_us(one['apart_s'])}",
        ]
    for one in explanation["convolutions"]:
        state = f"one kernel, {one['how']}" if one["kept"] else "oneDNN" if one["by_onednn"] else "ATen"
        out += [
            f"  {' + '.join(one['operations'])} of {one['pixels']} pixels x {one['channels']} channels ({state})",
            f"    time      measured {_us(one['measured_s'])}, oneDNN {_us(one['onednn_s'])},"
            f" ATen {_us(one['aten_s'])}",
        ]
    for one in explanation["columns"]:
        state = "kept" if one["kept"] else "given back to ATen"
        out += [
            f"  embedding columns: {one['count']:,} in one kernel, {one['floats']:,} floats a row ({state})",
            f"    time      measured {_us(one['measured_s'])}, ATen {_us(one['aten_s'])}",
        ]
    for one in explanation["recurrent"]:
        state = "kept" if one["kept"] else "given back to ATen"
        both = ", both directions" if one["directions"] == 2 else ""
        out += [
            f"  {one['name']} of {one['hidden']} units, {one['layers']} layers{both}, any number of steps ({state})",
            f"    time      measured {_us(one['measured_s'])}, ATen {_us(one['aten_s'])}",
        ]
    for one in explanation["previews"]:
        state = "not tried" if one["apart"] is None else "kept" if one["kept"] else "computed exactly"
        out.append(f"  convolution and pooling by a preview in eight bits ({state})")
        if one["apart"] is not None:
            away = f"{one['apart']:.1g} of the results away from exact ones"
            out.append(f"    time      measured {_us(one['measured_s'])}, exactly {_us(one['exact_s'])}; {away}")
    for one in explanation["chosen"]:
        routes = ", ".join(f"{way} in {calls} call{'' if calls == 1 else 's'}" for way, calls in one["taken"].items())
        routes = routes or "whole: nothing was left out yet"
        out.append(f"  matmul by the {one['counts']} that are there: {one['product']} ({routes})")
        if one["predicted_s"]:
            times = ", ".join(f"{way} {_us(one['predicted_s'][way])}" for way in sorted(one["predicted_s"]))
            out.append(f"    why       {100 * one['share']:.0f} % were there; predicted of the last call: {times}")
        out += [f"    never     {way}: {why}" for way, why in one["wrong"].items()]
    for one in explanation["stencils"]:
        state = "kept" if one["kept"] else f"given back to ATen{': ' + one['why'] if one['why'] else ''}"
        out += [
            f"  stencil of {_many(one['stages'], 'stage')} over {' x '.join(map(str, one['sizes']))} ({state})",
            f"    tiles     {one['together']} stages together, {' x '.join(map(str, one['tile']))} points;"
            f" their rows take {_mib(one['ring_bytes'])} of {one['level']}",
            f"    time      predicted {_us(one['predicted_s'])} (stage after stage {_us(one['alone_s'])}),"
            f" bound by {one['bound']}; measured {_us(one['measured_s'])}, ATen {_us(one['aten_s'])}",
        ]
    for n, call in enumerate(explanation["calls"]):
        state = "kept" if call["kept"] else "given back to Python" if call["called"] else "not called yet"
        out += [
            f"  call {n} of C++: {_many(len(call['steps']), 'step')} ({state})",
            f"    memory    one block of {_mib(call['arena_bytes'])} for intermediate tensors"
            f" of {_mib(call['unshared_bytes'])}",
            f"    time      measured {_us(call['measured_s'])}, the same steps in Python {_us(call['python_s'])}",
            *_picture(call),
            *(_schedule(call["workers"]) if call["workers"] else []),
        ]
    for name, counts in explanation["tried"].items():
        out += [f"  {name}: {count} {state}" for state, count in counts.items() if count]
    if explanation["onednn"]:
        out.append(f"  oneDNN: {_counted(explanation['onednn'])}")
    out.append(f"  ATen: {_counted(explanation['aten']) or 'nothing'}")
    return out


def _passes(group: dict[str, Any]) -> str:
    """Says how often a row is walked, and where what a later pass needs comes from."""
    if not group["passes"]:
        return "one number a row"
    return f"{group['passes']} over a row; " + ("; ".join(group["edges"]) or "all edges in registers")


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _counted(calls: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" if count > 1 else name for name, count in calls.items())


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f} MiB" if count >= 10_000 else f"{count} B"


def _us(seconds: float | None) -> str:
    if seconds is None:
        return "not timed"
    return f"{seconds * 1e6:.1f} us" if seconds < 10e-6 else f"{seconds * 1e6:.0f} us"
