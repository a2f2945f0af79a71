"""Multi-token prediction is what DeepSeek-V3's report says (section 2.2), and its weights lie as DeepSeek writes them.

The oracle is a module of plain torch around the decoder layer of transformers, whose own model leaves these out.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")
pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")

from runtime.hf_models import Wide, build, quiet  # noqa: E402
from runtime.ranks import launch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import gnomon  # noqa: E402
from gnomon.formats.huggingface.known import layout  # noqa: E402
from gnomon.graph.outputs import losses, without_loss  # noqa: E402
from gnomon.plans import Mesh, Optimizer, Plan, Precision, Schedule, Workload  # noqa: E402
from gnomon.runtime.checkpoint.pretrained import export, load, model_of, values_of  # noqa: E402
from gnomon.runtime.data.packing import DOCUMENTS, with_further  # noqa: E402
from gnomon.runtime.module.one_process import OneProcess  # noqa: E402
from gnomon.runtime.parameters.weights import Folder, WeightReader, settled  # noqa: E402
from gnomon.runtime.step.execute import Executor  # noqa: E402

pytestmark = pytest.mark.torch

DEPTH, WEIGHT = 2, 0.3
FP64 = Precision(param="fp64", compute="fp64", grad="fp64", reduce="fp64", master="none", states="fp64")


class Further(nn.Module):
    """One module: the hidden state and the embedding of a later token, each normed, joined, through one layer."""

    def __init__(self, config: Any, number: int) -> None:
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

        super().__init__()
        self.enorm, self.hnorm, self.norm = (
            theirs.DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3)
        )
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = theirs.DeepseekV3DecoderLayer(config, number)

    def forward(self, hidden: Tensor, embedded: Tensor, angles: Any, mask: Tensor) -> Tensor:
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        out = self.layer(joined, attention_mask=mask, position_embeddings=angles)
        return out[0] if isinstance(out, tuple) else out


class Oracle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = build("deepseek_v3")
        config = self.main.config
        self.first = config.num_hidden_layers
        self.further = nn.ModuleList(Further(config, self.first + k) for k in range(DEPTH)).to(torch.float64).eval()
        with torch.no_grad():
            for parameter in self.further.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.2)
            for name, buffer in self.further.named_buffers():
                if "correction_bias" in name:
                    buffer.copy_(torch.randn_like(buffer) * 0.1)

    def loss(self, ids: Tensor) -> Tensor:
        """ids: (rows, T + 1). The mean loss over T tokens and, weighted, that of tokens that come k later."""
        model, length, kept = self.main.model, ids.shape[1] - 1, list[Tensor]()
        hook = model.layers[-1].register_forward_hook(
            lambda module, given, out: kept.append(out[0] if isinstance(out, tuple) else out)
        )
        logits = self.main(input_ids=ids[:, :-1], use_cache=False).logits
        hook.remove()
        total = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        hidden, places = kept[0], torch.arange(length)[None]
        angles = model.rotary_emb(hidden, places)
        mask = torch.full((length, length), -1e300, dtype=torch.float64).triu(1)[None, None]
        for k, module in enumerate(self.further, start=1):
            tokens = functional.pad(ids[:, k:length], (0, k))
            hidden = module(hidden, model.embed_tokens(tokens), angles, mask)
            logits = self.main.lm_head(module.norm(hidden))[:, : length - k]
            later = functional.cross_entropy(logits.flatten(0, 1), ids[:, k + 1 :].flatten(), reduction="sum")
            total = total + WEIGHT / DEPTH * later
        return total / (len(ids) * length)

    def tensors(self, *, of: str) -> dict[str, Tensor]:
        """Weights or gradients by DeepSeek's names."""

        def value(parameter: Tensor) -> Tensor:
            grad = parameter.grad if of == "gradients" else parameter
            return torch.zeros_like(parameter) if grad is None else grad.detach()

        made = {name: value(p) for name, p in self.main.named_parameters()}
        buffers = {name: b for name, b in self.named_buffers() if "correction_bias" in name}
        made |= {n.removeprefix("main."): torch.zeros_like(b) if of == "gradients" else b for n, b in buffers.items()}
        for k, module in enumerate(self.further):
            own = f"model.layers.{self.first + k}."
            for name, parameter in module.named_parameters():
                name = name.removeprefix("layer.") if name.startswith("layer.") else name
                made[own + ("shared_head.norm.weight" if name == "norm.weight" else name)] = value(parameter)
            made[f"{own}mlp.gate.e_score_correction_bias"] = made.pop(
                f"further.{k}.layer.mlp.gate.e_score_correction_bias"
            )
            made[f"{own}embed_tokens.weight"] = value(self.main.model.embed_tokens.weight)
            made[f"{own}shared_head.head.weight"] = value(self.main.lm_head.weight)
        return {name: x.contiguous().clone() for name, x in each_expert(made)}

    def save(self, folder: Path, *, of: str) -> Path:
        folder.mkdir()
        config = self.main.config.to_dict() | {"mtp_num_layers": DEPTH, "mtp_loss_scaling_factor": WEIGHT}
        (folder / "config.json").write_text(json.dumps(config, default=str))
        save_file(self.tensors(of=of), folder / "model.safetensors", metadata={"format": "pt"})
        return folder


