"""The text form of Programs: prints and parses back exactly; anything it does not know is refused, with the place."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program.strategies import programs

import gnomon.program.text
from gnomon.errors import FormatError, GnomonError, ProgramError
from gnomon.plans import Unit
from gnomon.program import (
    BufferClass,
    BufferRef,
    Communicator,
    Kind,
    Override,
    Pool,
    Program,
    ProgramBuilder,
    RowEffect,
    parse_program,
    print_program,
)

PLAIN = """\
gnomon.program/1
stages 2
units 2
class 0 count 8
  0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0AR 0OPT
class 1 count 8
  1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1AR 1OPT
"""

EVERYTHING = """\
gnomon.program/1
stages 4
unit 0 = 0:2:4 1:0:2 weight 0.5 worker 1
unit 1 = 0:0:2
unit 2 = 3:0:2
chains 0 2
inputs loaded
buffer KV sequence per sequence
buffer PS carried per stage slots 2 pool gathered
pool gathered 2
kind UNSHARD on unshard comm fsdp: read PS, write P
kind SKIP on skip comm skips send -2: consume X, read KV<
comm fwd rendezvous
comm bwd buffered 3 unordered
alias P 0 = P 3
class 0 count 8
  0LOAD0 0F0 0SEND_F0 (0F1&1B1) 2SKIP2 0AR#1 1SEND_F1>3 0OPT@host 0F2/cold 0OPT{read G 0, write P 0}
  0F1{+ free X 2 1} 0AR! 0AR/"a b"{} 0AR:bwd
