"""The engine answers as transformers' `generate` does, and as itself when requests share, are cut, or are set back.

A sample of model types; `python benchmarks/serve/models.py` prints all of them over 200 tokens.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the engine's tests need it")
pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")

from runtime.hf_models import CONFIGS  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from serve.against_generate import answers, compare, greedy, served, theirs  # noqa: E402

from gnomon.errors import InputError, PlanError  # noqa: E402
from gnomon.runtime.checkpoint.pretrained import model_of  # noqa: E402
from gnomon.runtime.ops.paged import Visibility  # noqa: E402
from gnomon.serve.load import DTYPES, open_model, state_bytes  # noqa: E402
from gnomon.serve.messages import Ask  # noqa: E402
from gnomon.serve.paged import Pages, Room  # noqa: E402
from gnomon.serve.rows import Part, TokenRows, Turn  # noqa: E402
from gnomon.serve.sampling import Sampling  # noqa: E402
from gnomon.serve.scan import LayerScan  # noqa: E402
from gnomon.serve.vocabulary import Vocabulary  # noqa: E402
from gnomon.serve.worker import Worker  # noqa: E402
from gnomon.serving.scheduler import Scheduler  # noqa: E402
from gnomon.software.engine import engine  # noqa: E402

pytestmark = pytest.mark.torch

SAMPLE = ("gemma2", "gpt_oss", "deepseek_v3", "bloom", "phi3 (longrope)", "granitemoehybrid", "qwen2_moe")


@pytest.mark.parametrize("kind", SAMPLE)
def test_greedy_tokens_are_those_of_generate(kind: str, tmp_path: Path) -> None:
    compared = compare(kind, tmp_path, count=24)
    assert not compared.refusal and compared.same == compared.count, compared


def test_requests_that_share_are_cut_or_set_back_answer_the_same(tmp_path: Path) -> None:
    """A prompt in pieces, one that begins like another, several answers to one prompt, and blocks that run out."""
    model, ours = served("llama", tmp_path, max_batched_tokens=8, max_seqs=3)
    ids = [3 + (7 * i) % 90 for i in range(40)]
    wanted = theirs(model, ids, 30)
    first = ours.add(ids, greedy(30))
    assert answers(ours) == {first[0]: wanted}
    again = ours.add(ids, greedy(30), count=3)
    assert answers(ours) == dict.fromkeys(again, wanted)
    assert ours.memory.found_tokens >= 32 + 2 * 39  # whole blocks of the first, and the prompt of its own first answer
    tight = open_model(tmp_path, ours.rules, dtype="fp32", kv_bytes=9 * 16 * 2 * 2 * 16 * 4, max_model_len=128)
    keys = [tight.add([*ids, one], greedy(50))[0] for one in (5, 6, 7)]
    made = answers(tight)
    assert tight.preemptions > 0
    assert [made[key] for key in keys] == [theirs(model, [*ids, one], 50) for one in (5, 6, 7)]


@pytest.mark.parametrize("kind", ["gemma2", "granitemoehybrid"])
def test_beginnings_are_found_where_layers_have_windows_or_states(kind: str, tmp_path: Path) -> None:
    """A prompt, another that begins alike, a third that finds the second's snapshot, the first's next turn, and several
    answers to one prompt."""
    model, ours = served(kind, tmp_path)
    ids = [3 + (7 * i) % 90 for i in range(60)]
    found = []
    said = theirs(model, [*ids[:40], 7, 8], 20)
    for prompt in ([*ids[:40], 7, 8], [*ids[:40], *ids[50:]], [*ids[:40], 9, 9, 9], [*ids[:40], 7, 8, *said, 5]):
        key, *_ = ours.add(prompt, greedy(20))
        before = ours.memory.found_tokens
        assert answers(ours) == {key: theirs(model, prompt, 20)}
        found.append(ours.memory.found_tokens - before)
    assert found[2:] == [32, 48] and found[1] in (0, 32), found
    keys = ours.add(ids, greedy(20), count=3)
    assert answers(ours) == dict.fromkeys(keys, theirs(model, ids, 20))


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
def test_a_states_bytes_are_those_of_its_tensors(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What snapshots are counted with, and what the scans hold for each slot."""
    scans = []

    class Seen(LayerScan):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            scans.append(self)

    monkeypatch.setattr("gnomon.serve.decoder.LayerScan", Seen)
    _, ours = served("granitemoehybrid", tmp_path)
    scans.clear()
    opened = open_model(tmp_path, ours.rules, dtype=dtype, kv_bytes=2**24, max_model_len=128)
    held = sum(scan.nbytes // len(scan.states) for scan in scans)
    assert scans and held == state_bytes(model_of(tmp_path).graph, DTYPES[dtype])
    assert opened.rules == ours.rules


def test_log_probabilities_of_a_prompt_are_the_models(tmp_path: Path) -> None:
    """In pieces of eight tokens, between requests without, found before (which has no logits), and after a preemption,
    against the model's own log-softmax."""
    model, ours = served("llama", tmp_path, max_batched_tokens=8, max_seqs=3)
    tight = open_model(tmp_path, ours.rules, dtype="fp32", kv_bytes=9 * 16 * 2 * 2 * 16 * 4, max_model_len=128)
    ids = [3 + (7 * i) % 90 for i in range(40)]
    asked = replace(greedy(30), prompt_logprobs=2)
    with torch.inference_mode():
        logs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    for engine_, others in ((ours, 1), (ours, 0), (tight, 2)):
        engine_.add([5, 6, 7], greedy(9))
        [key, *_] = engine_.add(ids, asked)
        for other in range(others):
            engine_.add([*ids, other], greedy(50))
        told = None
        while engine_.has_work:
            for one in engine_.step():
                assert one.scores is None or (one.key == key and told is None)
                told = one.scores if one.scores is not None else told
        assert told is not None and [one.token for one in told] == ids[1:]
        for at, one in enumerate(told):
            best = logs[at].topk(2)
            assert one.logprob == pytest.approx(float(logs[at, ids[at + 1]]), abs=1e-4)
            assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)
            assert one.rank == int((logs[at] >= logs[at, ids[at + 1]]).sum())
    assert tight.preemptions > 0 and not tight.memory.problems() and not ours.memory.problems()
    [alone] = ours.add([5], asked, count=2)[:1]
    made = [one for one in iter(lambda: ours.step() if ours.has_work else None, None) for one in one]
    assert [one.scores for one in made if one.scores is not None] == [()] and made[0].key == alone