def each_expert(made: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    """As files have them: a tensor for each expert."""
    listed = []
    for name, x in made.items():
        head, found, _ = name.rpartition(".experts.gate_up_proj")
        if found:
            for e, both in enumerate(x):
                gate, up = both.chunk(2)
                listed += [(f"{head}.experts.{e}.gate_proj.weight", gate), (f"{head}.experts.{e}.up_proj.weight", up)]
        elif ".experts.down_proj" in name:
            listed += [(name.replace("down_proj", f"{e}.down_proj.weight"), one) for e, one in enumerate(x)]
        else:
            listed.append((name, x))
    return listed


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, float, Tensor]:
    """(weights, gradients, loss, ids) of the oracle."""
    target = tmp_path_factory.mktemp("mtp")
    ids = torch.randint(3, 60, (2, 13), generator=torch.Generator().manual_seed(3))
    with quiet(), Wide():
        oracle = Oracle()
        loss = oracle.loss(ids)
        loss.backward()
        return (
            oracle.save(target / "weights", of="weights"),
            oracle.save(target / "grads", of="gradients"),
            loss.detach(),
            ids,
        )


def test_loss_and_gradients_are_the_reports(folders: tuple[Path, Path, Tensor, Tensor]) -> None:
    weights, gradients, loss, ids = folders
    known = model_of(weights)
    assert losses(known.graph) == ("head.loss", "mtp_1.loss", "mtp_2.loss") and not known.notes
    ours = OneProcess(known.graph, values=values_of(weights, known.graph), dtype=torch.float64)
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    given = with_further(batch, {tensor.name for tensor in known.graph.inputs})
    own = ours.loss(dict(given), count=batch["labels"].numel())
    assert own == pytest.approx(float(loss), rel=1e-9)
    made = Folder.of(gradients)
    expected = WeightReader(made, settled(made, layout(known.graph, known.model_type)))
    largest = max(float(expected(slot).abs().max()) for slot in ours.slots)
    for slot in ours.slots:
        want = expected(slot)
        off = (ours.gradient(slot) - want).abs().max() / want.abs().max().clamp(min=1e-6 * largest)
        assert off < 1e-9, slot.name


def test_without_its_modules_it_is_the_model_that_transformers_has(folders: tuple[Path, ...]) -> None:
    """The file is the same; the modules' weights are passed over, and so they are where words are generated."""
    folder = folders[0].parent / "plain"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(folders[0] / "model.safetensors")
    config = json.loads((folders[0] / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mtp_num_layers": 1, "num_nextn_predict_layers": 1}))
    assert len(model_of(folder).graph.outputs) == 2
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if not k.startswith("mtp_")}))
    plain = model_of(folder)
    whole = model_of(folders[0])
    assert plain.graph.outputs == ("head.loss",)
    assert without_loss(whole.graph).calls == without_loss(plain.graph).calls
    words = load(folders[0], logits=True, dtype=torch.float64).output({"input_ids": folders[3][:, :-1]})
    assert words.shape[:2] == (2, 12)


def _trained(source: Path, target: Path, ids: Tensor) -> list[float]:
    """Loss of a step under each plan, after the weights were written back as they came."""
    graph, made = model_of(source).graph, []
    for name, plan in PLANS.items():
        executor = Executor(graph, plan, WORKLOAD, values=values_of(source, graph))
        export(executor, target / name, model=source)
        made.append(executor.total_loss(executor.step(ids)))
        executor.leave()
    return made


WORKLOAD = Workload(global_batch_size=2, seq_len=12)
ONE, USUAL = Schedule(num_microbatches=1), Schedule(num_microbatches=2)
PLANS = {
    "pp": Plan(mesh=Mesh(pp=2), schedule=USUAL, precision=FP64),
    "zero 3": Plan(
        mesh=Mesh(dp_shard=2), schedule=Schedule(num_microbatches=1), optimizer=Optimizer(zero=3), precision=FP64
    ),
}


def test_weights_come_back_to_the_bit_and_plans_agree(
    folders: tuple[Path, Path, Tensor, Tensor], tmp_path: Path
) -> None:
    weights, _, loss, ids = folders
    for found in launch(_trained, 2, weights, tmp_path, ids).values():
        assert found == pytest.approx([float(loss)] * len(PLANS), rel=1e-9)
    want = sha256((weights / "model.safetensors").read_bytes()).hexdigest()
    for name in PLANS:
        assert sha256((tmp_path / name / "model.safetensors").read_bytes()).hexdigest() == want


def test_what_lies_beyond_the_row_or_the_document_is_not_counted() -> None:
    batch = {"input_ids": torch.tensor([[1, 2, 3, 4]]), "labels": torch.tensor([[2, -1, 4, 5]])}
    asked = {"input_ids", "labels", "mtp_ids", "mtp_labels", "mtp_ids_3", "mtp_labels_3"}
    made = with_further(batch, asked)
    assert made["mtp_ids"].tolist() == [[2, 3, 4, 0]] and made["mtp_labels"].tolist() == [[-1, 4, 5, -1]]
    assert made["mtp_ids_3"].tolist() == [[4, 0, 0, 0]] and made["mtp_labels_3"].tolist() == [[5, -1, -1, -1]]
    packed = with_further(batch | {DOCUMENTS: torch.tensor([[0, 0, 0, 1]])}, asked)
    assert packed["mtp_labels"].tolist() == [[-1, 4, -1, -1]]


def test_it_is_priced_and_lies_with_the_last_stage(folders: tuple[Path, ...]) -> None:
    graph = model_of(folders[0]).graph
    plan = Plan(mesh=Mesh(pp=2), schedule=USUAL)
    made = gnomon.predict(graph, "1x2xa100-sxm-80gb", plan, WORKLOAD, "gnomon")
    names = [[layer.call.name for layer in stage.in_order] for stage in made.pricing.stages]
    assert names[-1][-2:] == ["mtp_1", "mtp_2"] and not {"mtp_1", "mtp_2"} & set(names[0])
