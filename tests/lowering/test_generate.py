"""Generation: every token once, and the caches' peak against a count of the tokens of requests that run."""

from __future__ import annotations

from cover import check_cover
from hypothesis import given
from hypothesis import strategies as st

from gnomon.lowering.generate import GenerationRequest, generate
from gnomon.program import issue_order_peak, validate

REQUESTS = st.lists(
    st.builds(
        GenerationRequest, prompt_tokens=st.integers(1, 9), new_tokens=st.integers(1, 6), joins=st.integers(0, 8)
    ),
    min_size=1,
    max_size=6,
)


@given(REQUESTS)
def test_caches_hold_the_tokens_of_what_runs(requests: list[GenerationRequest]) -> None:
    program = generate(requests)
    structure = validate(program)
    check_cover(program.units, [request.prompt_tokens + request.new_tokens for request in requests])

    def held(step: int) -> int:
        """Tokens in caches while a step runs: prompt and new ones, of those that take part in it."""
        return sum(r.prompt_tokens + step - r.joins + 1 for r in requests if r.runs(step))

    last = max(request.joins + request.new_tokens for request in requests)
    (peak,) = issue_order_peak(program, structure.deps, {"P": 100, "KV": 1})
    assert peak.bytes == 100 + max(held(step) for step in range(last))


def test_a_gap_between_requests_has_no_step() -> None:
    program = generate(
        (GenerationRequest(prompt_tokens=1, new_tokens=1), GenerationRequest(prompt_tokens=2, new_tokens=1, joins=3))
    )
    assert [program.token(row) for row in range(program.num_rows)] == ["0PREFILL0", "0DECODE1", "0PREFILL2", "0DECODE3"]
