"""`gnomon calibrate --from RUNS`: a stack file from a few measured runs of the user's own.

`run(options)` reads `options.runs`, a table as `gnomon validate` reads it, or plan files that say what was measured,
as `gnomon plan --try` leaves them, fits the stack's numbers, writes `options.output` and prints what changed; 0 when it
is written. Leaves out measuring this machine (`cli.calibrate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gnomon import schema
from gnomon.cli.options.tools import CalibrateOptions
from gnomon.cli.own_runs import fit_runs, read_own
from gnomon.cli.runs_table import read_runs
from gnomon.cli.terminal import print_json, print_lines
from gnomon.cli.values import not_writable
from gnomon.errors import InputError
from gnomon.report.own_runs import FEW, OwnFit
from gnomon.report.tables import Column, percent, table, wrapped

SHOWN = 20
"""Runs and refusals shown."""


def run(options: CalibrateOptions) -> int:
    """Read, fit, write, print."""
    assert options.runs is not None, "chosen by its option"
    source = Path(options.runs)
    if problem := not_writable(Path(options.output or "own.toml")):
        raise InputError(
            f"cannot write {options.output or 'to this folder'!r}: {problem}; choose another place with -o"
        )
    own = source.is_dir() or source.suffix == ".toml"
    runs, refused = read_own(source) if own else (read_runs(source), ())
    if not runs:
        why = f": {refused[0].id}: {refused[0].reason}" if refused else ""
        raise InputError(f"nothing in {str(source)!r} can be read as a run{why}")
    fit = fit_runs(runs, source.name)
    target = Path(options.output or f"{fit.stack.name}-own.toml")
    schema.save_file(fit.stack, target)
    not_fitted = (*refused, *fit.refused)
    if options.json:
        rows = [{"id": r.id, "before": b, "after": a} for r, b, a in zip(fit.runs, fit.before, fit.after, strict=True)]
        print_json(
            {
                "schema": "gnomon.own_runs/1",
                "file": str(target),
                "stack": fit.stack.name,
                "factors": dict(fit.factors),
                "runs": rows,
                "left_out": list(fit.left_out),
                "refused": [{"id": r.id, "reason": r.reason} for r in not_fitted],
            }
        )
    else:
        print_lines(_text(fit, [f"{r.id}: {r.reason}" for r in not_fitted], target))
    return 0


def _text(fit: OwnFit, refused: Sequence[str], target: Path) -> Sequence[str]:
    columns = (Column(name="run", align="left"), *(Column(name=n) for n in ("measured s", "before %", "after %")))
    rows = [
        (run.id, f"{run.step_s:.4g}", percent(before), percent(after))
        for run, before, after in zip(fit.runs, fit.before, fit.after, strict=True)
    ]
    lines = [*table(columns, rows[:SHOWN])]
    if len(rows) > SHOWN:
        lines.append(f"… and {len(rows) - SHOWN} more")
    lines += ["", *wrapped(fit.stack.own.error if fit.stack.own else "", indent="")]
    factors_text = ", ".join(f"{what} {factor:.3g}" for what, factor in fit.factors)
    lines += wrapped(f"time of {factors_text} of what is on record for {fit.stack.name!r}", indent="")
    if len(fit.runs) < FEW:
        lines += wrapped(f"{len(fit.runs)} runs say little: the numbers stay near those on record", indent="")
    if refused:
        lines += [
            "",
            f"not used: {len(refused)} rows",
            *(li for r in refused[:SHOWN] for li in wrapped(r, bullet="- ")),
        ]
    lines += ["", f"wrote {target}; use it as --stack {target}"]
    return lines
