"""Peak memory against measurements: by feature, by family and metric, and verdicts on jobs that ran or did not.

    python -m evidence.fits.memory TINY.csv [RUNS.csv]     # about 1 minute; prints the tables kept in results/memory.md

TINY.csv: Megatron-LM's functional tests with torch's exact peak of allocated bytes. RUNS.csv: published runs; every
fifth row of the largest family. Errors are predicted over measured, less 1, in %. What a row of TINY.csv lacks is
filled in as its own tests have it: 8 devices, or 4 where the test's name says one node of four; an A100 where no device
is named. Rows of nanotron do not say whether their collectives were checked, so that the host could not run ahead:
their second line takes the nearer of the two. Out-of-memory cases: tests/evidence/data/out_of_memory.csv and
out_of_memory_jobs.toml, from public threads and pages.
"""

from __future__ import annotations

import csv
import io
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from evidence.published import Row, Run, read_table, to_run
from evidence.published.fitted_reading import fitted_reading
from evidence.validation import Score, predicted_bytes, score
from gnomon.errors import GnomonError
from gnomon.formats.job import with_job_fields
from gnomon.formats.torchtitan.read import read_torchtitan
from gnomon.hardware import parse_cluster
from gnomon.prediction import Prediction, predict

DATA = Path(__file__).parents[2] / "tests/evidence/data"
CASES, JOBS = DATA / "out_of_memory.csv", DATA / "out_of_memory_jobs.toml"
FEATURES = ("model", "tp", "pp", "cp", "ep", "vpp", "zero_or_fsdp", "recompute", "sequence_parallel", "precision")


def main(tiny: str, published: str | None) -> None:
    """Print every table."""
    exact(Path(tiny))
    if published is not None:
        families(Path(published))
    verdicts()


def completed(row: Row) -> Row:
    """A functional test's row with what its tests have in common."""
    devices = row.num_devices or (4 if "1node" in (row.section or "") else 8)
    return replace(row, num_devices=devices, devices_per_node=row.devices_per_node or 8)


def exact(path: Path) -> None:
    """Errors of allocated bytes by feature."""
    text = path.read_text(encoding="utf-8")
    rows, _ = read_table(text)
    rows = (*rows, *_without_device(path))
    collected: list[tuple[Row, float]] = []
    left: dict[str, int] = defaultdict(int)
    known: dict[str, Prediction] = {}
    for row in rows:
        if row.mem_gib is None:
            left["no memory given"] += 1
            continue
        try:
            collected.append((row, allocated(to_run(completed(row)), known) / 2**30 / row.mem_gib - 1))
        except GnomonError as error:
            left[str(error)[:70]] += 1
    line("all", [error for _, error in collected])
    for feature in FEATURES:
        groups: dict[str, list[float]] = defaultdict(list)
        for row, error in collected:
            groups[str(getattr(row, feature))].append(error)
        for name, errors in sorted(groups.items()):
            line(f"{feature} {name}", errors)
    print(f"not predicted: {sum(left.values())}", dict(left))


def _without_device(path: Path) -> tuple[Row, ...]:
    """Rows that the reader refuses because no device is named."""
    with path.open(newline="", encoding="utf-8") as file:
        kept = list(csv.DictReader(file))
    lines = [",".join(kept[0])]
    for values in kept:
        if not values["device"]:
            values["device"] = "a100-sxm-80gb"
            lines.append(",".join(f'"{text}"' for text in values.values()))
    return read_table("\n".join(lines))[0]


def allocated(run: Run, known: dict[str, Prediction]) -> int:
    """Allocated bytes of the rank that the row is of."""
    key = f"{run.model}{run.plan}{run.workload}{run.stack}{run.cluster.name}"
    if key not in known:
        known[key] = predict(run.graph, run.cluster, run.plan, run.workload, run.stack)
    return max(m.allocated_bytes for m in known[key].memory if run.memory_rank is None or run.memory_rank in m.ranks)


