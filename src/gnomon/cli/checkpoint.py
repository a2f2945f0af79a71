"""`gnomon checkpoint`: what a checkpoint is of, whether it is whole, the same for another plan, its weights.

`run(options)` does the action that was asked for on PATH, a checkpoint or a folder of them (then on the newest whole
one), and returns 0; `verify` returns 1 where something is damaged. Nothing is unpickled. Leaves out going on from one,
which `gnomon run --resume` does under any plan.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from gnomon.cli.missing import need_torch
from gnomon.cli.models import read_model_to_run
from gnomon.cli.options.checkpoint import (
    CheckpointOptions,
    ConvertOptions,
    ExportHfOptions,
    InspectOptions,
    VerifyOptions,
)
from gnomon.cli.run import read_plan
from gnomon.cli.terminal import print_json, print_lines
from gnomon.errors import InputError
from gnomon.late import load_late
from gnomon.report.tables import Column, number, table, wrapped
from gnomon.units import show_bytes

WHOLE, DAMAGED = 0, 1
SCHEMA = "gnomon.checkpoint.report/1"


def run(options: CheckpointOptions) -> int:
    """Do what is asked."""
    need_torch("reading a checkpoint")
    return _ACTIONS[type(options)](options)


def _found(name: str, *, all_of_them: bool = False) -> list[Path]:
    """The checkpoint that is meant, or all of a folder. InputError where there is none."""
    path = Path(name).expanduser()
    there: Sequence[Path] = load_late("gnomon.runtime.checkpoint.record:checkpoints")(path)
    if (path / "gnomon.json").exists() or (all_of_them and not there and path.is_dir() and any(path.iterdir())):
        return [path]
    if all_of_them and there:
        return list(there)
    newest: Path | None = load_late("gnomon.runtime.checkpoint.record:newest")(path)
    if newest is None:
        what = f"none of the {len(there)} checkpoints in it is whole" if there else "there is no checkpoint in it"
        raise InputError(f"{path}: {what}; give a folder step-000120 of gnomon run --checkpoints, or the one above it")
    return [newest]


def _inspect(options: InspectOptions) -> int:
    (path,) = _found(options.path)
    record = load_late("gnomon.runtime.checkpoint.record:read_record")(path)
    reader = load_late("gnomon.runtime.checkpoint.files:Reader")(path, record)
    kinds = load_late("gnomon.runtime.checkpoint.convert:contents")(reader)
    if options.json:
        print_json(
            {
                "schema": SCHEMA,
                "path": str(path),
                "step": record.step,
                "updates": record.updates,
                "plan": record.plan,
                "source": record.source,
                "identity": dict(record.identity),
                "files": {file.name: file.bytes for file in record.files},
                "contents": {kind: {"tensors": count, "bytes": size} for kind, (count, size) in kinds.items()},
            }
        )
        return WHOLE
    columns = (Column(name="", align="left"), Column(name="tensors"), Column(name="size", align="right"))
    rows = [(kind, f"{count:,}", show_bytes(size)) for kind, (count, size) in sorted(kinds.items())]
    total = sum(file.bytes for file in record.files)
    print_lines(
        (
            f"{path}: step {record.step:,}, {record.updates:,} updates",
            f"written by {len(record.files)} rank{'s' if len(record.files) > 1 else ''} ({record.plan}), "
            f"{show_bytes(total)}",
            "",
            *table(columns, rows),
            "",
            *(
                line
                for name, text in record.identity.items()
                for line in wrapped(f"{name}: {plain(text)}", bullet="- ")
            ),
        )
    )
    return WHOLE


def plain(text: str) -> str:
    """A value of the identity for people: `X(a='b', c=Y(d=1))` becomes `a b, c (d 1)`; other text stays as it is."""
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text
    return _fields(tree) if isinstance(tree, ast.Call) else text


def _fields(call: ast.Call) -> str:
    values = [(word.arg or "", word.value) for word in call.keywords]
    return ", ".join(f"{name} {_value(value)}" for name, value in values)


def _value(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return f"({_fields(node)})"
    if isinstance(node, ast.Tuple | ast.List):
        return " and ".join(_value(one) for one in node.elts) or "none"
    if isinstance(node, ast.Constant):
        words = {"None": "none", "True": "yes", "False": "no"}
        return words.get(repr(node.value), str(node.value))
    return ast.unparse(node)


def _verify(options: VerifyOptions) -> int:
    problems = {path: _problems(path) for path in _found(options.path, all_of_them=True)}
    if options.json:
        checkpoints = [{"path": str(path), "problems": damage} for path, damage in problems.items()]
        print_json({"schema": SCHEMA, "checkpoints": checkpoints})
    else:
        for path, damage in problems.items():
            print_lines(wrapped(f"{path}: whole, every tensor has its checksum", indent="") if not damage else damage)
    return DAMAGED if any(problems.values()) else WHOLE


def _problems(path: Path) -> list[str]:
    """What is damaged, or does not fit together."""
    problems: list[str] = load_late("gnomon.runtime.checkpoint.files:problems_of")(path)
    if problems:
        return problems
    try:
        record = load_late("gnomon.runtime.checkpoint.record:read_record")(path)
        load_late("gnomon.runtime.checkpoint.files:Reader")(path, record)
    except InputError as error:
        return [str(error)]
    return []


def _to_form(options: ConvertOptions, form: str) -> int:
    """A folder of quantised weights as another program stores them."""
    if options.dry_run:
        raise InputError("--dry-run says what a conversion to another plan takes; leave it out with --to")
    source, target = Path(options.path).expanduser(), Path(options.output).expanduser()
    if form == "gguf":
        return _to_gguf(options, source, target)
    by = "gguf_folder:from_gguf" if source.suffix == ".gguf" else "forms:convert"
    converted: Any = load_late(f"gnomon.runtime.checkpoint.{by}")(source, target, form)
    if options.json:
        print_json(
            {
                "schema": SCHEMA,
                "written": str(target),
                "from": converted.before,
                "to": form,
                "layers": converted.layers,
                "storages": list(converted.storages),
                "bytes_before": converted.bytes_before,
                "bytes_after": converted.bytes_after,
            }
        )
    else:
        what = "tensors" if converted.before == "GGUF" else "linears"
        print_lines(
            wrapped(
                f"{target}: {converted.layers} {what} of {converted.before} ({', '.join(converted.storages)}) "
                f"as {form}, each number "
                f"the same; {show_bytes(converted.bytes_before)} -> {show_bytes(converted.bytes_after)}",
                indent="",
            )
        )
    return WHOLE


def _to_gguf(options: ConvertOptions, source: Path, target: Path) -> int:
    """A folder of weights as one GGUF file."""
    converted: Any = load_late("gnomon.runtime.checkpoint.gguf:to_gguf")(source, target)
    if options.json:
        mapping = {"schema": SCHEMA, "written": str(target), "to": "gguf", "tensors": dict(converted.kinds)}
        print_json({**mapping, "bytes_before": converted.bytes_before, "bytes_after": converted.bytes_after})
        return WHOLE
    kinds = ", ".join(f"{count} {kind}" for kind, count in converted.kinds.items())
    print_lines(
        wrapped(
            f"{target}: {kinds}, each number the same; {show_bytes(converted.bytes_before)} -> "
            f"{show_bytes(converted.bytes_after)}; without a tokenizer, so that llama.cpp takes token ids alone",
            indent="",
        )
    )
    return WHOLE


def _convert(options: ConvertOptions) -> int:
    if (options.plan is None) == (options.to is None):
        raise InputError(
            "give --plan PLAN.toml for a checkpoint's ranks, or --to gptq, awq, compressed-tensors, fp32, bf16 or fp16 "
            "for a folder of quantised weights, or --to gguf for any folder: one of them"
        )
    if options.to is not None:
        return _to_form(options, options.to)
    assert options.plan is not None
    (path,) = _found(options.path)
    file = read_plan(options.plan)
    graph, _ = read_model_to_run(file.model)
    cost: Any = load_late("gnomon.runtime.checkpoint.convert:preview")(graph, file.plan)
    preview = {
        "path": str(path),
        "bytes": cost.nbytes,
        "parts": cost.parts,
        "files": len(cost.files),
        "seconds": cost.seconds,
        "memory_bytes": cost.memory_bytes,
    }
    if not options.json:
        print_lines(
            wrapped(
                f"{path} for {file.plan.mesh.describe()}: {show_bytes(cost.nbytes)} to read and to write in "
                f"{cost.parts:,} parts and {len(cost.files)} files; about {number(cost.seconds)} s, "
                f"{show_bytes(cost.memory_bytes)} of memory",
                indent="",
            )
        )
        # The preview is to be read while the conversion runs.
        sys.stdout.flush()
    if options.dry_run:
        if options.json:
            print_json({"schema": SCHEMA, "preview": preview})
        return WHOLE
    if problems := _problems(path):
        raise InputError(f"{problems[0]}; it is not converted")
    began, target = perf_counter(), Path(options.output).expanduser()
    done = load_late("gnomon.runtime.checkpoint.convert:convert")(
        path, target, graph, file.plan, file.workload, say=_progress
    )
    took = perf_counter() - began
    if options.json:
        print_json({"schema": SCHEMA, "preview": preview, "written": str(done), "took_s": took})
    else:
        print_lines((f"wrote {done} in {number(took)} s",))
    return WHOLE


def _progress(done: int, ranks: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done}/{ranks} files", end="\n" if done == ranks else "", file=sys.stderr, flush=True)


def _export(options: ExportHfOptions) -> int:
    (path,) = _found(options.path)
    model, target = _model_of(path, options.model), Path(options.output).expanduser()
    if problems := _problems(path):
        raise InputError(f"{problems[0]}; it is not exported")
    count = load_late("gnomon.runtime.checkpoint.pretrained:export_checkpoint")(path, target, model=model)
    if options.json:
        print_json({"schema": SCHEMA, "path": str(path), "written": str(target), "parameters": count})
    else:
        print_lines((f"wrote {target}: {count:,} parameters of {path}, as safetensors with config.json",))
    return WHOLE


def _model_of(path: Path, type_name: str | None) -> Path:
    """Whose layout and config.json the export has: what is asked, or what the run read. InputError where the checkpoint
    names none, or one that is gone."""
    if type_name is not None:
        return Path(type_name).expanduser()
    source: str | None = load_late("gnomon.runtime.checkpoint.record:read_record")(path).source
    if source is None:
        raise InputError(f"{path} does not say which folder its model was read from; give it with --model FOLDER")
    if not Path(source).exists():
        raise InputError(f"the model of {path} was read from {source}, which is gone; give it with --model FOLDER")
    return Path(source)


_ACTIONS: Mapping[type[CheckpointOptions], Callable[[Any], int]] = {
    InspectOptions: _inspect,
    VerifyOptions: _verify,
    ConvertOptions: _convert,
    ExportHfOptions: _export,
}
