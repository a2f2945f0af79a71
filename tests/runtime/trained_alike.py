"""Three steps of a plan beside transformers in train mode: losses, gradient norms, and parameters afterwards.

`trained(case, plan, folder)` builds the model of a config (`config_keys`), trains it with torch's AdamW in two groups,
clipped, and trains ours from the same weights by the plan, on one process. Rows are padded at the end with the padding
token (label -100), labels of -100 stand among others, and microbatches have unequal numbers of labels; `packed` puts
several documents in a row, which transformers gets as a mask of its own and positions. What decays is said by the type
of torch's module, not by us. Leaves out several processes (the runtime's grid has those).
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from runtime.config_keys import CLASSES, MASKED, SEQ2SEQ, Case, Verdict, config_of, their_model
from runtime.hf_models import Wide, quiet
from runtime.one_process import alone
from torch import Tensor, nn

from gnomon.errors import GnomonError
from gnomon.formats.huggingface.known import layout
from gnomon.formats.huggingface.runnable import read_runnable
from gnomon.plans import Plan, Precision, Schedule, Workload
from gnomon.runtime import AdamWSettings, Executor
from gnomon.runtime.parameters.weights import Folder, WeightReader, settled

ROWS, TOKENS, STEPS, PAD = 4, 16, 3, 0
FP64 = Precision(param="fp64", compute="fp64", grad="fp64", reduce="fp64", master="none", states="fp64")
PLAN = Plan(schedule=Schedule(num_microbatches=2), precision=FP64)
SETTINGS = AdamWSettings(lr=1e-2, weight_decay=0.3, clip_norm=0.5)

LIMIT = 1e-8
"""Adam divides small gradients by their own size, which makes 1e-9 of them as much of the parameters: BLOOM's GELU in
transformers has its constant in eight digits."""

Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """How far ours is from theirs after three steps, relative each."""

    loss: float
    norm: float
    parameters: float
    """Largest difference of an element, of its parameter's largest."""
    where: str
    """Which."""

    @property
    def worst(self) -> float:
        """Of these."""
        return max(self.loss, self.norm, self.parameters)


def batches(kind: str, vocab: int, *, packed: bool) -> list[tuple[Batch, Batch]]:
    """(ours, theirs) of each step."""
    generator, made = torch.Generator().manual_seed(7), []
    for _ in range(STEPS):
        ids = torch.randint(3, vocab, (ROWS, TOKENS), generator=generator)
        labels = torch.randint(3, vocab, (ROWS, TOKENS), generator=generator)
        labels[0, 2:9], labels[3, ::3] = -100, -100
        if kind == "vit":
            image = torch.randn((ROWS, 3, 8, 8), generator=generator)
            classes = torch.randint(0, CLASSES, (ROWS,), generator=generator)
            given = {"pixel_values": image, "labels": classes}
            made.append((given | {"image": image}, given))
            continue
        if kind in MASKED:
            given = {"input_ids": ids, "labels": labels, "token_type_ids": torch.zeros_like(ids)}
            made.append((given, given))
            continue
        if kind in SEQ2SEQ:
            given = {"input_ids": ids, "labels": labels}
            shifted = torch.cat((torch.zeros(ROWS, 1, dtype=ids.dtype), labels[:, :-1].clamp(min=PAD)), 1)
            made.append((given | {"decoder_input_ids": shifted}, given))
            continue
        if not packed:  # padding at the end of rows, which causal attention does not see before it
            ids[1, 11:], labels[1, 11:] = PAD, -100
        theirs: Batch = {"input_ids": ids, "labels": labels}
        ours: Batch = {"input_ids": ids, "labels": torch.cat((labels[:, 1:], torch.full((ROWS, 1), -100)), 1)}
        if packed:
            documents = torch.tensor([[0] * 5 + [1] * 11, [0] * 9 + [1] * 3 + [2] * 4] * 2)
            same = documents[:, :, None] == documents[:, None, :]
            seen = same & torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
            first = torch.stack([(documents == number).int().argmax(-1) for number in range(3)], -1)
            places = torch.arange(TOKENS) - first.gather(-1, documents)
            hidden = torch.zeros(ROWS, 1, TOKENS, TOKENS).masked_fill(~seen.unsqueeze(1), -1e300)
            theirs |= {"attention_mask": hidden, "position_ids": places}
            ours["documents"] = documents
        made.append((ours, theirs))
    return made


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups of torch's AdamW: matrices and tables by the type of the module that has them, and the rest."""
    matrices: list[nn.Parameter] = []
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            norm, bias = "norm" in type(module).__name__.lower(), name.endswith("bias") or "_bias" in name
            if parameter.ndim > 1 and not norm and not bias and name not in ("cls_token", "sinks"):
                matrices.append(parameter)
    decaying = {id(parameter) for parameter in matrices}
    every = list(model.parameters())
    return [
        {"params": [p for p in every if id(p) in decaying], "weight_decay": SETTINGS.weight_decay},
        {"params": [p for p in every if id(p) not in decaying], "weight_decay": 0.0},
    ]


