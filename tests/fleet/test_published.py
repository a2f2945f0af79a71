"""Traces in the form in which their authors publish them: small ones of our own making."""

from __future__ import annotations

import json
import math

import pytest

from gnomon.errors import InputError
from gnomon.fleet.job import Trace
from gnomon.fleet.traces import FORMATS, Reading, parse_trace

HELIOS = """\
job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue
11,uA,vcX,1,1,1,COMPLETED,2020-06-09 18:00:00,2020-06-09 18:00:10,2020-06-09 19:00:10,3600,10
12,uB,vcY,4,16,1,FAILED,2020-06-09 18:01:00,2020-06-09 18:01:00,2020-06-09 18:01:49,49,0
13,uB,vcY,0,16,1,COMPLETED,2020-06-09 18:01:00,2020-06-09 18:01:00,2020-06-09 18:01:49,49,0
14,uB,vcY,2,16,1,CANCELLED,2020-06-09 18:01:00,None,2020-06-09 18:01:49,0,49
"""
KALOS = """\
job_id,user,node_num,gpu_num,cpu_num,mem_per_pod_GB,shared_mem_per_pod,type,state,submit_time,start_time,end_time,\
fail_time,stop_time,duration,queue,gpu_time
dlc1,uf,8,64,960,1000,100.0,Other,FAILED,2023-05-17 11:00:58+00:00,2023-05-17 11:01:08+00:00,\
2023-05-17 11:01:16+00:00,2023-05-17 11:01:16+00:00,,18,10.0,1152.0
"""
TIMES = """\
timestamp,duration,num_gpus,gpu_time,cluster
2017-10-09 07:01:55,66.0,1,66.0,aa
2017-10-09 06:01:55,30.0,8,240.0,bb
"""
DLRM = """\
instance_sn,role,app_name,cpu_request,cpu_limit,gpu_request,gpu_limit,rdma_request,rdma_limit,memory_request,\
memory_limit,disk_request,disk_limit,max_instance_per_node,creation_time,scheduled_time,deletion_time
instance_0,HN,app_0,12,12,1,1,25,25,120.0,120.0,680.0,800.0,8,,,
instance_1,HN,app_0,12,12,1,1,25,25,120.0,120.0,680.0,800.0,8,,,500.0
instance_2,HN,app_1,12,12,2,2,25,25,120.0,120.0,680.0,800.0,8,100.0,110.0,400.0
instance_3,CN,app_1,64,64,0,0,1,1,320.0,320.0,255.0,300.0,-1,100.0,100.0,200.0
instance_4,HN,app_1,12,12,2,2,25,25,120.0,120.0,680.0,800.0,8,100.0,,400.0
"""
PAI = """\
j1,tensorflow,1.0,Terminated,1000.0,1100.0,600.0,29.3,100.0,MISC
j2,ps,2.0,Terminated,1010.0,1200.0,600.0,29.3,,
j2,worker,4.0,Terminated,1020.0,1250.0,600.0,29.3,200.0,V100
j3,tensorflow,1.0,Terminated,1030.0,1040.0,600.0,29.3,25.0,T4
j4,worker,2.0,Terminated,1030.0,1040.0,600.0,29.3,50.0,T4
j5,worker,1.0,Running,1030.0,,600.0,29.3,100.0,T4
j6,worker,1.0,Terminated,1030.0,1040.0,600.0,29.3,0.0,T4
"""


def attempt(start: str | None, end: str | None, *machines: int) -> dict[str, object]:
    detail = [{"ip": f"m{i}", "gpus": [f"gpu{n}" for n in range(count)]} for i, count in enumerate(machines)]
    return {"start_time": start, "end_time": end, "detail": detail}


