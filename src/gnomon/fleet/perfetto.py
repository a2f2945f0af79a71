"""A replay as a trace for ui.perfetto.dev: nodes are processes, jobs spans on them, the queue and devices counters.

`fleet_trace(result)` returns the JSON object of the Trace Event Format. A second of the replay is one of the trace.
"""

from __future__ import annotations

from typing import Any

from gnomon.fleet.result import Result

# Perfetto's times are in microseconds.
_US = 1e6


def fleet_trace(result: Result) -> dict[str, Any]:
    """A recorded replay as a trace for Perfetto. Spans of a node that overlap are on threads of their own."""
    names: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    ends: dict[int, list[float]] = {}
    for run in sorted(result.runs, key=lambda run: (run.start_s, run.index)):
        job = result.jobs[run.index]
        for node, count in run.allocation:
            threads = ends.setdefault(node, [])
            # Runs come by their start, so that the first free thread makes as few threads as runs overlap.
            thread = next((t for t, end in enumerate(threads) if end <= run.start_s), len(threads))
            if thread == len(threads):
                threads.append(0.0)
            threads[thread] = run.end_s
            events.append(
                {
                    "ph": "X",
                    "name": job.id,
                    "cat": run.why,
                    "pid": node + 1,
                    "tid": thread + 1,
                    "ts": run.start_s * _US,
                    "dur": (run.end_s - run.start_s) * _US,
                    "args": {"devices": count, "of": job.devices, "ended": run.why, "user": job.user},
                }
            )
    for node in sorted(ends):
        pool = result.machines.pools[result.machines.pool_of[node]]
        text = f"node {node} ({pool.per_node} {pool.device})"
        names.append({"ph": "M", "name": "process_name", "pid": node + 1, "tid": 0, "args": {"name": text}})
    if result.series is not None:
        names.append({"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "cluster"}})
        s = result.series
        for time, busy, waiting in zip(s.time_s.tolist(), s.busy.tolist(), s.waiting.tolist(), strict=True):
            counters = {"devices in use": busy, "jobs that wait": waiting}
            events += [
                {"ph": "C", "name": name, "pid": 0, "tid": 0, "ts": time * _US, "args": {"value": value}}
                for name, value in counters.items()
            ]
    events.sort(key=lambda event: (event["ts"], event["ph"]))
    about = {"writer": "gnomon", "policy": result.policy, "cluster": result.machines.text}
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms", "otherData": about}
