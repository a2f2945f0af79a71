"""Numbers of the user's own runs on this machine: where they are kept, and when predictions take them.

`with_own(stack, machines, …)` puts them into the stack of a prediction for the same machine. Leaves out the runs
themselves, and what is fitted to them (`cli.own_runs`).
"""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

from gnomon import schema
from gnomon.cli.options.job import LocalOption
from gnomon.hardware import Cluster, local_file
from gnomon.software import Stack, own

IGNORE = "--no-local-calibration"
"""The option that leaves all of this out."""


def stack_file() -> Path:
    """The file that keeps the numbers fitted to this machine's runs; it lies next to that of `gnomon calibrate`."""
    return local_file().parent / f"local-{own.NAME}.toml"


def runs_folder() -> Path:
    """The folder that keeps this machine's runs."""
    return local_file().parent / "runs"


def machine_of(machines: Cluster) -> str:
    """What numbers of own runs hold for: this machine, by name, as it was calibrated; empty for several nodes."""
    if sum(group.count for group in machines.groups) != 1:
        return ""
    measured = machines.groups[0].node.device.measured
    host = platform.node() or "this machine"
    return host if measured is None else f"{measured.host}, calibrated {measured.date}"


def with_own(stack: Stack, machines: Cluster, options: LocalOption, assumed: list[str]) -> Stack:
    """The stack with the numbers of this machine's own runs, if it is our own program, without other numbers, and there
    are some for these machines; `assumed` says so, and what is there and not taken."""
    path = stack_file()
    if stack.name != own.NAME or stack.own is not None or options.no_local_calibration or not path.is_file():
        return stack
    own_stack = schema.load_file(Stack, path).own
    archs = {device.arch for device in machines.devices}
    if own_stack is None or not machine_of(machines) or not archs <= {number.arch for number in own_stack.numbers}:
        return stack
    host = own_stack.machine.partition(",")[0]
    if host != machine_of(machines).partition(",")[0]:
        return stack
    if own_stack.machine != machine_of(machines):
        assumed.append(
            f"{own_stack.runs} runs of {own_stack.date} were fitted before this machine was calibrated again, "
            "and are left out "
            f"(gnomon calibrate --from {runs_folder()} -o {path} fits them again)"
        )
        return stack
    assumed.append(f"calibrated from {own_stack.runs} runs of {own_stack.date} on this machine; {IGNORE} ignores them")
    return replace(stack, own=own_stack)
