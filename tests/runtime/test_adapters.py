"""LoRA beside a frozen base: what it computes, which gradients it has, and PEFT's folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")
pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")

from runtime.hf_models import Wide, build, inputs_of, quiet  # noqa: E402
from runtime.one_process import alone  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional  # noqa: E402

import gnomon  # noqa: E402
from gnomon.errors import InputError  # noqa: E402
from gnomon.formats.huggingface.safetensors import read_header  # noqa: E402
from gnomon.models.lora import Adapters, with_adapters  # noqa: E402
from gnomon.plans import Plan, Precision, Schedule, Workload  # noqa: E402
from gnomon.runtime.checkpoint import adapters, pretrained  # noqa: E402
from gnomon.runtime.module.one_process import OneProcess  # noqa: E402
from gnomon.runtime.step.execute import Executor  # noqa: E402
from gnomon.runtime.watch.measure import CLASSES, Recorder  # noqa: E402
from gnomon.software import stack  # noqa: E402

pytestmark = pytest.mark.torch

FP64 = Precision(param="fp64", compute="fp64", grad="fp64", reduce="fp64", master="none", states="fp64")
PLAN = Plan(schedule=Schedule(name="one_f_one_b", num_microbatches=2), precision=FP64)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    with quiet():
        build("llama").save_pretrained(folder)
    return folder


def test_adapters_add_to_the_base_and_only_they_are_trained(base: Path) -> None:
    graph = with_adapters(pretrained.model_of(base).graph, Adapters(rank=4, targets=("q_proj", "down_proj")))
    ours = OneProcess(graph, values=pretrained.values_of(base, graph), dtype=torch.float64)
    assert {slot.name.rpartition(".lora_")[0].rpartition(".")[2] for slot in ours.slots} == {"q_proj", "down_proj"}
    flat = ours.parameters.flat
    assert flat is not None
    flat.add_(torch.randn(flat.shape, generator=torch.Generator().manual_seed(0), dtype=flat.dtype) * 0.1)
    held = {}
    for slot in ours.slots:
        value, matrix = ours.parameters.value(slot.name).clone(), (4, -1) if ".lora_A" in slot.name else (-1, 4)
        held[slot.name] = value.reshape(matrix).requires_grad_()
    with quiet(), Wide():
        plain = build("llama")
        for name, module in plain.named_modules():
            if name.endswith(("q_proj", "down_proj")):
                a, b = held[f"{name}.lora_A.weight"], held[f"{name}.lora_B.weight"]

                def beside(_: object, given: tuple[Tensor, ...], out: Tensor, a: Tensor = a, b: Tensor = b) -> Tensor:
                    return out + given[0] @ a.T @ b.T

                module.register_forward_hook(beside)
        batch = inputs_of(graph)
        logits = plain(input_ids=batch["input_ids"], use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
    assert abs(ours.loss(batch, count=batch["labels"].numel()) / float(loss.detach()) - 1) < 1e-9
    for slot in ours.slots:
        wanted = held[slot.name].grad
        assert wanted is not None
        assert (ours.gradient(slot).view_as(wanted) - wanted).abs().max() < 1e-9 * wanted.abs().max(), slot.name


def test_adapters_go_to_a_folder_of_peft_and_back(base: Path, tmp_path: Path) -> None:
    graph = with_adapters(pretrained.model_of(base).graph, Adapters(rank=4))
    workload = Workload(global_batch_size=2, seq_len=8)
    batch = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(2))
    with alone():
        executor = Executor(graph, PLAN, workload, values=pretrained.values_of(base, graph))
        stage = executor.stages[0]
        assert stage.frozen is not None and stage.frozen.flat is not None
        before = stage.frozen.flat.clone()
        recorder = Recorder(memory=True)
        executor.step(batch, recorder)
        held = {levels[CLASSES.index("parameters")] for _, levels in recorder.levels}
        single = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none")
        forecast = gnomon.predict(graph, "local:1", replace(PLAN, precision=single), workload, stack("gnomon"))
        assert held == {2 * forecast.memory[0].by_class["parameters"]}  # the frozen ones too
        pretrained.export(executor, tmp_path / "trained", model=base)
        assert torch.equal(before, stage.frozen.flat) and stage.frozen.grad is None
        trained = stage.own_parameters[0].flat
        assert trained is not None
        again = Executor(graph, PLAN, workload, values=adapters.values_of(tmp_path / "trained", graph))
        loaded = again.stages[0].own_parameters[0].flat
        assert loaded is not None and torch.equal(loaded, trained)
    config = json.loads((tmp_path / "trained" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 4)
    entries = read_header(tmp_path / "trained" / "adapter_model.safetensors").entries
    assert entries["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape == (4, 32)
    assert entries["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"].shape == (32, 4)
    (tmp_path / "trained" / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 8}))
    with pytest.raises(InputError, match="only lora_alpha = r is read"):
        adapters.values_of(tmp_path / "trained", graph)