def trained(case: Case, folder: Path, *, plan: Plan = PLAN, packed: bool = False) -> Apart:
    """GnomonError where the plan is refused."""
    values = case.values()
    graph = read_runnable(json.dumps(values), "it").graph
    with quiet(), Wide(), alone():
        config = config_of(case.kind, values)
        for key, value in config.to_dict().items():  # which the runtime leaves out, and says so
            if "drop" in key and isinstance(value, float):
                setattr(config, key, 0.0)
        model = their_model(case.kind, config)
        model.save_pretrained(folder / "weights")
        made = Folder.of(folder / "weights")
        where = settled(made, layout(graph, case.kind))
        steps = batches(case.kind, values.get("vocab_size", 96), packed=packed)
        rate = SETTINGS.lr
        theirs = torch.optim.AdamW(groups(model), lr=rate, betas=SETTINGS.betas, eps=SETTINGS.eps)
        sizes = {"sizes": (("enc_seq", TOKENS),)} if case.kind in SEQ2SEQ else {}
        tokens = TOKENS + (case.kind == "vit")  # 16 patches and a token of the class
        work = Workload(global_batch_size=ROWS, seq_len=tokens, **sizes)
        ours = Executor(graph, plan, work, settings=SETTINGS, values=WeightReader(made, where))
        asked = {tensor.name for tensor in graph.inputs} | {"documents"}
        loss_off = norm_off = 0.0
        for mine, given in steps:
            theirs.zero_grad()
            more = {} if case.kind in (*MASKED, *SEQ2SEQ, "vit") else {"use_cache": False}
            loss = model(**given, **more).loss
            loss.backward()
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip_norm))
            theirs.step()
            result = ours.step({name: x for name, x in mine.items() if name in asked})
            loss_off = max(loss_off, abs(float(result.loss) / float(loss.detach()) - 1))
            norm_off = max(norm_off, abs(float(result.grad_norm) / norm - 1))
        model.save_pretrained(folder / "after")
        expected, worst, name = WeightReader(Folder.of(folder / "after"), where), 0.0, ""
        for stage in ours.stages.values():
            for held in stage.own_parameters:
                for slot in held.slots:
                    wanted = expected(slot)
                    off = float((held.value(slot.name) - wanted).abs().max() / wanted.abs().max())
                    if not off <= worst:
                        worst, name = off, slot.name
        ours.leave()
    return Apart(loss=loss_off, norm=norm_off, parameters=worst, where=name)


def judge_trained(case: Case) -> Verdict:
    """As `config_keys.judge`, after three steps. Where a failure is says whose it is."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            apart = trained(case, Path(folder))
        except GnomonError as error:
            return Verdict(what="refused", message=str(error))
        except Exception as error:
            ours = error.__traceback__
            while ours is not None and ours.tb_next is not None:
                ours = ours.tb_next
            where = "" if ours is None else ours.tb_frame.f_code.co_filename
            what = f"{type(error).__name__}: {error}"
            return Verdict(what="crash" if "/gnomon/" in where else "theirs", message=what)
    if apart.worst < LIMIT:
        return Verdict(what="equal")
    return Verdict(what="silent", message=str(apart))