def test_a_cancelled_request_leaves_nothing_and_disturbs_nobody(tmp_path: Path) -> None:
    model, ours = served("mistral", tmp_path)
    ids = [3 + (5 * i) % 90 for i in range(30)]
    keys = [ours.add(ids[:n], greedy(20))[0] for n in (30, 12, 25)]
    ours.step()
    ours.cancel(keys[0])
    ours.step()
    ours.cancel(keys[1])
    assert answers(ours)[keys[2]][-1] == theirs(model, ids[:25], 20)[-1]


def test_a_seed_draws_the_same_whoever_runs_beside(tmp_path: Path) -> None:
    _, ours = served("llama", tmp_path)
    drawn = Sampling(max_tokens=12, temperature=0.9, top_p=0.9, top_k=40, seed=7)
    [alone] = ours.add([5, 6, 7], drawn)
    first = answers(ours)[alone]
    ours.add([9] * 20, Sampling(max_tokens=20, temperature=1.0))
    [beside] = ours.add([5, 6, 7], drawn)
    assert answers(ours)[beside] == first


def test_next_to_no_temperature_takes_the_likeliest(tmp_path: Path) -> None:
    _, ours = served("llama", tmp_path)
    keys = [
        ours.add([5, 6, 7], Sampling(max_tokens=9, temperature=temperature, seed=1))[0]
        for temperature in (0.0, 1e-6, 1e-40, 1e-300)
    ]
    made = answers(ours)
    assert len({tuple(made[key]) for key in keys}) == 1


def test_without_a_tokenizer_each_token_is_told_as_it_comes(tmp_path: Path) -> None:
    """Bytes that are no whole letter yet, among them."""
    _, ours = served("llama", tmp_path)
    heard: list[Any] = []
    worker = Worker([ours], Vocabulary.open(tmp_path, None), heard.append)
    streamed, whole = (
        Ask(number=at, prompt=(5, 80, 7), sampling=greedy(6), first=0, count=1, streams=not at) for at in range(2)
    )
    worker.take(streamed)
    worker.take(whole)
    while worker.has_work:
        worker.step()
    told = [one for tokens in heard for one in tokens.deltas]
    assert [len(one.tokens) for one in told if one.number == 0] == [1] * 6
    [end] = [one for one in told if one.number == 1]
    assert [token.id for token in end.tokens] == [one.tokens[0].id for one in told if one.number == 0]


