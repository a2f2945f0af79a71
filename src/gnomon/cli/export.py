"""`gnomon export`: a plan file as the file that another program reads.

`run(options)` prints the file, or writes it whole with `-o`, and says on standard error what it cannot express and what
must be said elsewhere. Returns 0; with `--strict` 2, and nothing is written, when something is not expressed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gnomon.cli.jobs import network
from gnomon.cli.options.job import TrainingOptions
from gnomon.cli.options.tools import ExportOptions
from gnomon.cli.request import read_request
from gnomon.cli.run import read_plan
from gnomon.cli.terminal import print_json, print_lines
from gnomon.errors import InputError, nearest
from gnomon.formats import programs
from gnomon.formats.engines import command_line
from gnomon.formats.export import Draft, Export, ExportRequest, asked_for, exported
from gnomon.formats.given import network_graph
from gnomon.hardware import parse_cluster
from gnomon.hardware.kinds import is_mixed
from gnomon.models.lora import parse_adapters
from gnomon.models.presets import CONFIGS
from gnomon.plans import PlanFile, check
from gnomon.report.tables import wrapped
from gnomon.request.model import is_a_file, read_config
from gnomon.schema import header_of, load_file, read_file, save_text
from gnomon.serving.file import ServeFile
from gnomon.software import stack

BAD_REQUEST = 2


def run(options: ExportOptions) -> int:
    """Reads weights, writes them in the other form and says what was written."""
    _check_target(options.output, force=options.force)
    of_a_job = options.on is not None or (
        is_a_file(options.plan)
        and not options.plan.endswith(".toml")
        and programs.recognised(Path(options.plan)) is not None
    )
    if not of_a_job and (server := _server(options.plan)) is not None:
        return _served(server, options)
    if of_a_job:
        export = export_job(options)
    else:
        _refuse_beside(options)
        export = export_file(read_plan(options.plan), options.to)
    lost = bool(options.strict and export.unwritten)
    if options.json:
        print_json(_mapping(export))
    elif not lost:
        _put(export, options.output)
    if not options.json:
        print_lines(_summary(export, options.output), out=sys.stderr)
    if lost:
        print(f"gnomon: {len(export.unwritten)} fields are not expressed (--strict); nothing written", file=sys.stderr)
    elif options.json and options.output:
        _put(export, options.output)
    return BAD_REQUEST if lost else 0


def _server(path: str) -> ServeFile | None:
    """The server that a file is of; None for other files."""
    if not Path(path).is_file() or header_of(read_file(path), source=path) != ServeFile.SCHEMA:
        return None
    return load_file(ServeFile, path)


def _served(file: ServeFile, options: ExportOptions) -> int:
    """A server as an engine's command line."""
    line, lost = command_line(file, options.to)
    if options.strict and lost:
        print(f"gnomon: {len(lost)} fields are not expressed (--strict); nothing written", file=sys.stderr)
        return BAD_REQUEST
    if options.json:
        print_json({"program": options.to, "text": line, "unwritten": list(lost)})
    elif options.output is None:
        print(line)
    if options.output is not None:
        save_text(line + "\n", options.output)
    for what in lost:
        print(f"not in the command line: {what}", file=sys.stderr)
    return 0


def export_file(file: PlanFile, program: str) -> Export:
    """The plan of a plan file as `program` (one of `programs.writable_programs()`) reads it. Errors as reading the plan
    and the writers have them."""
    draft = _writer(program)
    machines = parse_cluster(file.on)
    config, graph = read_config(file.model)
    check(file.plan, graph, machines, file.workload)
    per_node = max(node.count for node in machines.nodes)
    export_request = asked_for(Path(file.model).name, config, graph, file.plan, file.workload, per_node)
    if programs.find(program).finetune_draft is not None:
        name, adapters = parse_adapters(file.model)
        path = str(Path(name).parent) if name.endswith("config.json") else name if Path(name).is_dir() else ""
        base = read_config(name) if adapters is not None else (config, graph)
        software = stack(file.stack) if file.stack else None
        export_request = replace(export_request, model_id=path, base=base[0] or base[1], stack=software)
    export = exported(export_request, draft(export_request))
    if not is_mixed(machines):
        return export
    order = f"the machines in the order of {file.on}: ranks follow it, and the plan gives each kind its own work"
    return replace(export, elsewhere=(order, *export.elsewhere))


def export_job(options: ExportOptions) -> Export:
    """A job file of one program as that of another. Errors as reading the job and the writers have them."""
    draft = _writer(options.to)
    if options.on is None:
        raise InputError(f"{options.plan} is a job file, which is for machines that you name: give --on CLUSTER")
    asked_job = TrainingOptions(model=options.plan, on=options.on, network=options.network, settings=options.settings)
    request = read_request(asked_job)
    machines, job_model = request.cluster, request.graph
    base = None if options.network is None else network(options.network)
    check(request.plan, job_model, machines, request.workload)
    per_node = max(node.count for node in machines.nodes)
    name, adapters = parse_adapters(job_model.name)
    config = None
    if adapters is None and name in CONFIGS and network_graph(CONFIGS[name]()) == job_model:
        config = CONFIGS[name]()
    export_request = asked_for(job_model.name, config, job_model, request.plan, request.workload, per_node)
    if programs.find(options.to).finetune_draft is not None:
        export_request = replace(export_request, base=base, stack=request.stack, model_id=options.network or "")
    return exported(export_request, draft(export_request))


def _writer(program: str) -> Callable[[ExportRequest], Draft]:
    """What writes for a program. InputError for one that there is no export to."""
    found = programs.find(program) if program in programs.names() else None
    draft = None if found is None else found.write or found.finetune_draft
    if draft is None:
        known = programs.exported_to()
        raise InputError(f"no export to {program[:40]!r}{nearest(program[:40], known)}; known: {', '.join(known)}")
    return draft


def _refuse_beside(options: ExportOptions) -> None:
    """InputError for options that go with a job file."""
    if options.network is not None or options.settings:
        raise InputError("--model and --set are for a job file; a plan file says all of it: change it there")


def _check_target(path: str | None, *, force: bool) -> None:
    if path is not None and not force and Path(path).exists():
        raise InputError(f"{path} exists; give another name, or --force to write over it")


def _put(export: Export, path: str | None) -> None:
    if path is None:
        sys.stdout.write(export.text)
    else:
        save_text(export.text, path)


def _summary(export: Export, path: str | None) -> list[str]:
    """What goes to standard error."""
    lines = [f"{export.program}{f' in {path}' if path else ''}"]
    if export.unwritten:
        lines += ["", "not expressed", *(line for one in export.unwritten for line in wrapped(str(one), bullet="- "))]
    if export.additions:
        lines += ["", "done beyond the plan", *(line for one in export.additions for line in wrapped(one, bullet="- "))]
    lines += ["", "to be said elsewhere", *(line for one in export.elsewhere for line in wrapped(one, bullet="- "))]
    return lines


def _mapping(export: Export) -> dict[str, object]:
    return {
        "schema": "gnomon.export/1",
        "program": export.program,
        "text": export.text,
        "unwritten": [
            {"field": one.field, "asked": one.planned, "becomes": one.becomes, "why": one.why}
            for one in export.unwritten
        ],
        "elsewhere": list(export.elsewhere),
        "beyond": list(export.additions),
    }
