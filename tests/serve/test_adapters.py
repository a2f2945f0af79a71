"""Requests with adapters by name answer as PEFT does, whoever runs beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the engine's tests need it")
pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")

from serve.against_generate import answers, greedy, served, theirs  # noqa: E402
from serve.served import write_adapter  # noqa: E402

from gnomon.errors import InputError  # noqa: E402
from gnomon.serve.engine import Engine  # noqa: E402
from gnomon.serve.load import open_model  # noqa: E402

pytestmark = pytest.mark.torch


def linears(model: Any, targets: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Weights of the modules with these last names."""
    return {name: one.weight.detach() for name, one in model.named_modules() if name.rpartition(".")[2] in targets}


@pytest.mark.parametrize("kind", ["qwen2", "granite", "mixtral"])
def test_requests_of_two_adapters_and_of_none_answer_as_merged_models(kind: str, tmp_path: Path) -> None:
    """In one batch, in pieces, with a beginning that all three have: keys of one adapter are no other's."""
    model, plain = served(kind, tmp_path / "base")
    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    both = attention if kind == "mixtral" else attention + mlp
    merged = {
        "": {},
        "one": write_adapter(tmp_path / "one", linears(model, both), 1),
        "two": write_adapter(tmp_path / "two", linears(model, ("v_proj", "o_proj")), 2, r=2, use_rslora=True),
    }
    names = [(name, tmp_path / name) for name in ("one", "two")]
    ours = open_model(tmp_path / "base", plain.rules, dtype="fp32", kv_bytes=1 << 26, adapters=names)
    assert (ours.model.program is None) == (kind == "mixtral")
    ids = [3 + (7 * i) % 90 for i in range(21)]
    keys = {name: ours.add(ids, greedy(16), adapter=name)[0] for name in merged}
    made = answers(ours)
    again = {name: ours.add(ids, greedy(16), adapter=name)[0] for name in merged}
    repeated = answers(ours)
    for name, weights in merged.items():
        held = {module: model.get_submodule(module).weight.detach().clone() for module in weights}
        for module, weight in weights.items():
            model.get_submodule(module).weight.data.copy_(weight)
        wanted = theirs(model, ids, 16)
        assert made[keys[name]] == wanted and repeated[again[name]] == wanted, name
        for module, weight in held.items():
            model.get_submodule(module).weight.data.copy_(weight)
    assert len({tuple(made[key]) for key in keys.values()}) == 3


def test_adapters_that_are_not_served_are_refused_in_a_line(tmp_path: Path) -> None:
    model, plain = served("llama", tmp_path / "base")

    def opened(name: str) -> Engine:
        return open_model(
            tmp_path / "base", plain.rules, dtype="fp32", kv_bytes=1 << 24, adapters=[(name, tmp_path / name)]
        )

    for name, config, why in (
        ("dora", {"use_dora": True}, "use_dora"), ("many", {"r": 600}, "rank 600"),
        ("ranks", {"rank_pattern": {"q_proj": 4}}, "rank_pattern"), ("other", {"peft_type": "IA3"}, "IA3"),
    ):  # fmt: skip
        write_adapter(tmp_path / name, linears(model, ("q_proj",)), 1, **config)
        with pytest.raises(InputError, match=why):
            opened(name)
    write_adapter(tmp_path / "head", linears(model, ("lm_head",)), 1)
    with pytest.raises(InputError, match="lm_head, which is no linear"):
        opened("head")
    with pytest.raises(InputError, match="there is no adapter 'x'"):
        plain.add([5], greedy(1), adapter="x")