PHILLY = json.dumps(
    [
        {
            "status": "Pass", "vc": "v", "jobid": "application_1", "user": "u",
            "submitted_time": "2017-10-07 01:00:30",
            "attempts": [
                attempt("2017-10-07 01:01:00", "2017-10-07 01:02:00", 8),
                attempt("2017-10-07 01:05:00", "2017-10-07 02:05:00", 8, 4),
            ],
        },
        {"status": "Killed", "vc": "v", "jobid": "application_2", "attempts": [], "user": "u",
         "submitted_time": "2017-10-07 01:00:00"},
        {"status": "Pass", "vc": "v", "jobid": "application_3", "submitted_time": "2017-10-07 01:00:00", "user": "u",
         "attempts": [attempt("2017-10-07 01:00:00", None, 1)]},
        {"status": "Pass", "vc": "w", "jobid": "application_4", "submitted_time": "2017-10-07 01:00:00", "user": "u",
         "attempts": [attempt("2017-10-07 01:00:00", "2017-10-07 01:00:01", 1)]},
    ],
    indent=1,
)  # fmt: skip


def read(text: str, **how: object) -> Trace:
    return parse_trace(text, "t", Reading(**how))  # type: ignore[arg-type]


def jobs(trace: Trace) -> list[tuple[str, float, float, int]]:
    return [(job.id, job.submit_s, job.work_s, job.devices) for job in trace.jobs]


def test_philly_as_published() -> None:
    """The sum of the attempts, as in the philly.csv that was made of it."""
    trace = read(PHILLY)
    assert trace.format == "philly-log"
    assert jobs(trace) == [("application_4", 0.0, 1.0, 1), ("application_1", 30.0, 3660.0, 12)]
    assert [(row.line, row.reason.split(" ", 2)[2]) for row in trace.left_out] == [
        (2, "never started"),
        (3, "still runs, or the end of an attempt is not known"),
    ]
    for change, message in (
        (lambda log: log[0].update(attempts=7), "line 1: job 'application_1': attempts is no list"),
        (lambda log: log[0].pop("jobid"), "line 1: a job without jobid"),
        (lambda log: log[0]["attempts"][0].update(detail=[3]), "line 1: job 'application_1': detail of an attempt"),
        (lambda log: log[0].update(submitted_time=None), "line 1: submitted_time is missing"),
        (lambda log: log[0]["attempts"][0].update(end_time="2017-10-07 01:00:59"), "line 1: it ends 1 s before"),
        (
            lambda log: log[0].update(submitted_time="2018-10-07 01:00:30"),
            "line 1: it starts .* before it is submitted",
        ),
    ):
        log = json.loads(PHILLY)
        change(log)
        with pytest.raises(InputError, match=message):
            read(json.dumps(log))


def test_helios_and_acme() -> None:
    trace = read(HELIOS)
    assert trace.format == "cluster-log"
    assert jobs(trace) == [("11", 0.0, 3600.0, 1), ("12", 60.0, 49.0, 4)]
    assert [row.reason for row in trace.left_out] == ["job 13 uses no GPU", "job 14 never started"]
    assert jobs(read(KALOS)) == [("dlc1", 0.0, 8.0, 64)]
    with pytest.raises(InputError, match="line 2: submit_time is 'yesterday', not a time"):
        read(HELIOS.replace("2020-06-09 18:00:00", "yesterday"))


def test_philly_of_pollux_and_sia() -> None:
    trace = read(TIMES)
    assert (trace.format, jobs(trace)) == ("philly-times", [("job-3", 0.0, 30.0, 8), ("job-2", 3600.0, 66.0, 1)])
    assert [job.user for job in trace.jobs] == ["bb", "aa"]