def families(path: Path) -> None:
    """Errors by family and metric; runs that ran and are said not to fit."""
    rows, _ = read_table(path)
    seen: dict[str, int] = defaultdict(int)
    errors: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        seen[row.family] += 1
        if row.mem_gib is None or (row.family.startswith("nanotron") and seen[row.family] % 5):
            continue
        try:
            run = to_run(row)
        except GnomonError:
            continue
        result = score(run)
        if isinstance(result, Score) and result.memory_error is not None:
            name = f"{row.family} ({run.memory_metric})"
            errors[name].append(result.memory_error)
            if row.family.startswith("nanotron"):
                both = (result.memory_error, other_reading(fitted_reading(run)[0]))
                errors[f"{name}, nearer of two"].append(min(both, key=abs))
    for name, values in sorted(errors.items()):
        line(name, values)


def other_reading(run: Run) -> float:
    """The error of a run's peak with checked collectives where they are not read, and without where they are."""
    if run.stack.launch.checked_collectives:
        facts = tuple(fact for fact in run.stack.facts if fact.field != "checked_collectives")
        other = run.stack.with_values(facts, checked_collectives=None)
    else:
        other = with_job_fields(run.stack, "the other reading", checked_collectives=True)
    prediction = predict(run.graph, run.cluster, run.plan, run.workload, other)
    return predicted_bytes(run, prediction) / (run.memory_bytes or 1) - 1


BLIND = (
    ("written down blind in the night", "automodel-2673"),
    ("written down blind, complete", "torchtitan-1690-f4t8-16"),
)
"""(what the cases from there on are, the first of them in out_of_memory.csv)."""


def verdicts() -> None:
    """Every out-of-memory case and the cases beside them that fit; then how many are called, of all, of those whose
    source says all that decides, and of those written down before any was predicted."""
    counts: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    blind = "before"
    for case, entry in cases():
        blind = next((name for name, first in BLIND if first == case["id"]), blind)
        if "file" in case:
            blind = "before"
        lacks = case.get("lacks", "")
        for group in ("all", "lacking" if lacks else "complete", blind):
            counts[group][case["verdict"]].append(entry.tightest.verdict)
        print(f"{case['id']:<28} {case['verdict']:<5} {entry.verdict}" + (f" [lacks {lacks}]" if lacks else ""))
    for group, of in counts.items():
        message = {verdict: {word: words.count(word) for word in sorted(set(words))} for verdict, words in of.items()}
        called = of["oom"].count("does not fit") / max(len(of["oom"]), 1)
        print(f"{group}: {len(of['oom'])} ran out, {100 * called:.0f} % called; {len(of['fits'])} ran; {message}")


def cases() -> Iterable[tuple[dict[str, str], Prediction]]:
    """(case, its prediction). No time was published for them: `value` is only there because a row must have one."""
    with CASES.open(newline="", encoding="utf-8") as file:
        for case in csv.DictReader(file):
            values = {
                name: text for name, text in case.items() if name not in ("verdict", "stated", "assumed", "lacks")
            }
            text = io.StringIO()
            table = csv.writer(text)
            table.writerow([*values, "family", "metric", "value"])
            table.writerow([*values.values(), "oom", "s_per_step", "1"])
            (row,), _ = read_table(text.getvalue())
            run = to_run(row)
            yield case, predict(run.graph, run.cluster, run.plan, run.workload, run.stack)
    for case in tomllib.loads(JOBS.read_text(encoding="utf-8"))["cases"]:
        cluster = parse_cluster(case["on"])
        job = read_torchtitan(case["file"], devices=cluster.num_devices)
        yield case, predict(job.graph(), cluster, job.plan, job.workload, job.stack)


def line(name: str, errors: list[float]) -> None:
    """One line of a table."""
    sizes = 100 * np.abs(errors)
    if len(sizes):
        median, p90, worst = np.median(sizes), np.percentile(sizes, 90), np.max(sizes)
        print(f"{name:<48} {len(sizes):>4} {median:>6.1f} {p90:>6.1f} {worst:>6.1f} {100 * np.median(errors):>+6.1f}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