def test_what_can_never_be_answered_is_said(tmp_path: Path) -> None:
    _, ours = served("llama", tmp_path, length=64)
    with pytest.raises(InputError, match=r"60 \+ 10 tokens.*at most 64"):
        ours.add([5] * 60, greedy(10))
    for token in (-1, 1 << 20):
        with pytest.raises(InputError, match=f"has token {token}, and the model's tokens are 0 to"):
            ours.add([5, token], greedy(10))
    with pytest.raises(InputError, match="give more memory"):
        open_model(tmp_path, engine("gnomon"), dtype="fp32", kv_bytes=1000)


def test_weights_that_are_no_numbers_are_found_before_serving(tmp_path: Path) -> None:
    _, ours = served("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"].view(-1)[7] = float("nan")
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"up_proj\.weight of .* has 1 weights that are no numbers"):
        open_model(tmp_path, ours.rules, dtype="fp32", kv_bytes=1 << 24)


def test_encoders_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    config = {**CONFIGS["bert"], "model_type": "bert", "architectures": ["BertForMaskedLM"]}
    config.pop("attention_dropout", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match="is no decoder"):
        open_model(tmp_path, engine("gnomon"), dtype="fp32", kv_bytes=1 << 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "seen",
    [
        Visibility(scale=0.3),
        Visibility(scale=0.3, window=7),
        Visibility(scale=0.3, cap=2.0),
        Visibility(scale=0.3, causal=False),
        Visibility(scale=0.3, causal=False, window=5),
    ],
)
def test_attention_over_pages_is_attention(seen: Visibility, dtype: torch.dtype) -> None:
    """The kernel and PyTorch's columns of pages, against one softmax over each whole sequence in float64."""
    torch.manual_seed(0)
    for heads, kv_heads, k_dim, v_dim, extra in ((4, 2, 24, 8, "sinks"), (6, 2, 16, 20, "slopes"), (11, 1, 8, 32, "")):
        shapes = [(37, 30), (3, 80), (1, 17)]  # (new tokens, before them)
        own = {extra: torch.rand(heads)} if extra else {}
        room = Room(blocks=16, size=16, kv_heads=kv_heads, k_dim=k_dim, v_dim=v_dim, dtype=dtype)
        pages = [Pages(room, replace(seen, **own)) for _ in range(2)]
        assert pages[0].call is not None
        for held in (pages[0].pool.keys, pages[0].pool.values):
            held.fill_(torch.nan)  # what no token has written may be anything
        pages[1].call = None
        order, tables, whole = torch.randperm(16).tolist(), [], []
        for new, before in shapes:
            tables.append([order.pop() for _ in range(-(-(new + before) // 16))])
            whole.append([torch.randn(new + before, n, d).to(dtype) for n, d in ((kv_heads, k_dim), (kv_heads, v_dim))])
        for part in (0, 1):  # what was before, then what is new
            cut = [slice(0, before) if part == 0 else slice(before, None) for _, before in shapes]
            counts = [b if part == 0 else n for n, b in shapes]
            parts = [Part(i, c.start, [0] * n, True, 1) for i, (c, n) in enumerate(zip(cut, counts, strict=True))]
            rows = TokenRows.of(parts, [tables], [-1] * 3)
            q = torch.randn(sum(counts), heads, k_dim).to(dtype)
            k, v = (torch.cat([own[i][c] for own, c in zip(whole, cut, strict=True)]) for i in (0, 1))
            made = [one.attend(rows, q, k, v).double() for one in pages]
        begin = 0
        for (new, before), (k, v) in zip(shapes, whole, strict=True):
            wanted = _plain(q[begin : begin + new].double(), k.double(), v.double(), seen, before, own)
            for one in made:
                limit = 1e-5 if dtype == torch.float32 else 1e-2
                assert (one[begin : begin + new] - wanted).abs().max() < limit
            begin += new


def _plain(q, k, v, seen, before, own):  # type: ignore[no-untyped-def]
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    score = torch.einsum("qhd,khd->hqk", q, k) * seen.scale
    if seen.cap:
        score = torch.tanh(score / seen.cap) * seen.cap
    distance = torch.arange(len(k)) - torch.arange(before, before + len(q))[:, None]
    if "slopes" in own:
        score = score + own["slopes"].double()[:, None, None] * distance
    hidden = distance > 0 if seen.causal else torch.zeros_like(distance, dtype=torch.bool)
    if seen.window:
        hidden = hidden | (distance.abs() >= seen.window)
    score = score.masked_fill(hidden, -torch.inf)
    if "sinks" in own:
        sinks = own["sinks"].double()[:, None, None].expand(-1, len(q), 1)
        shares = torch.cat([score, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        shares = score.softmax(-1)
    return torch.einsum("hqk,khd->qhd", shares, v)


@pytest.mark.parametrize("kind", ["gemma2", "cohere"])
def test_some_tokens_after_the_other_compute_what_all_at_once_do(kind: str, tmp_path: Path) -> None:
    """Between two ops that look beyond a token, with what is made on the way in rows that are used again; some of these
    models compute attention and gates beside each other."""
    _, ours = served(kind, tmp_path, max_batched_tokens=64)
    made = []
    for together in (12, 252):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("gnomon.serve.forward.TOGETHER", together)
            one = open_model(tmp_path, ours.rules, dtype="bf16", kv_bytes=1 << 24)
        assert one.model.program is not None and any(op.brief for op in one.model.program.ops)
        parts = [Part(0, 0, [*range(5, 46)], True, 41), Part(1, 0, [7, 8], True, 2)]
        turn = Turn(parts, [[[0, 1, 2], [3]]] * 2, [-1] * 2, ())
        made.append(one.model.forward(turn.rows()))
    assert torch.equal(*made)


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "cohere", "qwen3"])
def test_layers_in_one_call_compute_what_ops_one_by_one_do(kind: str, tmp_path: Path) -> None:
    """In bfloat16, where each rounds in its own places: logits of a prompt in pieces and of tokens after it."""
    _, ours = served(kind, tmp_path)
    engines = [open_model(tmp_path, ours.rules, dtype="bf16", kv_bytes=1 << 24) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gnomon.serve.forward.kernel", lambda dtype: None)
        engines[1] = open_model(tmp_path, ours.rules, dtype="bf16", kv_bytes=1 << 24)
    assert engines[1].model.program is None
    if kind != "gpt_oss":  # experts run op by op
        assert engines[0].model.program is not None
    logits: list[list[torch.Tensor]] = [[], []]
    for at, one in enumerate(engines):
        forward = one.model.forward
        one.model.forward = lambda rows, at=at, forward=forward: logits[at].append(forward(rows)) or logits[at][-1]  # type: ignore[method-assign]
        for prompt in ([5] * 30, [7, 8, 9]):
            one.add(prompt, greedy(3))
        while one.has_work:
            one.step()
    for first, second in zip(*logits, strict=True):
        if len(first):
            assert (first.float() - second.float()).abs().max() < 0.06 * second.float().abs().max()


def test_the_simulators_scheduler_makes_the_same_batches_of_recorded_arrivals(tmp_path: Path) -> None:
    """What the engine decided on the wall clock, decided again without keys or a model: beginnings that are found in a
    model with windows, and cancelled requests among it."""
    _, ours = served("mistral", tmp_path, max_batched_tokens=24, max_seqs=3)
    ours.record = []
    prompts: dict[int, list[int]] = {}
    said: dict[int, list[int]] = {}

    def step() -> None:
        for one in ours.step():
            said.setdefault(one.key, []).append(one.chosen.token)

    rng = torch.Generator().manual_seed(1)
    for length, most in torch.randint(1, 40, (12, 2), generator=rng).tolist():
        prompt = [5 + length % 3] * length
        key = ours.add(prompt, greedy(most))[0]
        prompts[key] = prompt
        for _ in range(most % 5):
            step()
        if most % 6 == 0:
            ours.cancel(key)
    while ours.has_work:
        step()
    assert ours.memory.found_tokens > 30
    memory = ours.model.blocks(prefix_cache=True)
    again, compared = Scheduler(ours.rules, ours.model.sizes.blocks, memory), 0
    for seen in ours.record:
        for key in seen.cancelled:
            again.cancel(key)
            memory.remove(key)
        for key, *_ in seen.arrivals:
            memory.add(key, prompts[key])
        batch = again.step(seen.arrivals, seen.finished)
        for key in seen.finished:
            memory.remove(key)
        assert (list(batch.pieces), batch.decodes, batch.kv_tokens) == (
            list(seen.batch.pieces), seen.batch.decodes, seen.batch.kv_tokens,
        )  # fmt: skip
        ended = {piece.key for piece in batch.pieces if piece.last}
        parts = [(piece.key, piece.prefix, piece.prefix + piece.new, piece.last) for piece in batch.pieces]
        if batch.decodes:
            decode = [key for key in again.decode_order() if key not in ended]
            parts += [
                (key, len(memory.sequences[key].tokens) - 1, len(memory.sequences[key].tokens), True) for key in decode
            ]
        for key, start, stop, _ in parts:
            memory.extend(key, start, stop)
        for key, _, stop, samples in parts:
            memory.mark_written(key, stop)
            if samples:
                memory.sequences[key].tokens.append(said[key].pop(0))
        compared += 1
    assert compared > 40 and again.free == again.total
