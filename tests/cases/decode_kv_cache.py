"""Two requests decoded together with a KV cache: one joins a running batch, and leaves it before the other.

Request 0 has a prompt of 4 tokens and takes steps 0 to 3; request 1, with a prompt of 2, joins before step 1 and leaves
after step 2. A prompt costs 1 a token. A step costs 1 + (tokens in the caches it reads) / 8: weights are read once for
the batch, caches once a request. Weights weigh 10, a token of a cache 1; a step's new tokens are there from its start.

    action        cost                 ends     cache 0   cache 1
    prompt 0      4                    4        4
    step 0        1 + 4/8 = 1.5        5.5      5
    prompt 1      2                    7.5      5         2
    step 1        1 + (5+2)/8 = 1.875  9.375    6         3
    step 2        1 + (6+3)/8 = 2.125  11.5     7         4, freed at 11.5
    step 3        1 + 7/8 = 1.875      13.375   8         -, freed at 13.375

The peak is 10 + 7 + 4 = 21, from the start of step 2 at 9.375; step 3 holds 10 + 8. One finite Program: caches live
over its steps (lifetime `sequence`), a step is a unit with a token of every request that runs, and what each reads
before its own tokens follows from the pieces. Time in order and issue are the same here: all is on one stream.
A token of a cache of the graph (llama-mini: 2 layers, keys and values of 2 heads of 16) is 2 · 2 · 2 · 16 numbers, 256
bytes in bf16; with as many key-value heads as query heads, 4, it would be 512.
Source: by hand.
"""

from __future__ import annotations

import pytest
from case_format import Case, Expected, Peak

from gnomon.errors import PlanError
from gnomon.graph import BF16, nbytes
from gnomon.lowering.generate import GenerationRequest, generate
from gnomon.models.llama import llama, llama_mini
from gnomon.program import Program, issue_order_peak, parse_program, problems, validate

GRAPH = llama(llama_mini())
PROGRAM = """\
gnomon.program/1
stages 1
unit 0 = 0:0:4
unit 1 = 0:4:5
unit 2 = 1:0:2
unit 3 = 0:5:6 1:2:3
unit 4 = 0:6:7 1:3:4
unit 5 = 0:7:8
buffer KV sequence per sequence
kind PREFILL on compute: read P, extend KV
kind DECODE on compute: read P, read KV, extend KV
class 0
  0PREFILL0 0DECODE1 0PREFILL2 0DECODE3 0DECODE4{+ free KV 0 1} 0DECODE5{+ free KV 0 0}
"""
BUSY = {
    "PREFILL~4": 4,
    "PREFILL~2": 2,
    "DECODE~1+4": 1.5,
    "DECODE~1+5,1+2": 1.875,
    "DECODE~1+6,1+3": 2.125,
    "DECODE~1+7": 1.875,
}
SIZES = {"P": 10, "KV": 1}


def lowered() -> Program:
    return generate(
        (GenerationRequest(prompt_tokens=4, new_tokens=4), GenerationRequest(prompt_tokens=2, new_tokens=2, joins=1)),
    )


def bytes_of_a_token() -> None:
    block, layers = GRAPH.block("layers"), GRAPH.call("layers").repeat
    core = block.op("self_attn.core")
    one = {"batch": 1, "seq": 1}
    assert layers * sum(nbytes(block.tensor(name), one, BF16) for name in core.inputs[1:3]) == 256
    assert layers * 2 * nbytes(block.tensor(core.inputs[0]), one, BF16) == 512  # as many heads as queries have


def a_freed_cache_cannot_be_read() -> None:
    late = PROGRAM.replace("unit 5 = 0:7:8", "unit 5 = 0:7:8 1:4:5")
    (first, *_) = problems(parse_program(late))
    assert first.what == "use after free" and "KV of stage 0, sequence 1 was freed by 0DECODE4 before" in str(first)


def a_cache_that_is_never_freed_stays() -> None:
    kept = parse_program(PROGRAM.replace("{+ free KV 0 1}", ""))
    assert issue_order_peak(kept, validate(kept).deps, SIZES)[0].bytes == 10 + 8 + 4


def requests_are_checked() -> None:
    with pytest.raises(PlanError, match="at least 1 prompt token"):
        GenerationRequest(prompt_tokens=0, new_tokens=1)
    with pytest.raises(PlanError, match="at least one request"):
        generate(())


CASE = Case(
    name="decode_kv_cache",
    graph=GRAPH,
    program=PROGRAM,
    lowered=lowered,
    busy=BUSY,
    sizes=SIZES,
    expected=Expected(
        makespan=13.375,
        idle={0: 0},
        issue_peaks={0: Peak(size=21, action="0DECODE4")},
        time_peaks={0: Peak(size=21, action="0DECODE4", moment=9.375)},
        ends={
            "0:0PREFILL0": 4,
            "0:0DECODE1": 5.5,
            "0:0PREFILL2": 7.5,
            "0:0DECODE3": 9.375,
            "0:0DECODE4": 11.5,
            "0:0DECODE5": 13.375,
        },
    ),
    also=(bytes_of_a_token, a_freed_cache_cannot_be_read, a_cache_that_is_never_freed_stays, requests_are_checked),
)
