"""The text form: it reads back exactly, says where it is wrong, and one timeline written out in full."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from timeline.small import MESSAGE, timeline, timelines

from gnomon.errors import FormatError
from gnomon.timeline import Memory, Timeline
from gnomon.timeline.text import parse_timeline, print_timeline, to_mapping

TEXT = """\
gnomon.timeline/1
clock|predicted
makespan_s|6.0
period_s|5.5
assumes|messages are free
worker|w0|1
worker|w1|1
stream|compute
stream|send
stream|recv
kind|F
kind|SEND
kind|RECV
buffer|X
spans|4|worker|stream|kind|role|stage|unit|path|step|start_s|duration_s|lag_s|nbytes|flops|cause|cause_steps
span|0|compute|F|compute|-|-|-|0|0.0|3.0|0.0|-|-|-|0
span|0|send|SEND|communication|-|-|-|0|3.0|1.0|0.0|-|-|0|0
span|1|recv|RECV|communication|-|-|-|0|3.0|1.0|0.0|-|-|0|0
span|1|compute|F|compute|-|-|-|0|4.0|2.0|0.0|-|-|2|0
memory|2|worker|buffer|span|time_s|change_bytes
change|1|0|2|3.0|64.0
change|1|0|3|6.0|-64.0
resident|0|0|16.0
""".replace("|", "\t")


def written_out() -> Timeline:
    memory = Memory.of(
        worker=[1, 1], buffer=[0, 0], span=[2, 3], time_s=[3, 6], change_bytes=[64, -64], resident_bytes=[[16], [0]]
    )
    return timeline(MESSAGE, period_s=5.5, buffers=("X",), memory=memory, assumptions=("messages are free",))


def test_written_out() -> None:
    assert print_timeline(written_out()) == TEXT
    assert parse_timeline(TEXT) == written_out()


@given(timelines())
def test_every_timeline_reads_back(value: Timeline) -> None:
    text = print_timeline(value)
    assert parse_timeline(text) == value
    assert print_timeline(parse_timeline(text)) == text


@given(timelines())
def test_json_keeps_every_column(value: Timeline) -> None:
    document = json.loads(json.dumps(to_mapping(value), allow_nan=False))
    assert document["spans"]["start_s"] == value.spans.start_s.tolist()
    assert document["spans"]["cause"] == value.spans.cause.tolist()
    assert (document["memory"] is None) == (value.memory is None)
    assert document["makespan_s"] == value.makespan_s


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("timeline/1", "timeline/2", r"expected 'gnomon.timeline/1' in the first line.*:1`"),
        ("clock|predicted", "clock|guessed", "clock must be 'predicted' or 'measured'"),
        ("makespan_s|6.0", "makespan_s|6", "makespan_s must be a finite number as Python prints it, got '6'"),
        ("makespan_s|6.0", "makespan_s|nan", "makespan_s must be a finite number"),
        ("makespan_s|6.0\n", "", "expected a line `makespan_s` .*:3`"),
        ("worker|w1|1", "worker|w1|x", "count must be a whole number, got 'x' .*:7`"),
        ("worker|w1|1", "worker|w1", "`worker` has 2 fields, got 1 .*:7`"),
        ("spans|4", "spans|5", "5 lines `span` were announced, but there are 4"),
        ("spans|4|worker", "spans|4|who", "`spans` must name its columns"),
        ("send|SEND|comm", "send|SEMD|comm", "unknown kind 'SEMD'.*did you mean 'SEND'.*:17`"),
        ("1|compute|F|compute|-", "1|compute|F|compute|1.5", "stage must be a whole number, got '1.5' .*:19`"),
        ("1|compute|F|compute|-", "9|compute|F|compute|-", "worker index 9 is outside its table of 2"),
        ("1|compute|F|compute|-", "1|compute|F|compute|99999999999", "stage must be from 0 to 2147483647"),
        ("4.0|2.0", "4.0|2.1", "duration_s 2.1 s is not on the grid"),
        ("resident|0", "resident|7", "worker 7, buffer 0: not in the tables"),
        ("resident|0|0|16.0", "resident|0|0|16.0\nkind|G", "unexpected 'kind'; the order of lines is fixed .*:24`"),
        ("16.0\n", "16.0", "must end with a newline"),
    ],
)
def test_wrong_text(old: str, new: str, message: str) -> None:
    old, new = old.replace("|", "\t"), new.replace("|", "\t")
    assert TEXT.count(old) == 1
    with pytest.raises(FormatError, match=message):
        parse_timeline(TEXT.replace(old, new))
