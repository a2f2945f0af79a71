"""Routers recorded by `gnomon run --record-router`: counts against transformers' own router logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")
transformers = pytest.importorskip("transformers", reason="transformers is the oracle of these tests")

from runtime.hf_models import TEXT  # noqa: E402
from runtime.parity import FP32  # noqa: E402
from runtime.training import source  # noqa: E402

from gnomon.cli import main  # noqa: E402
from gnomon.formats.router import read_router  # noqa: E402
from gnomon.plans import Layout, Mesh, Plan, PlanFile, Saved, SavedRule, Schedule, Workload, save_plan_file  # noqa: E402
from gnomon.runtime import Corpus  # noqa: E402

pytestmark = pytest.mark.torch

WORK = Workload(global_batch_size=4, seq_len=32)
TINY = {**TEXT, "vocab_size": 256, "num_experts_per_tok": 2}
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {**TINY, "num_local_experts": 4},
    "qwen3_moe": {**TINY, "num_experts": 4, "moe_intermediate_size": 16, "decoder_sparse_step": 1},
}
ALONE = Plan(schedule=Schedule(num_microbatches=2), precision=FP32)
DIVIDED = replace(ALONE, mesh=Mesh(dp_shard=2, ep=2), saved=Saved(preset="full"))
SEQUENCES = replace(ALONE, mesh=Mesh(tp=2, ep=2), layout=Layout(sequence_parallel=True))
STAGES = replace(ALONE, mesh=Mesh(pp=2), saved=Saved(rules=(SavedRule(action="recompute"),)))


def saved_model(kind: str, folder: Path) -> Any:
    """The tiny model, and its folder with weights whose routers spread tokens unevenly."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**KINDS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.normal_()
    model.save_pretrained(folder)
    return model


def counts_of(model: Any, ids: Any) -> Any:
    """(layers, experts): by top-k of transformers' router logits, which are nowhere near a tie."""
    with torch.no_grad():
        logits = model(input_ids=ids, output_router_logits=True).router_logits
    best = torch.stack([layer.reshape(-1, layer.shape[-1]).sort(-1, descending=True).values for layer in logits])
    assert (best[..., 1] - best[..., 2]).min() > 1e-5
    chosen = [layer.reshape(-1, layer.shape[-1]).topk(2, dim=-1).indices.flatten() for layer in logits]
    return torch.stack([torch.bincount(layer, minlength=4) for layer in chosen]).numpy()


@pytest.mark.parametrize(
    ("kind", "plan"), [("qwen3_moe", ALONE), ("mixtral", DIVIDED), ("qwen3_moe", SEQUENCES), ("mixtral", STAGES)]
)
def test_counts_are_those_of_transformers_routers(
    kind: str, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under ranks that divide experts, sequences, positions or layers; computed again in backward or not; validated at
    the end. The learning rate is too small to change a weight."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("".join(f"line {i} of {i * i}, and the loss goes down. " for i in range(600)))
    model = saved_model(kind, tmp_path / "model")
    file = PlanFile(model="model", on=f"{plan.world_size}xcpu-process", workload=WORK, plan=plan)
    save_plan_file(file, tmp_path / "plan.toml")
    words = "run plan.toml --data text --weights model --steps 2 --lr 1e-30 --record-router router.npz"
    status = main(words.split())
    out, err = capsys.readouterr()
    assert status == 0, err
    assert "wrote router.npz: the tokens of each expert" in out
    record, corpus = read_router(Path("router.npz")), Corpus.open(source(text), lambda line: None)
    assert record.steps == (1, 2) and [router.layer for router in record.routers] == ["layers[0]", "layers[1]"]
    assert {(router.experts, router.topk) for router in record.routers} == {(4, 2)}
    for index, step in enumerate(record.steps):
        ids = corpus.batch(step, seed=0, sequences=4, seq_len=32)["input_ids"]
        assert record.counts[index].tolist() == counts_of(model, ids).tolist()
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]
    if plan is not ALONE:
        return
    assert main(words.replace("--record-router", "--router").split()) == 0
    assert "the prediction takes the router's load of router.npz" in " ".join(capsys.readouterr().out.split())
