"""Bases in four bits: bytes as bitsandbytes writes them, folders that it wrote, and what is computed with them."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")
pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")

from runtime.hf_models import Wide, build, inputs_of, quiet  # noqa: E402
from runtime.nf4_bitsandbytes import digest, numbers  # noqa: E402
from runtime.one_process import alone  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.autograd.graph import saved_tensors_hooks  # noqa: E402
from torch.nn import functional  # noqa: E402

import gnomon  # noqa: E402
from gnomon.errors import InputError, PlanError  # noqa: E402
from gnomon.models.lora import Adapters, with_adapters  # noqa: E402
from gnomon.plans import Plan, Precision, Schedule, Workload  # noqa: E402
from gnomon.runtime.checkpoint import pretrained  # noqa: E402
from gnomon.runtime.module.apply import beginning  # noqa: E402
from gnomon.runtime.module.one_process import OneProcess  # noqa: E402
from gnomon.runtime.parameters import nf4  # noqa: E402
from gnomon.runtime.parameters.frozen import four_bit_of  # noqa: E402
from gnomon.runtime.parameters.parameters import CPU  # noqa: E402
from gnomon.runtime.step.execute import Executor  # noqa: E402
from gnomon.runtime.watch.measure import CLASSES, Recorder  # noqa: E402
from gnomon.software import stack  # noqa: E402
from gnomon.storage.tables import nf4_bytes  # noqa: E402

pytestmark = pytest.mark.torch

THEIRS: dict[str, Any] = json.loads(Path(__file__).with_name("nf4_bitsandbytes.json").read_text())
"""Printed by `python -m runtime.nf4_bitsandbytes` with bitsandbytes 0.50.2 for processors and torch 2.13: hashes of
bytes, and of one small weight all tensors."""
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STATE = "quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize("name", ["small", "large", "half"])
def test_bytes_and_numbers_are_those_of_bitsandbytes(name: str) -> None:
    theirs = THEIRS[name]
    weight = numbers(*theirs["shape"]).to(getattr(torch, theirs["dtype"]))
    blocks = nf4.quantised(weight)
    assert blocks.groups is not None
    assert (digest(blocks.codes), digest(blocks.scales)) == (theirs["codes"], theirs["scales"])
    assert (blocks.groups.tolist(), blocks.mean) == (theirs["groups"], theirs["mean"])
    form, held = blocks.part("w", weight.shape, (0, 0), weight.shape)
    assert digest(form.wide(held)) == theirs["wide"]
    assert held.numel() == nf4_bytes(weight.numel())
    maps = THEIRS["small"]["maps"]
    assert [digest(nf4.code(CPU)), digest(nf4.dynamic(CPU))] == [maps["quant_map"], maps["nested_quant_map"]]


@given(st.data())
def test_a_part_has_the_numbers_of_the_whole(data: st.DataObject) -> None:
    """Whatever range of rows, of columns or of a middle dim a rank has: the same numbers, or no part of a block."""
    whole = data.draw(st.sampled_from([(6, 128), (4, 3, 64), (2, 192, 5), (300, 64), (3, 7)]))
    cuts = [sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in whole]
    offset, shape = [a for a, _ in cuts], [b - a for a, b in cuts]
    weight = numbers(*whole)
    blocks = nf4.quantised(weight)
    every, held = blocks.part("w", whole, (0,) * len(whole), whole)
    own = every.wide(held).view(whole)
    error = (own - weight).abs()
    assert error.max() <= 0.16 * weight.abs().max()  # half of the widest step
    for dim, (first, length) in enumerate(zip(offset, shape, strict=True)):
        own = own.narrow(dim, first, length)
    try:
        form, mine = blocks.part("w", whole, offset, shape)
    except PlanError as refused:
        last = max(dim for dim, n in enumerate(whole) if shape[dim] != n)
        inner = torch.Size(whole[last + 1 :]).numel()
        assert any(n * inner % 64 for n in (whole[last], offset[last], shape[last])), refused
        return
    assert torch.equal(form.wide(mine).view(shape), own)
    assert mine.numel() == form.nbytes <= nf4_bytes(own.numel()) + 4 * form.num_groups


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    with quiet():
        build("llama").float().save_pretrained(folder)
    return folder


def as_bitsandbytes(base: Path, target: Path, *, doubled: bool = True) -> Path:
    """The folder with its linears in NF4, by the names that bitsandbytes gives; scales in fp32 where not doubled."""
    tensors = load_file(base / "model.safetensors")
    for name in [n for n in tensors if n.split(".")[-2] in LINEARS]:
        weight = tensors[name]
        blocks = nf4.quantised(weight)
        said = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
        assert blocks.groups is not None
        beside = {"absmax": blocks.scales, "nested_absmax": blocks.groups, "nested_quant_map": nf4.dynamic(CPU).clone()}
        if doubled:
            said |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": blocks.mean}
        else:
            beside = {"absmax": weight.view(-1, 64).abs().amax(1)}
        beside |= {
            "quant_map": nf4.code(CPU).clone(),
            STATE: torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8),
        }
        tensors |= {name: blocks.codes[:, None], **{f"{name}.{what}": x for what, x in beside.items()}}
    target.mkdir()
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (target / "config.json").write_text(json.dumps(config))
    save_file(tensors, target / "model.safetensors")
    return target


def test_a_tensor_that_bitsandbytes_wrote_is_read_to_its_numbers(base: Path, tmp_path: Path) -> None:
    tensors, small = load_file(base / "model.safetensors"), THEIRS["small"]
    name, other = "model.layers.0.mlp.up_proj.weight", as_bitsandbytes(base, tmp_path / "theirs")
    assert tensors[name].shape == (48, 32)
    held = load_file(other / "model.safetensors")
    for what, (dtype, shape, text) in small["tensors"].items():
        bytes_ = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        held[f"{name}.{what}" if what else name] = bytes_.view(getattr(torch, dtype)).view(shape)
    said = json.loads(bytes(held[f"{name}.{STATE}"].tolist()))
    assert (said["blocksize"], said["nested_blocksize"], said["shape"]) == (64, 256, [24, 64])
    said["shape"] = [48, 32]  # as many numbers, in rows of the model's
    held[f"{name}.{STATE}"] = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
    save_file(held, other / "model.safetensors")
    graph = with_adapters(pretrained.model_of(other).graph, Adapters(rank=4, base="nf4"))
    ours = OneProcess(graph, values=pretrained.values_of(other, graph), dtype=torch.float32)
    assert ours.stage.four_bit is not None
    assert digest(ours.stage.four_bit.value(name)) == small["wide"]


def plain_loss(ours: OneProcess, base: Path) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradients of the adapters) of transformers' model in float64 with what our base stands for."""
    held = {}
    for slot in ours.slots:
        value, matrix = ours.parameters.value(slot.name).clone(), (4, -1) if ".lora_A" in slot.name else (-1, 4)
        held[slot.name] = value.reshape(matrix).requires_grad_()
    still = ours.stage.four_bit
    assert still is not None
    with quiet(), Wide():
        plain = build("llama")
    linears = {name: module for name, module in plain.named_modules() if name.endswith(LINEARS)}
    made = {name: still.value(f"{name}.weight").view_as(module.weight) for name, module in linears.items()}
    stored = {name: x.double() for name, x in load_file(base / "model.safetensors").items()}
    with quiet(), Wide():
        plain.load_state_dict(stored, strict=False)
        for name, module in linears.items():
            assert 0 < (made[name] - module.weight).abs().max() < 0.2 * module.weight.abs().max(), name
            module.weight.data.copy_(made[name])
            a, b = held[f"{name}.lora_A.weight"], held[f"{name}.lora_B.weight"]

            def beside(_: object, given: tuple[Tensor, ...], out: Tensor, a: Tensor = a, b: Tensor = b) -> Tensor:
                return out + given[0] @ a.T @ b.T

            module.register_forward_hook(beside)
        batch = inputs_of(ours.graph)
        logits = plain(input_ids=batch["input_ids"], use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach()), {name: x.grad for name, x in held.items() if x.grad is not None}


