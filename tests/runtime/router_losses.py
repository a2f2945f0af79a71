"""Losses of routers layer by layer, and biases that move, beside formulas on the router logits of transformers.

`prepared` writes a tiny model's weights and the gradients of its cross-entropy with the losses of `Experts`, written
out from the papers (Switch Transformer, ST-MoE, DeepSeek-V3) on what transformers' own routers compute, and returns
what each bias moves by in a step as Wang et al. 2024, algorithm 1, have it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from runtime.hf_models import TOKENS, VOCAB, Wide, build, quiet
from torch import Tensor
from torch.nn import functional

from gnomon.plans import Experts

SEQUENCES = 4


def batch() -> dict[str, Tensor]:
    """Every label counts."""
    ids = torch.randint(3, VOCAB, (SEQUENCES, TOKENS + 1), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def routers(model: Any) -> list[tuple[str, Any]]:
    """Modules whose weights give router logits, in order."""
    return [(name, module) for name, module in model.named_modules() if name.endswith((".gate", ".mlp.router"))]


def one_layer(logits: Tensor, sigmoid: bool, topk: int, experts: Experts) -> Tensor:
    """The losses of a layer: logits (sequences, tokens, experts) of one microbatch."""
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    share = scores / scores.sum(-1, keepdim=True)
    chosen = torch.zeros_like(scores).scatter_(-1, scores.topk(topk, dim=-1).indices, 1.0)
    over = (1,) if experts.balance == "sequence" else (0, 1)
    number = logits.shape[-1]
    f = chosen.mean(over) * number / topk
    balance = (f * share.mean(over)).sum(-1).mean() * experts.coefficient
    return balance + experts.z_loss * logits.logsumexp(-1).square().mean()


def prepared(kind: str, folder: Path, experts: Experts, rows: int) -> tuple[float, dict[str, Tensor]]:
    """(the loss, what the counts of the batch move each layer's bias by). rows: of a microbatch on one worker."""
    given = batch()
    with quiet(), Wide():
        model = build(kind)
        model.save_pretrained(folder / kind / "weights")
        seen: list[Tensor] = []
        topk, sigmoid = model.config.num_experts_per_tok, kind.startswith("deepseek")
        counts: dict[str, Tensor] = {}

        def note(name: str) -> Any:
            def hook(module: Any, inputs: tuple[Tensor, ...], out: Any) -> None:
                logits = functional.linear(inputs[0].reshape(-1, inputs[0].shape[-1]), module.weight)
                seen.append(logits.unflatten(0, (rows, TOKENS)))
                number = torch.bincount(out[-1].flatten(), minlength=logits.shape[-1])  # what it chose
                counts[name] = counts.get(name, 0) + number

            return hook

        hooks = [module.register_forward_hook(note(name)) for name, module in routers(model)]
        total = 0.0
        for first in range(0, SEQUENCES, rows):
            ids, labels = (given[name][first : first + rows] for name in ("input_ids", "labels"))
            seen.clear()
            logits = model(input_ids=ids, use_cache=False).logits
            loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            loss = loss + sum(one_layer(x, sigmoid, topk, experts) for x in seen)
            loss = loss * rows / SEQUENCES
            loss.backward()
            total += float(loss.detach())
        for hook in hooks:
            hook.remove()
        moved = {
            name: experts.bias_rate * torch.sign(number.double().mean() - number) for name, number in counts.items()
        }
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            for _, buffer in model.named_buffers():
                buffer.zero_()
        model.save_pretrained(folder / kind / "gradients")
    return total, moved