def test_recommenders_of_alibaba() -> None:
    trace = read(DLRM)
    assert trace.format == "dlrm"
    assert jobs(trace) == [("instance_1", 0.0, 500.0, 1), ("instance_2", 100.0, 290.0, 2)]
    assert [row.reason.split(" ", 2)[2] for row in trace.left_out] == [
        "still runs at the end of the trace", "uses no GPU", "never started",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "head", ["", "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type\n"]
)
def test_pai(head: str) -> None:
    trace = read(head + PAI)
    assert trace.format == "pai"
    assert jobs(trace) == [("j1", 0.0, 100.0, 1), ("j2", 10.0, 240.0, 8)]
    assert [row.reason.split(" ", 2)[2] for row in trace.left_out] == [
        "uses a part of a GPU (--gpu-sharing)", "uses parts of several GPUs", "still runs", "uses no GPU",
    ]  # fmt: skip
    shared = read(head + PAI, parts=True)
    assert [(job.id, job.share) for job in shared.jobs] == [("j1", 1.0), ("j2", 1.0), ("j3", 0.25)]
    with pytest.raises(InputError, match="inst_num is '1.5', not a whole number"):
        read(head + PAI.replace("j1,tensorflow,1.0", "j1,tensorflow,1.5"))


def test_gavel_of_seven_and_nine_cells() -> None:
    line = "LM (batch size 5)\tcd %s/lm && python main.py --cuda \t--steps\t1\t3000\t12.5\t4\n"
    how = {"duration": lambda model, devices, batch, steps: steps / devices}
    assert jobs(read(line, **how)) == [("job-1", 12.5, 750.0, 4)]
    assert jobs(read(line.replace("\t1\t3000", "\t3000"), **how)) == [("job-1", 12.5, 750.0, 4)]
    nine = "LM (batch size 5)\tpython main.py\t--steps\t1\t3000\t4\t2.0\t{}\t12.5\n"
    [due], [free] = (read(nine.format(slo), **how).jobs for slo in ("1.5", "-1.000000"))
    assert (due.deadline_s, due.weight) == (12.5 + 1.5 * 750, 2.0) and free.deadline_s == math.inf


def test_pods_that_share_a_gpu() -> None:
    head = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,"
    head += "scheduled_time\n"
    rows = "p0,6000,12288,1,460,,LS,Running,0,120,20\np1,1,1,2,1000,,LS,Running,5,25,5\np2,1,1,1,,,LS,Running,5,25,5\n"
    assert [job.id for job in read(head + rows).jobs] == ["p1", "p2"]
    assert [(job.id, job.share, job.devices) for job in read(head + rows, parts=True).jobs] == [
        ("p0", 0.46, 1), ("p1", 1.0, 2), ("p2", 1.0, 1),
    ]  # fmt: skip
    with pytest.raises(InputError, match="line 2: gpu_milli is '1460', not from 1 to 1000"):
        read(head + rows.replace("460", "1460"))


@pytest.mark.parametrize("text", [HELIOS, KALOS, TIMES, DLRM, PAI, PHILLY])
def test_damaged_files_end_in_one_line(text: str) -> None:
    """Cut anywhere, cells swapped for others: a trace, or an InputError of one line."""
    lines = text.splitlines()
    damaged = [text[: len(text) * part // 37] for part in range(37)]
    for word in ("nan", "-1", "1e400", "x", '"', "\x00", "9" * 400, "2017-13-40 99:00:00", "[" * 5000):
        damaged += [
            "\n".join([*lines[:-2], lines[-2].replace(cell, word, 1)]) for cell in lines[-2].split(",")[:18] if cell
        ]
    for kind in (*FORMATS, ""):
        damaged_here = damaged if not kind else damaged[::9]
        for one in damaged_here:
            try:
                parse_trace(one, "t", Reading(format=kind, duration=lambda *_: 5.0))
            except InputError as error:
                assert "\n" not in str(error) and len(str(error)) < 1200  # noqa: PT017


def test_times_beyond_all_reason_are_refused() -> None:
    head = "job_id,submit_s,duration_s,num_gpus,deadline_s\n"
    for row, message in (
        ("a,0,1e12,1,", "line 2: .*1e\\+12 s; the limit is 50 years"),
        ("a,9,1,1,5", "line 2: .*its deadline 5 s is before its submission"),
    ):
        with pytest.raises(InputError, match=message):
            read(head + row + "\n")
    with pytest.raises(InputError, match="t: it is empty"):
        read("\n\n")
    with pytest.raises(InputError, match="not JSON"):
        read("[" * 100_000)
