"""Latent attention from compressed pages: against attention over keys and values of every head, and its bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the engine's tests need it")
pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")

from safetensors.torch import load_file, save_file  # noqa: E402
from serve.against_generate import answers, greedy, served, theirs  # noqa: E402
from serve.served import write_adapter  # noqa: E402

from gnomon.graph.outputs import without_loss  # noqa: E402
from gnomon.runtime.checkpoint.pretrained import model_of  # noqa: E402
from gnomon.runtime.ops.paged import Visibility  # noqa: E402
from gnomon.serve.latent import LatentPages  # noqa: E402
from gnomon.serve.load import block_bytes, open_model  # noqa: E402
from gnomon.serve.rows import Part, TokenRows  # noqa: E402
from gnomon.serving.capacity import caching  # noqa: E402
from gnomon.serving.layout import Serving  # noqa: E402
from gnomon.serving.weights import shape_of  # noqa: E402

pytestmark = pytest.mark.torch
HEADS, NOPE, ROPE, RANK, VALUE, SIZE = 3, 4, 2, 8, 5, 4


@pytest.mark.parametrize("queries", [(1, 1, 1), (30, 1, 17)])
def test_compressed_pages_are_attention_over_all_heads(
    queries: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token of each sequence, and pieces long enough that keys are made again; in float64, spans of two blocks."""
    monkeypatch.setattr("gnomon.serve.latent.SPAN", 2 * SIZE)
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn((HEADS, NOPE + VALUE, RANK), generator=rng, dtype=torch.float64)
    seen = Visibility(scale=(NOPE + ROPE) ** -0.5)
    pages = LatentPages(64, SIZE, weight, (NOPE, ROPE), seen)
    lengths, made, tables = (33, 9, 40), [], []
    for number, length in enumerate(lengths):
        kept = torch.randn((length, RANK + ROPE), generator=rng, dtype=torch.float64)
        table = [20 * number + (7 * at) % 20 for at in range(-(-length // SIZE))]
        begin = length - queries[number]
        for at in range(begin):
            pages.pool[table[at // SIZE], at % SIZE] = kept[at]
        made.append(kept)
        tables.append(table)
    parts = [Part(n, length - q, [0] * q, True, 1) for n, (length, q) in enumerate(zip(lengths, queries, strict=True))]
    q = torch.randn((sum(queries), HEADS, NOPE + ROPE), generator=rng, dtype=torch.float64)
    new = torch.cat([kept[-q:] for kept, q in zip(made, queries, strict=True)])
    out = pages.attend(TokenRows.of(parts, [tables], [0, 0, 0]), q, new[:, :RANK], new[:, RANK:])
    at = 0
    for kept, count in zip(made, queries, strict=True):
        both = torch.einsum("lr,hwr->hlw", kept[:, :RANK], weight)
        keys = torch.cat([both[..., :NOPE], kept[:, RANK:].expand(HEADS, -1, -1)], dim=-1)
        own = q[at : at + count].transpose(0, 1)
        mask = torch.ones((count, len(kept)), dtype=torch.bool).tril(len(kept) - count)
        wanted = torch.nn.functional.scaled_dot_product_attention(
            own, keys, both[..., NOPE:].contiguous(), attn_mask=mask, scale=seen.scale
        )
        torch.testing.assert_close(out[at : at + count], wanted.transpose(0, 1), rtol=1e-10, atol=1e-10)
        at += count


def test_a_tokens_bytes_are_those_that_are_predicted_and_beginnings_are_shared(tmp_path: Path) -> None:
    model, ours = served("deepseek_v2", tmp_path)
    graph = model_of(tmp_path).graph
    serving = Serving(tp=1, pp=1, dp=1, ep=1, replicas=1, weights="fp32", kv="fp32", max_model_len=64)
    predicted = sum(kind.count * kind.bytes_per_token for kind in caching(shape_of(graph, serving, (1, 1)), serving))
    whole, _ = block_bytes(without_loss(graph), ours.model.sizes, torch.float32)
    assert whole / ours.model.sizes.block_tokens == predicted
    assert sum(pages.nbytes for pages in ours.model.pages) == whole * ours.model.sizes.blocks
    ids = [3 + (7 * i) % 90 for i in range(50)]
    keys = ours.add(ids, greedy(20), count=3)
    assert answers(ours) == dict.fromkeys(keys, theirs(model, ids, 20))
    assert ours.memory.found_tokens == 2 * 49


def test_an_adapter_of_the_up_projection_is_as_if_it_were_merged(tmp_path: Path) -> None:
    _, ours = served("deepseek_v3", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    own = {name.removesuffix(".weight"): weight for name, weight in weights.items() if "kv_b_proj" in name}
    merged = write_adapter(tmp_path / "lora", own, 1)
    adapted = open_model(tmp_path, ours.rules, dtype="fp32", kv_bytes=1 << 24, adapters=[("one", tmp_path / "lora")])
    save_file(weights | {f"{name}.weight": weight for name, weight in merged.items()}, tmp_path / "model.safetensors")
    whole = open_model(tmp_path, replace(ours.rules), dtype="fp32", kv_bytes=1 << 24)
    ids = [3 + (5 * i) % 90 for i in range(30)]
    made = []
    for engine, adapter in ((adapted, "one"), (whole, ""), (ours, ""), (adapted, "")):
        [key] = engine.add(ids, greedy(12), adapter=adapter)
        made.append(answers(engine)[key])
    assert made[0] == made[1] != made[2] == made[3]