@pytest.mark.parametrize("kind", ["plain", "doubled", "single"])
def test_adapters_learn_on_what_the_four_bits_stand_for(base: Path, tmp_path: Path, kind: str) -> None:
    folder = base if kind == "plain" else as_bitsandbytes(base, tmp_path / kind, doubled=kind == "doubled")
    graph = with_adapters(pretrained.model_of(folder).graph, Adapters(rank=4, base="nf4"))
    ours = OneProcess(graph, values=pretrained.values_of(folder, graph), dtype=torch.float64)
    flat = ours.parameters.flat
    assert flat is not None
    flat.add_(torch.randn(flat.shape, generator=torch.Generator().manual_seed(0), dtype=flat.dtype) * 0.1)
    wanted, gradients = plain_loss(ours, base)
    batch, kept = inputs_of(graph), list[Tensor]()
    with saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        loss = ours.loss(batch, count=batch["labels"].numel())
    assert abs(loss / wanted - 1) < 1e-9
    assert len(gradients) == len(list(ours.slots)) > 0
    for slot in ours.slots:
        grad = gradients[slot.name]
        assert (ours.gradient(slot).view_as(grad) - grad).abs().max() < 1e-9 * grad.abs().max(), slot.name
    assert {(48, 32), (32, 48), (16, 32)}.isdisjoint(tuple(x.shape) for x in kept), "a wide weight waits for backward"


