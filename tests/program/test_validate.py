"""What validate finds: every kind of problem by hand, and the same verdicts as a brute-force interpreter.

The cases by hand assert the whole message that a user sees. The properties mutate small valid Programs of every family
(see `strategies`) and compare `problems` with `interpreter.interpret`, which shares no code with it.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import event, given, settings
from program.interpreter import CannotRead, Result, interpret
from program.strategies import mutated, on_one_stream, one_f_one_b, tangled, valid_programs, with_messages

from gnomon.errors import ProgramError
from gnomon.program import (
    NO_UNIT,
    Communicator,
    Deadlock,
    Program,
    ProgramBuilder,
    dependencies,
    issue_order_peak,
    order,
    parse_program,
    problems,
    structure_of,
    validate,
)
from gnomon.program.problems import PROBLEMS

# By hand: rows, and every message

LAST = """class 1
  1RECV_F0 1F0 1B0 1SEND_B0 1OPT
"""
CASES = {
    "unmet dependency": (
        "class 0\n 0F0 0SEND_F0 0B0 0RECV_B0 0OPT\n" + LAST,
        "missing buffer: rank class 0, action 0B0: DY of stage 0, unit 0 has not been written before, in issue order",
        "leak: rank class 0, action 0RECV_B0: DY of stage 0, unit 0 is written but not freed by the end of the step",
    ),
    "use after free": (
        "class 0\n 0F0 0SEND_F0 0RECV_B0 0B0 0OPT\n" + LAST.replace("1B0", "1B0 1W0{read S 1 0}"),
        "use after free: rank class 1, action 1W0: S of stage 1, unit 0 was freed by 1B0 before",
    ),
    "double free": (
        "class 0\n 0F0 0SEND_F0 0RECV_B0 0B0 0OPT 0OPT{free G 0}\n" + LAST,
        "double free: rank class 0, action 0OPT: G of stage 0 was freed by 0OPT before",
    ),
    "leak": (
        "class 0\n 0F0 0SEND_F0 0RECV_B0 0B0\n" + LAST,
        "leak: rank class 0, action 0B0: G of stage 0 is written but not freed by the end of the step",
    ),
    "overwrite of a live buffer": (
        "class 0\n 0F0 0SEND_F0 0R0 0RECV_B0 0B0 0OPT\n" + LAST,
        "overwrite: rank class 0, action 0R0: S of stage 0, unit 0 is still live; free it before it is written again",
    ),
    "carried buffer freed": (
        "class 0\n 0F0 0SEND_F0 0RECV_B0 0B0 0OPT{consume G 0, free P 0}\n" + LAST,
        "carried buffer freed: rank class 0, action 0OPT: P of stage 0 lives from step to step and cannot be freed",
    ),
    "send without receive": (
        "class 0\n 0F0 0SEND_F0 0B0{consume S 0 0}\n" + LAST,
        "send without receive: rank class 1, action 1SEND_B0: no partner on communicator 'bwd' "
        "(stage 1 to stage 0, unit 0)",
    ),
    "receive without send": (
        "class 0\n" + LAST,
        "receive without send: rank class 1, action 1RECV_F0: no partner on communicator 'fwd' "
        "(stage 0 to stage 1, unit 0)",
        "send without receive: rank class 1, action 1SEND_B0: no partner on communicator 'bwd' "
        "(stage 1 to stage 0, unit 0)",
    ),
    "duplicate message": (
        "class 0\n 0F0 0SEND_F0 0SEND_F0{} 0RECV_B0 0B0 0OPT\n" + LAST,
        "duplicate message: rank class 0, action 0SEND_F0: the same message as rank class 0, action 0SEND_F0 (row 1)",
    ),
    "wrong order on a communicator": (
        "class 0\n 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0OPT\n"
        "class 1\n 1RECV_F1 1F1 1RECV_F0 1F0 1B0 1SEND_B0 1B1 1SEND_B1 1OPT\n",
        "wrong order on a communicator: rank class 1, action 1RECV_F1: 1RECV_F0 comes after 1RECV_F1, but 0SEND_F0 is "
        "sent first and 'fwd' matches by order",
    ),
    "communicator orders disagree": (
        "kind AR on reduce comm dp\nkind TP on tensor comm tp\n"
        "class 0\n 0AR#1 0TP#2 0AR#3\nclass 1\n 1AR#3 1TP#2 1AR#1\n",
        "communicator orders disagree: rank class 1, action 1AR: collective 0 on 'dp' is 0AR#1 on rank class 0 but "
        "1AR#3 on rank class 1",
    ),
    "communicator incomplete": (
        "kind AR on reduce comm dp\nclass 0\n 0AR#1 0AR#3\nclass 1\n 1AR#1\n",
        "communicator orders disagree: rank class 0, action 0AR: collective 1 on 'dp' is 0AR#3 on rank class 0 but "
        "nothing on rank class 1",
    ),
    "two meetings, each first on one stream": (
        "kind A on one\nkind B on one\nclass 0\n 0A#1 0B#2\nclass 1\n 1B#2 1A#1\n",
        "deadlock: rank class 0, action 0A: each waits for the next: 0:0A (with 1:1A) -> 1:1B (with 0:0B) -> 0:0A; "
        "0 of 4 actions ran; streams stand at 0:0A, 1:1B",
    ),
    "buffered sends, one in flight": (
        "kind SEND on s comm net send 0\nkind RECV on s comm net recv 0\ncomm net buffered 1\n"
        "class 0\n 0SEND0>1 0SEND1>1 0RECV2>1 0RECV3>1\nclass 1\n 1SEND2>0 1SEND3>0 1RECV0>0 1RECV1>0\n",
        "deadlock: rank class 0, action 0SEND1: each waits for the next: 0:0SEND1 -> 1:1RECV0 -> 1:1SEND3 -> "
        "0:0RECV2 -> 0:0SEND1; 2 of 8 actions ran; streams stand at 0:0SEND1, 1:1SEND3",
    ),
    "buffered sends, two in flight": (
        "kind SEND on s comm net send 0\nkind RECV on s comm net recv 0\ncomm net buffered 2\n"
        "class 0\n 0SEND0>1 0SEND1>1 0RECV2>1 0RECV3>1\nclass 1\n 1SEND2>0 1SEND3>0 1RECV0>0 1RECV1>0\n",
    ),
    "a pool of one for two at a time": (
        "buffer A step per stage pool ring\nbuffer B step per stage pool ring\npool ring 1\n"
        "kind GET on c: write A\nkind SWAP on c: write B, consume A\nkind PUT on c: consume B\n"
        "class 0\n 0GET 0SWAP 0PUT\n",
        "deadlock: rank class 0, action 0SWAP: each waits for the next: 0:0SWAP -> 0:0SWAP; 1 of 3 actions ran; "
        "streams stand at 0:0SWAP",
    ),
    "a pool of one within one composite": (
        "buffer A step per stage pool ring\nbuffer B step per stage pool ring\npool ring 1\n"
        "kind GET on c: write A\nkind PUT on c: consume A\nkind OPEN on c: write B\nkind SHUT on c: consume B\n"
        "class 0\n 0GET (0OPEN&0PUT) 0SHUT\n",
        "deadlock: rank class 0, action 0OPEN: each waits for the next: 0:0OPEN (with 0:0PUT) -> 0:0OPEN; "
        "1 of 4 actions ran; streams stand at 0:0OPEN",
    ),
    "tied gradients are one buffer": (
        "alias G 0 = G 1\nclass 0\n 0F0 1F0 1B0 0B0 0OPT 1OPT\n",
        "use after free: rank class 0, action 1OPT: G of stage 0 was freed by 0OPT before",
    ),
    "a pool that takes without giving": (
        "buffer KV sequence per unit pool seats\npool seats 1\nkind OPEN on c: write KV\nclass 0\n 0OPEN0 0OPEN1\n",
        "deadlock: rank class 0, action 0OPEN1: each waits for the next: 0:0OPEN1 -> 0:0OPEN1; 1 of 2 actions ran; "
        "streams stand at 0:0OPEN1",
    ),
}


def program_of(rows: str) -> Program:
    return parse_program(f"gnomon.program/1\nstages 2\nunits 4\n{rows}")


@pytest.mark.parametrize("case", CASES)
def test_the_message_says_rank_action_and_reason(case: str) -> None:
    rows, *messages = CASES[case]
    program = program_of(rows)
    assert [str(problem) for problem in problems(program)] == messages
    compare(program)


def test_every_kind_of_problem_has_a_case() -> None:
    shown = {message.partition(":")[0] for _, *messages in CASES.values() for message in messages}
    assert shown == set(PROBLEMS)


def test_all_problems_come_in_one_error_first_cause_first() -> None:
    with pytest.raises(ProgramError) as caught:
        validate(program_of("class 0\n 0B0 0B1 0OPT{free P 0}\n"))
    unwritten = "has not been written before, in issue order"
    assert str(caught.value).split("\n") == [
        "this Program cannot run:",
        f"  missing buffer: rank class 0, action 0B0: S of stage 0, unit 0 {unwritten}",
        f"  missing buffer: rank class 0, action 0B0: DY of stage 0, unit 0 {unwritten}",
        f"  missing buffer: rank class 0, action 0B1: S of stage 0, unit 1 {unwritten}",
        f"  missing buffer: rank class 0, action 0B1: DY of stage 0, unit 1 {unwritten}",
        "  leak: rank class 0, action 0B1: G of stage 0 is written but not freed by the end of the step",
        "  … and 1 more",
    ]
    assert len(caught.value.problems) == 6


def one_f_one_b_on_one_stream(comms: tuple[Communicator, ...]) -> Program:
    """1F1B, p 4, m 8, every action of a rank on its compute stream."""
    build = ProgramBuilder(num_stages=4, units=8, kinds=on_one_stream())
    for stage in range(4):
        steps = [(kind, stage, unit) for kind, unit in one_f_one_b(stage, 4, 8)]
        build.add_all(build.rank_class(), [*with_messages({stage}, 4, steps), ("OPT", stage, NO_UNIT)])
    return build.build(comms=comms)


def test_rendezvous_on_one_stream_deadlocks_1f1b() -> None:
    """Stage 0 sends its fourth forward before it takes the first gradient, which stage 1 sends before it takes that.

    The same holds one stage further down at the same time, so every stream stands at a send.
    """
    meet = tuple(Communicator(name=name, semantics="rendezvous") for name in ("fwd", "bwd"))
    assert [str(problem) for problem in problems(one_f_one_b_on_one_stream(meet))] == [
        "deadlock: rank class 0, action 0SEND_F3: each waits for the next: 0:0SEND_F3 (with 1:1RECV_F3) -> "
        "1:1SEND_B0 (with 0:0RECV_B0) -> 0:0SEND_F3; 23 of 164 actions ran; "
        "streams stand at 0:0SEND_F3, 1:1SEND_F2, 2:2SEND_F1, 3:3SEND_B0"
    ]
    compare(one_f_one_b_on_one_stream(meet))


@pytest.mark.parametrize("capacity", [0, 1, 2])
def test_buffered_sends_on_one_stream_do_not(capacity: int) -> None:
    buffered = tuple(Communicator(name=name, capacity=capacity) for name in ("fwd", "bwd"))
    assert problems(one_f_one_b_on_one_stream(buffered)) == ()


def test_memory_in_the_order_of_issue() -> None:
    """S 3, Y 1 and G 2 bytes. Stage 0 of GPipe, m 3: three S at 0F2 with its Y, then G with three S at 0B0 and DY.

    0F2: 3 * 3 + 1 = 10 and P 2 is 12; 0B0: 9 + DY 1 + G 2 + P 2 = 14. Stage 1 holds one S, X or DX, G and P: at most 8.
    """
    program = parse_program(
        "gnomon.program/1\nstages 2\nunits 3\n"
        "class 0\n 0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2 0OPT\n"
        "class 1\n 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2 1OPT\n"
    )
    sizes = {"S": 3, "X": 1, "Y": 1, "DX": 1, "DY": 1, "G": 2, "P": 2}
    peaks = issue_order_peak(program, validate(program).deps, sizes)
    assert [(peak.bytes, program.token(peak.row)) for peak in peaks] == [(14, "0B0"), (8, "1B0")]


def test_a_buffer_that_is_not_there_is_refused() -> None:
    with pytest.raises(ProgramError, match="X of stage 1 is per unit; there are 4, and 4 is not one of them"):
        problems(program_of("class 0\n 1F0{free X 1 4}\n"))


def test_messages_to_stages_that_are_not_there_are_told_apart() -> None:
    kinds = "kind A on s comm net send -3\nkind B on s comm net send -4\n"
    result = problems(program_of(f"{kinds}class 0\n 0A0\nclass 1\n 1B0\n"))
    assert [(problem.what, problem.action) for problem in result] == [
        ("send without receive", "0A0"),
        ("send without receive", "1B0"),
    ]


def test_a_pool_counts_buffers_and_not_their_growth() -> None:
    """Two requests decode three tokens each in two seats: growing a cache takes no further seat."""
    header = "buffer KV sequence per sequence pool seats\npool seats 2\nkind DEC on c: extend KV\n"
    text = f"gnomon.program/1\nstages 1\nunit 0 = 0:0:1 1:0:1\nunit 1 = 0:1:2 1:1:2\nunit 2 = 0:2:3 1:2:3\n{header}"
    assert problems(parse_program(f"{text}class 0\n 0DEC0 0DEC1 0DEC2\n")) == ()


# Against the interpreter


@given(valid_programs())
@settings(max_examples=150)
def test_programs_of_every_family_can_run(program: Program) -> None:
    assert problems(program) == ()
    assert not interpret(program).findings


@given(mutated())
@settings(max_examples=1000)
def test_mutated_programs_get_the_interpreters_verdict(program: Program) -> None:
    for verdict in compare(program):
        event(verdict)


@given(tangled())
@settings(max_examples=500)
def test_tangled_streams_deadlock_where_the_interpreter_gets_stuck(program: Program) -> None:
    for verdict in compare(program):
        event(verdict)


def compare(program: Program) -> set[str]:
    """Same kinds of problem at the same actions; for a deadlock, a real and shortest cycle. Returns the kinds."""
    try:
        wanted = interpret(program)
    except CannotRead:
        with pytest.raises(ProgramError):
            problems(program)
        return {"names what is not there"}
    result = problems(program)
    assert (structure_of(program) is None) == bool(result)
    if any(what == "deadlock" for what, _, _ in wanted.findings):
        assert [problem.what for problem in result] == ["deadlock"]
        check_cycle(program, wanted)
    else:
        assert Counter((p.what, p.rank_class, p.action) for p in result) == wanted.findings
    return {problem.what for problem in result} or {"can run"}


def check_cycle(program: Program, wanted: Result) -> None:
    """Every row of the cycle waits for the next, and there is no shorter cycle."""
    stuck = order(program, dependencies(program))
    assert isinstance(stuck, Deadlock)
    assert stuck.finished == wanted.finished
    following = stuck.rows[1:] + stuck.rows[:1]
    for row, partners, after in zip(stuck.rows, stuck.partners, following, strict=True):
        assert {row, *partners} == wanted.partners[row]
        waits = set().union(*(wanted.waits[one] for one in (row, *partners)))
        assert waits & wanted.partners[after], "an edge of the cycle is no wait"
    assert set(stuck.heads) == set(wanted.heads.values())
    assert len(stuck.rows) == shortest(wanted)


def shortest(wanted: Result) -> int:
    """Length of the shortest cycle of waits, by breadth-first search from every row."""
    graph = {
        together: {wanted.partners[other] for row in together for other in wanted.waits[row]}
        for together in {wanted.partners[row] for row in wanted.waits}
    }
    best = len(graph) + 1
    for start in graph:
        reached, frontier, length = {start}, {start}, 0
        while frontier and length < best:
            frontier = {after for node in frontier for after in graph[node]}
            length += 1
            if start in frontier:
                best = length
                break
            frontier -= reached
            reached |= frontier
    return best