class 1
"""


def parse(body: str, header: str = "stages 4\nunits 8\n") -> Program:
    return parse_program(f"gnomon.program/1\n{header}{body}")


# Round trips


@given(programs())
@settings(max_examples=200)
def test_prints_and_parses_back_exactly(program: Program) -> None:
    text = print_program(program)
    again = parse_program(text)
    assert again == program
    assert print_program(again) == text


@pytest.mark.parametrize("text", [PLAIN, EVERYTHING], ids=["plain", "everything"])
def test_canonical_text_prints_as_it_was(text: str) -> None:
    assert print_program(parse_program(text)) == text


def test_every_feature_is_read() -> None:
    program = parse_program(EVERYTHING)
    assert program.units == (
        Unit(pieces=((0, 2, 4), (1, 0, 2)), weight=0.5, worker=1),
        Unit(pieces=((0, 0, 2),)),
        Unit(pieces=((3, 0, 2),)),
    )
    assert program.chains == (0, 2) and program.inputs == "loaded" and program.counts == (8, 1)
    assert (
        BufferClass(name="PS", lifetime="carried", per="stage", slots=2, pool="gathered", memory="activations")
        in program.buffers
    )
    assert program.pools == (Pool(name="gathered", size=2),)
    skip = next(kind for kind in program.kinds if kind.name == "SKIP")
    assert (skip.stream, skip.comm, skip.message, skip.hop) == ("skip", "skips", "send", -2)
    assert Communicator(name="bwd", capacity=3, ordered=False) in program.comms
    assert Communicator(name="fwd", semantics="rendezvous") in program.comms
    assert Communicator(name="fsdp", semantics="collective") in program.comms
    assert program.aliases == ((BufferRef("P", 0), BufferRef("P", 3)),)
    given = {program.token(row): o for row, o in program.overrides.items()}
    assert given["1SEND_F1"].peer == 3
    assert given["0F2"].name == "cold"
    assert Override(effects=(RowEffect("free", BufferRef("X", 2, 1)),), adds=True) in program.overrides.values()
    assert [o for o in program.overrides.values() if o.inside] == [Override(inside=True)]
    assert Override(name="a b", effects=()) in program.overrides.values()
    assert Override(comm="bwd") in program.overrides.values()
    composite = [row for row, o in program.overrides.items() if o.name == "F&B"]
    assert [program.token(row) for row in composite] == ["0F1", "1B1"]
    assert [int(program.group[row]) for row in composite] == [2, 2]  # one more than the group 1 written at 0AR#1


def test_the_example_in_the_documentation_parses() -> None:
    document = gnomon.program.text.__doc__ or ""
    example = document.split("\n\n")[1]
    assert parse_program("\n".join(line[4:] for line in example.split("\n"))).num_rows == 20


def test_comments_blank_lines_and_line_breaks_mean_nothing() -> None:
    spaced = PLAIN.replace("units 2", "\n  units 2   # two microbatches\n#\n").replace(" 0AR 0OPT", "\r\n\t0AR\n0OPT ")
    assert parse_program(spaced) == parse_program(PLAIN)


def test_a_class_of_one_stage_may_leave_it_out() -> None:
    short = """gnomon.program/1
        stages 2
        units 2
        class 0 count 8
          F0 SEND_F0 F1 SEND_F1 RECV_B0 B0 RECV_B1 B1 AR OPT
        class 1 count 8
          RECV_F0 F0 B0 SEND_B0 RECV_F1 F1 1B1 SEND_B1 AR OPT
    """
    assert parse_program(short) == parse_program(PLAIN)
    named = parse("class 0 stage 3\n F0 B0\n")
    assert [named.token(row) for row in range(2)] == ["3F0", "3B0"]


def test_groups_of_composites_count_on_from_the_largest_written() -> None:
    program = parse("class 0\n (0F1&0B0) 0AR#4 (0F2&0B1)\n")
    assert program.group.tolist() == [5, 5, 4, 6, 6]
    assert print_program(program).endswith("  (0F1&0B0) 0AR#4 (0F2&0B1)\n")
    kept = parse("class 0\n (0F1&0B0)#9 (0F2&0B1)#3\n")
    assert kept.group.tolist() == [9, 9, 3, 3]
    assert parse_program(print_program(kept)) == kept


def test_rows_wrap_at_a_hundred_columns() -> None:
    build = ProgramBuilder(num_stages=1, units=200)
    cls = build.rank_class()
    build.add_all(cls, (("F", 0, unit) for unit in range(200)))
    assert max(map(len, print_program(build.build()).split("\n"))) <= 100


def test_names_that_are_not_words_are_refused_when_printing() -> None:
    build = ProgramBuilder(num_stages=1, units=1, kinds=(Kind(name="F", stream="my stream"),))
    build.rank_class()
    with pytest.raises(ProgramError, match="stream name 'my stream' cannot be written as text"):
        print_program(build.build(buffers=()))


# Refusals: text, column of the error, words in the message

HEADER_ERRORS = {
    "unknown directive": ("stage 4\n", 2, 1, "not 'stage' (did you mean 'stages'"),
    "no stages": ("units 1\nclass 0\n", 3, 1, "`stages N` is missing"),
    "no units": ("stages 1\nclass 0\n", 3, 1, "`units N` is missing"),
    "twice": ("stages 1\nstages 2\n", 3, 1, "stages is given twice"),
    "not a number": ("stages four\n", 2, 8, "expected number of stages, an integer"),
    "leading zero": ("stages 04\n", 2, 8, "without leading zeros"),
    "nothing": ("stages\n", 2, 7, "expected number of stages, but the line ends"),
    "too much": ("stages 4 5\n", 2, 10, "expected the end of the line, not '5'"),
    "absurd stages": ("stages 1000000000000\n", 2, 8, "number of stages 1000000000000 is not in 1 to 2046"),
    "absurd digits": (f"stages {'9' * 5000}\n", 2, 8, "is not in 1 to 2046"),
    "absurd units": ("stages 1\nunits 99999999\n", 3, 7, "is not in 0 to 262142"),
    "other digits": ("stages ４\n", 2, 8, "expected number of stages"),
    "both units": ("units 1\nunit 0 = 0:0:1\n", 3, 6, "not both"),
    "unit order": ("unit 1 = 0:0:1\n", 2, 6, "expected unit 0, not unit 1"),
    "piece": ("unit 0 = 0:0\n", 2, 10, "sequence:start:stop, not '0:0'"),
    "piece number": ("unit 0 = 0:x:1\n", 2, 10, "a piece's number"),
    "empty piece": ("unit 0 = 0:3:3\n", 2, 9, "0 <= start < stop"),
    "no local sequence": ("unit 0 = 0:0:1 local\n", 2, 21, "a local sequence"),
    "local sequence": ("unit 0 = 0:0:1 local 0:0:1\n", 2, 22, "sequence:rank, not '0:0:1'"),
    "local sequence elsewhere": ("unit 0 = 0:0:1 local 1:0\n", 2, 9, "must name sequences of the unit"),
    "no pieces": ("unit 0 = weight 0.5\n", 2, 9, "no pieces"),
    "nan": ("unit 0 = 0:0:1 weight nan\n", 2, 23, "a weight from 0 to 1, not 'nan'"),
    "infinite": ("unit 0 = 0:0:1 weight inf\n", 2, 23, "a weight from 0 to 1, not 'inf'"),
    "overflowing": ("unit 0 = 0:0:1 weight 1e999\n", 2, 23, "a weight from 0 to 1, not '1e999'"),
    "heavy": ("unit 0 = 0:0:1 weight 1.5\n", 2, 23, "a weight from 0 to 1"),
    "chain": ("stages 2\nunits 1\nchains 0 2\nclass 0\n", 4, 10, "stage 2, but there are 2 stages"),
    "inputs": ("inputs load\n", 2, 8, "not 'load' (did you mean 'loaded'"),
    "buffer twice": ("buffer A step per unit\nbuffer A step per unit\n", 3, 8, "buffer A is given twice"),
    "lifetime": ("buffer A forever per unit\n", 2, 10, "expected lifetime: one of action, step"),
    "per": ("buffer A step of unit\n", 2, 15, "expected `per`, not 'of'"),
    "slots": ("buffer A step per unit slots 0\n", 2, 30, "slots 0 is not in 1 to"),
    "no pool": ("stages 1\nunits 1\npool pq 1\nbuffer A step per unit pool pp\nclass 0\n", 5, 29, "did you mean 'pq'"),
    "pool size": ("pool a 0\n", 2, 8, "size of the pool 0 is not in 1 to"),
    "kind name": ("kind F2 on compute\n", 2, 6, "no digit last"),
    "kind stream": ("kind F at compute\n", 2, 8, "expected `on`, not 'at'"),
    "kind message": ("kind S on s send 1\n", 2, 18, "say on which communicator"),
    "kind effect": ("kind F on c: read P, eat X\n", 2, 21, "not ' eat X'"),
    "kind buffer": ("stages 1\nunits 1\nkind F on c: read P, free XX\nclass 0\n", 4, 27, "buffer 'XX' (did you mean"),
    "kind twice": ("kind F on c\nkind F on c\n", 3, 6, "kind F is given twice"),
    "comm": ("comm fwd eager\n", 2, 10, "semantics: one of buffered, rendezvous, collective"),
    "comm capacity": ("comm fwd rendezvous 2\n", 2, 21, "expected the end of the line, not '2'"),
    "alias": ("stages 1\nunits 1\nalias P 0 = Q 0\nclass 0\n", 4, 13, "unknown buffer 'Q'"),
    "rows first": ("stages 1\nunits 1\n0F0\n", 4, 1, "before any row, not '0F0'"),
}  # fmt: skip

ROW_ERRORS = {
    "class twice": ("class 0\nclass 0\n", 5, 7, "class 0 is given twice"),
    "class gap": ("class 1\n", 4, 7, "class 1 comes before class 0"),
    "class count": ("class 0 count 0\n", 4, 15, "ranks in the class 0 is not in 1 to"),
    "absurd count": ("class 0 count 99999999999999999999\n", 4, 15, "is not in 1 to"),
    "class word": ("class 0 times 2\n", 4, 9, "expected the end of the line, not 'times'"),
    "header late": ("class 0\nstages 4\n", 5, 1, "header lines come before the first class"),
    "unknown word": ("class 0\nfoo\n", 5, 1, "'foo'"),
    "unknown kind": ("class 0\n 0F0 0FF1\n", 5, 7, "unknown kind 'FF' (did you mean 'F'"),
    "bad token": ("class 0\n 0F0 0f1\n", 5, 6, "expected a row such as `2F0` or `3SEND_F1>5`, not '0f1'"),
    "stage": ("class 0\n 0F0 4F1\n", 5, 6, "stage (of 4) 4 is not in 0 to 3"),
    "unit": ("class 0\n 0F0 0F8\n", 5, 8, "unit (of 8) 8 is not in 0 to 7"),
    "zeros": ("class 0\n 0F01\n", 5, 4, "without leading zeros"),
    "peer": ("class 0\n 0SEND_F1>4\n", 5, 11, "stage at the other end 4 is not in 0 to 3"),
    "comm": ("class 0\n 0SEND_F1:fwdd\n", 5, 11, "unknown communicator 'fwdd' (did you mean 'fwd'"),
    "glued": ("class 0\n 0F0?0F1\n", 5, 5, "expected a blank after the row, not '?0F1'"),
    "order": ("class 0\n 0AR#1/name\n", 5, 7, "expected a blank after the row, not '/name'"),
    "quote": ('class 0\n 0AR/"\\x"\n', 5, 6, "expected a name in quotes"),
    "effect op": ("class 0\n 0AR{eat G 0}\n", 5, 6, "expected `op BUFFER STAGE [AT]`"),
    "effect buffer": ("class 0\n 0AR{read G 0, free GG 1}\n", 5, 21, "unknown buffer 'GG'"),
    "effect stage": ("class 0\n 0AR{read G 4}\n", 5, 13, "stage (of 4) 4 is not in 0 to 3"),
    "effect unit": ("class 0\n 0AR{read X 2}\n", 5, 6, "buffer X is per unit: expected `op BUFFER STAGE UNIT`"),
    "effect at": ("class 0\n 0AR{read G 2 1}\n", 5, 6, "buffer G is per stage: expected `op BUFFER STAGE`"),
    "open brace": ("class 0\n 0AR{read G 2\n", 5, 5, "expected a blank after the row"),
    "open composite": ("class 0\n (0F1&0B0\n", 5, 10, "expected `&` or `)`"),
    "single": ("class 0\n (0F1)\n", 5, 2, "two or more rows of one stream, not one row"),
    "streams": ("class 0\n (0F1&0SEND_F0)\n", 5, 2, "one stream, not streams compute, send_f"),
    "member group": ("class 0\n (0F1#2&0B0)\n", 5, 3, "no name or group of its own"),
    "stage left out": ("class 0\n F0\n", 5, 1, "there are 1 classes and 4 stages; write the stage"),
    "stage half left out": ("class 0 stage 0\n F0 1B0\n", 5, 1, "a class of several stages"),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADER_ERRORS)
def test_header_errors_name_the_place(case: str) -> None:
    text, line, column, message = HEADER_ERRORS[case]
    with pytest.raises(FormatError) as caught:
        parse_program(f"gnomon.program/1\n{text}", "case.program")
    assert message in str(caught.value)
    assert caught.value.path == f"case.program:{line}:{column}"


@pytest.mark.parametrize("case", ROW_ERRORS)
def test_row_errors_name_the_place(case: str) -> None:
    text, line, column, message = ROW_ERRORS[case]
    with pytest.raises(FormatError) as caught:
        parse(text)
    assert message in str(caught.value)
    assert caught.value.path == f"program:{line}:{column}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "an empty text; expected `gnomon.program/1` in its first line"),
        ("stages 4\n", "expected the header `gnomon.program/1`, not 'stages'"),
        ("gnomon.program/2\n", "schema version 2, but this Gnomon reads version 1; it was written by a newer Gnomon"),
        ("gnomon.program/0\n", "schema version 0, but this Gnomon reads version 1; there is no such version"),
        ("gnomon.program/1 x\n", "expected the end of the line, not 'x'"),
        ("gnomon.timeline/1\n", "expected the header `gnomon.program/1`, not 'gnomon.timeline/1'"),
    ],
)
def test_the_first_line_says_what_the_text_is(text: str, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse_program(text, "x.program")
    assert str(caught.value).startswith(message)
    assert caught.value.path.startswith("x.program:1:")


def test_a_text_of_ten_megabytes_is_refused_at_once_unless_allowed() -> None:
    text = PLAIN + "  " + " ".join(["1AR"] * 2_500_000)
    start = time.process_time()
    with pytest.raises(FormatError, match="over the limit of 8,000,000; allow more with max_bytes"):
        parse_program(text)
    assert time.process_time() - start < 1.0
    assert parse_program(PLAIN, max_bytes=len(PLAIN)).num_rows == 20


def test_hostile_lines_do_not_hang() -> None:
    for body in ("0" * 1_000_000, "0" + "A" * 1_000_000 + "1_", "(" * 100_000, '0F0/"' + "\\" * 1_000_001, "0AR{" * 9):
        start = time.process_time()
        with pytest.raises(FormatError) as caught:
            parse(f"class 0\n {body}\n")
        assert time.process_time() - start < 1.0
        assert len(str(caught.value)) < 400


@given(st.integers(0, len(EVERYTHING) - 1), st.sampled_from(' \n0aF{}()#&>@:!/"é\x00'), st.booleans())
@settings(max_examples=300)
def test_damaged_text_is_refused_or_means_something(at: int, char: str, insert: bool) -> None:
    """One character put in or changed: a FormatError with a place, or a Program that prints and parses back."""
    damaged = EVERYTHING[:at] + char + EVERYTHING[at + (0 if insert else 1) :]
    try:
        program = parse_program(damaged)
    except GnomonError as error:
        assert isinstance(error, FormatError) and error.path.startswith("program:")
        return
    assert parse_program(print_program(program)) == program
