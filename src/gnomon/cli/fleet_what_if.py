"""`gnomon fleet what-if`: the same jobs with more machines, or under another policy, and what each would cost.

`run(options)` prints a table and the answer in a sentence. Leaves out the replay.
"""

from __future__ import annotations

from collections.abc import Sequence

from gnomon.cli.fleet_play import played, policies_of
from gnomon.cli.fleet_request import request_of
from gnomon.cli.options.fleet import WhatIfOptions
from gnomon.cli.terminal import print_json, print_lines
from gnomon.errors import InputError
from gnomon.fleet.result import Result
from gnomon.hardware.rent import ANY, rent
from gnomon.hardware.specs import parse_cluster
from gnomon.report.tables import Column, number, percent, table, wrapped


def run(options: WhatIfOptions) -> int:
    """The cluster as it is, with more machines, and under other policies."""
    if not options.add and not options.compare:
        raise InputError("what-if needs --add CLUSTER, --compare POLICIES, or both")
    chosen = policies_of(options)
    specs = [options.on] + ([f"{options.on}+{options.add}"] if options.add else [])
    cases = []
    for spec in specs:
        what = request_of(options, on=spec)
        cases += [(spec, what, result) for result in played(what, chosen)]
    base = cases[0][2].figures()
    rows = [(spec, result, _rent(spec, options), result.figures()) for spec, _, result in cases]
    if options.json:
        print_json([{"on": spec, "policy": r.policy, "dollars_per_hour": rent, **f} for spec, r, rent, f in rows])
        return 0
    columns = (
        Column(name="machines", align="left"),
        Column(name="policy", align="left"),
        *(Column(name=n) for n in ("JCT mean h", "p99 h", "queue h", "used %", "$ an hour", "JCT against first")),
    )
    lines = table(
        columns,
        [
            (
                spec,
                r.policy,
                *(number(f[key] / 3600) for key in ("jct_mean_s", "jct_p99_s", "queue_mean_s")),
                percent(f["utilisation"]),
                "-" if rent is None else f"{rent:,.0f}",
                f"{base['jct_mean_s'] / f['jct_mean_s']:.2f} x",
            )
            for spec, r, rent, f in rows
        ],
        width=120,
    )
    notes = [*cases[-1][1].notes, *_rents(specs[-1], options)]
    bullets = [line for note in notes for line in wrapped(note, bullet="- ")]
    print_lines([*lines, "", *wrapped(_answer(rows), indent=""), "", "assumed", *bullets])
    return 0


def _answer(rows: Sequence[tuple[str, Result, float | None, dict[str, float]]]) -> str:
    """One sentence that says which shortens jobs more: other machines or another policy."""
    first = rows[0]
    base = first[3]["jct_mean_s"]
    same = [row for row in rows if row[0] == first[0] and row[1].policy != first[1].policy]
    other_rows = [row for row in rows if row[0] != first[0] and row[1].policy == first[1].policy]
    parts = []
    if same:
        best = min(same, key=lambda row: row[3]["jct_mean_s"])
        parts.append(f"policy {best[1].policy} in place of {first[1].policy}: {base / best[3]['jct_mean_s']:.2f} x")
    if other_rows:
        price = (
            ""
            if other_rows[0][2] is None or first[2] is None
            else f" for ${other_rows[0][2] - first[2]:,.0f} an hour more"
        )
        parts.append(f"more machines under {first[1].policy}: {base / other_rows[0][3]['jct_mean_s']:.2f} x{price}")
    return "mean JCT is shorter by: " + "; ".join(parts)


def _prices(options: WhatIfOptions) -> dict[str, float]:
    return {ANY: options.price} if options.price is not None else {}


def _rent(spec: str, options: WhatIfOptions) -> float | None:
    paid = rent(parse_cluster(spec), _prices(options))
    return None if paid is None else paid.dollars_per_hour


def _rents(spec: str, options: WhatIfOptions) -> tuple[str, ...]:
    paid = rent(parse_cluster(spec), _prices(options))
    return ("no public price of some device: give --price",) if paid is None else paid.sources
