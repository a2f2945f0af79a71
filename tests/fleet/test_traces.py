"""Traces of others are read strictly: every row is a job, or is listed, or is an error with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gnomon.errors import InputError
from gnomon.fleet.forecast import Curve
from gnomon.fleet.job import Trace
from gnomon.fleet.machines import check_fits, machines, without_larger
from gnomon.fleet.traces import Reading, parse_trace, read_trace

PLAIN = "job_id,submit_s,duration_s,num_gpus,vc\na,0,10,1,x\nb,5,20,8,y\nc,5,1,0,y\n"
SACCT = """\
JobID|User|Submit|Start|End|State|ReqTRES
1|ann|2026-01-01T00:00:00|2026-01-01T00:01:00|2026-01-01T01:01:00|COMPLETED|billing=8,cpu=8,gres/gpu:a100=4,gres/gpu=4
1.batch||2026-01-01T00:01:00|2026-01-01T00:01:00|2026-01-01T01:01:00|COMPLETED|
2|bob|2026-01-01T00:10:00|Unknown|Unknown|PENDING|gres/gpu=1
3|bob|2026-01-01T00:20:00|2026-01-01T00:20:30|Unknown|RUNNING|gres/gpu=1
4|bob|2026-01-01T00:30:00|2026-01-01T00:30:00|2026-01-01T00:40:00|COMPLETED|cpu=4
5_7|eve|2026-01-01T00:00:30|2026-01-01T00:30:30|2026-01-01T00:30:40|FAILED|gres/gpu:h100-sxm=8
"""


def pod(
    name: str, created: str, started: str | None, finished: str | None, limits: dict[str, str]
) -> dict[str, object]:
    status: dict[str, object] = {"startTime": started} if started else {}
    if finished:
        status["containerStatuses"] = [{"state": {"terminated": {"finishedAt": finished}}}]
    return {
        "metadata": {"name": name, "namespace": "team", "creationTimestamp": created},
        "spec": {"containers": [{"resources": {"limits": limits}}]},
        "status": status,
    }


def read(text: str, **how: object) -> Trace:
    return parse_trace(text, "t", Reading(**how))  # type: ignore[arg-type]


def test_a_plain_table() -> None:
    trace = read(PLAIN)
    assert [(j.id, j.submit_s, j.work_s, j.devices, j.user, j.line) for j in trace.jobs] == [
        ("a", 0.0, 10.0, 1, "x", 2),
        ("b", 5.0, 20.0, 8, "y", 3),
    ]
    assert [(entry.line, entry.reason) for entry in trace.left_out] == [(4, "asks for no device")]


def test_elastic_jobs_slices_and_memory_are_columns() -> None:
    head = "job_id,submit_s,duration_s,num_gpus,min_gpus,max_gpus,slice,memory_gib,model\n"
    [job] = read(head + "a,0,1,4,2,8,,16.5,bert\n").jobs
    assert (job.fewest, job.most, job.elastic, job.memory_bytes, job.model) == (2, 8, True, round(16.5 * 2**30), "bert")
    with pytest.raises(InputError, match="line 2: .* not from min 5 to max 8"):
        read(head + "a,0,1,4,5,8,,,\n")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a,,10,1,x", "line 4: submit_s is missing"),
        ("a,-3,10,1,x", "line 4: submit_s is negative: -3"),
        ("a,1,ten,1,x", "line 4: duration_s is 'ten', not a number"),
        ("a,1,nan,1,x", "line 4: duration_s is nan, not a finite number"),
        ("a,1,1,1.5,x", "line 4: num_gpus is '1.5', not a whole number"),
        ("a,1,1,1", "line 4: 4 cells, but the heading has 5"),
        ("b,1,1,1,x", "line 4: job 'b' is there twice, first in line 2"),
    ],
)
def test_a_mistake_is_named_with_its_line_or_listed(row: str, message: str) -> None:
    text = PLAIN.replace("a,0,10,1,x\n", "").replace("c,5,1,0,y\n", "d,0,1,1,y\n") + row + "\n"
    with pytest.raises(InputError) as error:
        read(text)
    assert message in str(error.value) and "--skip-bad" in str(error.value)
    trace = read(text, skip_bad=True)
    assert [job.id for job in trace.jobs] == ["d", "b"]
    assert message in f"line {trace.left_out[0].line}: {trace.left_out[0].reason}"


def test_sacct() -> None:
    trace = read(SACCT)
    assert [(j.id, j.submit_s, j.work_s, j.devices, j.device) for j in trace.jobs] == [
        ("1", 0.0, 3600.0, 4, "a100"),
        ("5_7", 30.0, 10.0, 8, "h100-sxm"),
    ]
    assert [entry.line for entry in trace.left_out] == [3, 4, 5, 6]
    assert "never started (PENDING)" in trace.left_out[1].reason
    late = SACCT.replace("2026-01-01T01:01:00|COMPLETED|billing", "2025-12-31T00:00:00|COMPLETED|billing")
    with pytest.raises(InputError, match="line 2: it ends 86460 s before it starts"):
        read(late)


def test_pods_of_kubernetes() -> None:
    pods = [
        pod("a", "2026-01-01T00:00:00Z", "2026-01-01T00:00:05Z", "2026-01-01T00:01:05Z", {"nvidia.com/gpu": "2"}),
        pod("b", "2026-01-01T00:00:10Z", "2026-01-01T00:00:15Z", None, {"nvidia.com/gpu": "1"}),
        pod("c", "2026-01-01T00:00:10Z", None, None, {"nvidia.com/gpu": "1"}),
        pod("d", "2026-01-01T00:00:10Z", "2026-01-01T00:00:15Z", "2026-01-01T00:00:16Z", {"cpu": "1"}),
        pod(
            "e", "2026-01-01T00:00:20Z", "2026-01-01T00:00:20Z", "2026-01-01T00:00:30Z", {"nvidia.com/mig-3g.20gb": "1"}
        ),
    ]
    trace = read(json.dumps({"items": pods}))
    assert [(j.id, j.work_s, j.devices, j.slice) for j in trace.jobs] == [
        ("team/a", 60.0, 2, ""),
        ("team/e", 10.0, 3, "3g.20gb"),
    ]
    assert [entry.reason.split(" ", 2)[2] for entry in trace.left_out] == ["still runs", "never started", "uses no GPU"]


def test_events_of_kubernetes() -> None:
    head = "time,pod,event,gpus\n"
    good = "0,a,created,2\n1,b,created,1\n3,a,started,2\n4,a,finished,2\n"
    trace = read(head + good)
    assert [(j.id, j.submit_s, j.work_s, j.devices) for j in trace.jobs] == [("a", 0.0, 1.0, 2)]
    assert trace.left_out[0].reason == "pod b never started"
    with pytest.raises(InputError, match="line 5: pod 'a' starts while it already runs"):
        read(head + "0,a,created,2\n3,a,started,2\n3,c,created,1\n3.5,a,started,2\n4,a,finished,2\n")


def test_tiresias_gavel_and_pollux() -> None:
    head = "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n"
    assert read(head + "0,8,30,133,vgg11,147,23\n").jobs[0].model == "vgg11"
    line = "ResNet-18 (batch size 16)\tpython3 main.py\t--num_steps\t1\t3000\t2\t1\t-1.0\t60\n"
    with pytest.raises(InputError, match="line 1: steps a second of 'ResNet-18 .*--points"):
        read(line)
    trace = read(line, duration=lambda model, devices, batch, steps: steps / 10 / devices)
    assert [(j.work_s, j.devices, j.submit_s) for j in trace.jobs] == [(150.0, 2, 60.0)]
    head = "workload,name,submit_s,application,num_replicas,batch_size\n"
    rows = "1,a-0,107,bert,6,48\n2,a-0,9,bert,6,48\n"
    with pytest.raises(InputError, match="holds workloads 1 to 2; say which with --workload"):
        read(head + rows, duration=lambda *_: 5.0)
    [job] = read(head + rows, duration=lambda *_: 5.0, workload=2).jobs
    assert (job.id, job.submit_s, job.model, job.batch_size) == ("a-0", 9.0, "bert", 48)


def test_what_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is of no trace that is known"):
        read("a,b\n1,2\n")
    with pytest.raises(InputError, match="cannot read trace"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(InputError, match="no job that can be replayed: 1 row left out"):
        read("job_id,submit_s,duration_s,num_gpus\na,0,1,0\n")
    with pytest.raises(InputError, match="line 1: column 'vc' is there twice"):
        read(PLAIN.replace("num_gpus,vc", "num_gpus,vc,vc"))
    with pytest.raises(InputError, match="line 1: not JSON"):
        read("{")


def test_jobs_larger_than_the_cluster_and_unknown_devices() -> None:
    small = machines("1x4xv100-sxm-32gb")
    with pytest.raises(InputError, match="line 3: job 'b' needs 8 devices, but 1 x 4 v100-sxm-32gb has 4"):
        check_fits(read(PLAIN), small, Curve(small).memory_bytes)
    kept, larger = without_larger(read(PLAIN), small, Curve(small).memory_bytes)
    assert [job.id for job in kept.jobs] == ["a"] and [job.id for job in larger] == ["b"]
    # What inference lends counts for both: a job that one pool of it could hold is neither an error nor left out.
    lent = machines("1x4xv100-sxm-32gb", inference="1x8xv100-sxm-32gb")
    check_fits(read(PLAIN), lent, Curve(lent).memory_bytes)
    assert without_larger(read(PLAIN), lent, Curve(lent).memory_bytes)[1] == ()
    odd = "job_id,submit_s,duration_s,num_gpus,device\na,0,1,1,v100-smx-32gb\n"
    with pytest.raises(InputError, match="line 2: job 'a' is of device 'v100-smx-32gb'.*v100-sxm-32gb"):
        check_fits(read(odd), small, Curve(small).memory_bytes)
