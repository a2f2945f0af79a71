"""`gnomon export`: a plan file as the file that another program reads.

`run(options)` prints the file, or writes it whole with `-o`, and says on standard error what it cannot express and what
must be said elsewhere. Returns 0; with `--strict` 2, and nothing is written, when something is not expressed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from gnomon.cli.run import read_plan
from gnomon.cli.terminal import print_json, print_lines
from gnomon.errors import InputError, nearest
from gnomon.formats import programs
from gnomon.formats.export import Export, asked_for, exported
from gnomon.hardware import parse_cluster
from gnomon.hardware.kinds import is_mixed
from gnomon.plans import PlanFile, check
from gnomon.report.tables import wrapped
from gnomon.request.model import read_config
from gnomon.schema import save_text

BAD_REQUEST = 2


def run(options: argparse.Namespace) -> int:
    """Read, write, tell."""
    _check_target(options.output, force=options.force)
    found = export_file(read_plan(options.plan), options.to)
    lost = bool(options.strict and found.unwritten)
    if options.json:
        print_json(_mapping(found))
    elif not lost:
        _put(found, options.output)
    if not options.json:
        print_lines(_told(found, options.output), out=sys.stderr)
    if lost:
        print(f"gnomon: {len(found.unwritten)} fields are not expressed (--strict); nothing written", file=sys.stderr)
    elif options.json and options.output:
        _put(found, options.output)
    return BAD_REQUEST if lost else 0


def export_file(file: PlanFile, program: str) -> Export:
    """The plan of a plan file as `program` (one of `programs.written()`) reads it. Errors as reading the plan
    and the writers have them."""
    draft = programs.find(program).write if program in programs.names() else None
    if draft is None:
        known = programs.written()
        raise InputError(f"no export to {program[:40]!r}{nearest(program[:40], known)}; known: {', '.join(known)}")
    machines = parse_cluster(file.on)
    config, graph = read_config(file.model)
    check(file.plan, graph, machines, file.workload)
    each = max(node.count for node in machines.nodes)
    asked = asked_for(Path(file.model).name, config, graph, file.plan, file.workload, each)
    found = exported(asked, draft(asked))
    if not is_mixed(machines):
        return found
    order = f"the machines in the order of {file.on}: ranks follow it, and the plan gives each kind its own work"
    return replace(found, elsewhere=(order, *found.elsewhere))


def _check_target(path: str | None, *, force: bool) -> None:
    if path is not None and not force and Path(path).exists():
        raise InputError(f"{path} exists; give another name, or --force to write over it")


def _put(found: Export, path: str | None) -> None:
    if path is None:
        sys.stdout.write(found.text)
    else:
        save_text(found.text, path)


def _told(found: Export, path: str | None) -> list[str]:
    """What goes to standard error."""
    lines = [f"{found.program}{f' in {path}' if path else ''}"]
    if found.unwritten:
        lines += ["", "not expressed", *(line for one in found.unwritten for line in wrapped(str(one), bullet="- "))]
    if found.beyond:
        lines += ["", "done beyond the plan", *(line for one in found.beyond for line in wrapped(one, bullet="- "))]
    lines += ["", "to be said elsewhere", *(line for one in found.elsewhere for line in wrapped(one, bullet="- "))]
    return lines


def _mapping(found: Export) -> dict[str, object]:
    return {
        "schema": "gnomon.export/1",
        "program": found.program,
        "text": found.text,
        "unwritten": [
            {"field": one.field, "asked": one.asked, "becomes": one.becomes, "why": one.why} for one in found.unwritten
        ],
        "elsewhere": list(found.elsewhere),
        "beyond": list(found.beyond),
    }
