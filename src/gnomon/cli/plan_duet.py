"""`gnomon plan MODEL --serve --beside DEVICE`: branches of a model on two kinds of device at once (DUET), predicted.

`run(options)` prints the subgraphs with their seconds on either device, where each is best and what that gains, and
returns 0. It is a plan: nothing here runs a model on two devices. Leaves out servers (`plan_serve`).
"""

from __future__ import annotations

from collections.abc import Iterator

from gnomon.cli.models import read_model
from gnomon.cli.options.flags import changed_options, flags
from gnomon.cli.options.plan import PlanOptions
from gnomon.cli.options.serve import ServeOptions
from gnomon.cli.terminal import print_json, print_lines
from gnomon.errors import InputError
from gnomon.graph import Dtypes
from gnomon.hardware import Device, parse_cluster
from gnomon.ops.work import Setting
from gnomon.serving.duet import LAUNCH_S, DuetAssignment, DuetLane, Subgraph, choose, op_seconds, subgraphs
from gnomon.units import show_bytes, show_seconds

LOOKED_AT = frozenset("serve beside input_len".split())
"""Options of serving that the question looks at."""
PCIE = DuetLane(bytes_per_s=25e9, latency_s=10e-6)
"""Between a host and its card: PCIe 4 of 16 lanes, one direction, pinned."""
SHOWN = 24


def run(options: PlanOptions) -> int:
    """Places one text's subgraphs on two kinds of devices and prints who computes what."""
    for name in changed_options(options):
        if name in flags(ServeOptions) and name not in LOOKED_AT:
            raise InputError(
                f"--{name.replace('_', '-')} is of a server, and --beside places one text's subgraphs; leave one out"
            )
    if options.output is not None:
        raise InputError("--beside is a prediction that nothing runs, so there is no plan to write; leave -o out")
    if options.model is None or options.on is None or options.beside is None:
        raise InputError("--beside needs a model and --on, the first kind of device, as in --on 1xa100-sxm-80gb")
    if options.input_len is None:
        raise InputError("how long a text is is not said; give --input-len")
    graph, notes = read_model(options.model)
    first, second = (parse_cluster(name).devices[0] for name in (options.on, options.beside))
    dtype = "bf16" if first.dense_peak.bf16 is not None and second.dense_peak.bf16 is not None else "fp32"
    setting = Setting(
        sizes={"batch": 1, "seq": options.input_len, "enc_seq": options.input_len},
        dtypes=Dtypes(param=dtype, compute=dtype), causal_flops="half",
    )  # fmt: skip
    parts = subgraphs(graph, setting, [op_seconds(device, dtype) for device in (first, second)])
    found = choose(parts, PCIE)
    assumed = [
        *notes, f"batch 1 in {dtype}, rooflines of ops with a launch of "
        + " and ".join(f"{show_seconds(LAUNCH_S[device.kind])} on {device.name}" for device in (first, second)),
        f"{show_bytes(PCIE.bytes_per_s)}/s and {show_seconds(PCIE.latency_s)} between them",
    ]  # fmt: skip
    if options.json:
        print_json(_mapping((first, second), parts, found, assumed))
    else:
        print_lines(_text(graph.name, (first, second), parts, found, assumed))
    return 0


def _mapping(
    devices: tuple[Device, Device], parts: tuple[Subgraph, ...], found: DuetAssignment, assumed: list[str]
) -> dict[str, object]:
    return {
        "schema": "gnomon.duet/1",
        "devices": [device.name for device in devices],
        "seconds": found.seconds,
        "alone_s": list(found.alone_s),
        "exact": found.exact,
        "subgraphs": [
            {"name": part.name, "ops": part.ops, "seconds": list(part.seconds), "on": devices[place].name}
            for part, place in zip(parts, found.places, strict=True)
        ],
        "assumptions": assumed,
    }


def _text(
    name: str, devices: tuple[Device, Device], parts: tuple[Subgraph, ...], found: DuetAssignment, assumed: list[str]
) -> Iterator[str]:
    first, second = devices
    yield f"{name} on {first.name} and {second.name}: {len(parts)} subgraphs"
    yield ""
    yield f"  {first.name[:14]:>14}  {second.name[:14]:>14}  on"
    for part, place in list(zip(parts, found.places, strict=True))[:SHOWN]:
        one, other = map(show_seconds, part.seconds)
        yield f"  {one:>14}  {other:>14}  {devices[place].name[:14]:14}  {part.name[:60]} ({part.ops} ops)"
    if len(parts) > SHOWN:
        yield f"  … {len(parts) - SHOWN} more (--json)"
    yield ""
    both = len(set(found.places)) > 1
    devices_text = "both" if both else devices[found.places[0]].name
    how = "the best of all assignments" if found.exact else "by flips that help"
    yield f"  {show_seconds(found.seconds)} on {devices_text} ({how})"
    yield f"  {show_seconds(found.alone_s[0])} on {first.name} alone, {show_seconds(found.alone_s[1])} on {second.name}"
    if not both:
        yield "  two devices at once would save less than 5 %: its branches are too few or too short"
    yield ""
    yield "assumed"
    for note in assumed:
        yield f"- {note}"