def test_it_holds_the_bytes_that_were_predicted(base: Path) -> None:
    graph = with_adapters(pretrained.model_of(base).graph, Adapters(rank=4, base="nf4"))
    whole = with_adapters(pretrained.model_of(base).graph, Adapters(rank=4))
    precision = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none")
    plan = Plan(schedule=Schedule(name="one_f_one_b", num_microbatches=2), precision=precision)
    workload = Workload(global_batch_size=2, seq_len=8)
    held = []
    with alone():
        for model in (graph, whole):
            executor = Executor(model, plan, workload, values=pretrained.values_of(base, model))
            recorder = Recorder(memory=True)
            executor.step(torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(2)), recorder)
            (parameters,) = {levels[CLASSES.index("parameters")] for _, levels in recorder.levels}
            forecast = gnomon.predict(model, "local:1", plan, workload, stack("gnomon"))
            assert forecast.memory[0].by_class["parameters"] == parameters
            held.append(parameters)
    narrow = [slot for slot in executor.stages[0].frozen.slots if slot.name.split(".")[-2] in LINEARS]  # type: ignore[union-attr]
    assert held[1] - held[0] == sum(4 * (s.stop - s.start) - nf4_bytes(s.stop - s.start) for s in narrow) > 0


def test_what_does_not_fit_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    theirs = as_bitsandbytes(base, tmp_path / "theirs")
    plain = pretrained.model_of(base).graph
    with pytest.raises(InputError, match=r"weight in four bits; name the model with \+qlora16"):
        pretrained.values_of(theirs, plain)
    graph = with_adapters(plain, Adapters(rank=4, base="nf4"))
    held, name = load_file(theirs / "model.safetensors"), "model.layers.1.self_attn.q_proj.weight"
    changed = {n: x for n, x in held.items() if not n.startswith(name)}
    save_file({**changed, name: numbers(32, 32)}, theirs / "model.safetensors")
    with pytest.raises(InputError, match=f"has {name} whole, and the model has it in four bits"):
        pretrained.values_of(theirs, graph)
    save_file({**changed, name: held[name]}, theirs / "model.safetensors")
    with pytest.raises(InputError, match=f"{name} is .*, not"):
        pretrained.values_of(theirs, graph)
    renamed = {n.replace("__nf4", "__fp4"): x for n, x in held.items()}
    save_file(renamed, theirs / "model.safetensors")
    with pytest.raises(InputError, match="only NF4 is read"):
        pretrained.values_of(theirs, graph)
    said = bytes(held[f"{name}.{STATE}"].tolist()).replace(b'"blocksize": 64', b'"blocksize": 32', 1)
    save_file(held | {f"{name}.{STATE}": torch.tensor(list(said), dtype=torch.uint8)}, theirs / "model.safetensors")
    values = pretrained.values_of(theirs, graph)
    with pytest.raises(InputError, match="has a scale for 32 weights"):
        OneProcess(graph, values=values)
    save_file(held | {f"{name}.quant_map": torch.linspace(-1, 1, 16)}, theirs / "model.safetensors")
    values = pretrained.values_of(theirs, graph)
    with pytest.raises(InputError, match="is not that of bitsandbytes' NF4"):
        OneProcess(graph, values=values)


def test_random_bases_are_quantised_alike_whatever_the_part(base: Path) -> None:
    """A rank that begins with part of a weight has the numbers that one process has of it."""
    graph = with_adapters(pretrained.model_of(base).graph, Adapters(rank=4, base="nf4"))
    ours = OneProcess(graph, dtype=torch.float64, seed=3).stage.four_bit
    assert ours is not None
    name = "model.layers.0.self_attn.q_proj.weight"
    slot = ours.by_name[name]
    half = replace(slot, shape=(slot.shape[0] // 2, *slot.shape[1:]), offset=(slot.shape[0] // 2, *slot.offset[1:]))
    part = four_bit_of([half], torch.float64, beginning(None, graph, 3), None, CPU)
    assert part is not None
    assert torch.equal(part.value(name), ours.value(name)[slot.shape[0] // 2 :])
