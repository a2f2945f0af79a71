"""Losses of routers layer by layer, and biases that move, beside formulas on the router logits of transformers.

`prepared` writes a tiny model's weights and the gradients of its cross-entropy with the losses of `Experts`, written
out from the papers (Switch Transformer, ST-MoE, DeepSeek-V3, Qiu et al. 2025) on what transformers' own routers
compute, and returns what each bias moves by in a step as Wang et al. 2024, algorithm 1, have it.
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


def evened(logits: Tensor, topk: int) -> Tensor:
    """The experts of each token as Megatron-LM's `sinkhorn_load_balancing` chooses them in training."""
    cost = logits.detach().exp()
    rows, columns, moved = torch.ones_like(cost[:, 0]), torch.ones_like(cost[0]), 1e9
    while moved > 1e-4:
        rows = (1 / len(rows)) / ((columns * cost).sum(1) + 1e-8)
        new = (1 / len(columns)) / ((rows[:, None] * cost).sum(0) + 1e-8)
        moved, columns = float((columns - new).abs().mean()), new
    return (columns * cost * rows[:, None]).topk(topk, dim=1).indices


def sinkhorn(module: Any, topk: int) -> Any:
    """A forward in place of a router's of transformers: probabilities as they are, of the experts above."""

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = functional.linear(hidden.reshape(-1, hidden.shape[-1]), module.weight)
        chosen = evened(logits, topk)
        scores = logits.sigmoid() if topk == 1 else logits.softmax(-1)
        return logits, scores.gather(-1, chosen), chosen

    return forward


def global_loss(logits: list[Tensor], topk: int, coefficient: float, workers: int) -> list[Tensor]:
    """Of a layer, the loss of each microbatch on each data-parallel worker, those of all workers one after the other:
    as Megatron-LM's router counts tokens (`global_tokens_per_expert` over `ga_steps`, means over the tokens of all
    workers), but for the factor of 1 / workers that its average of gradients leaves in."""
    losses, counts, steps = [], torch.zeros(logits[0].shape[-1], dtype=logits[0].dtype), 0
    for first in range(0, len(logits), workers):
        together = [x.flatten(0, 1).softmax(-1) for x in logits[first : first + workers]]
        for scores in together:
            counts += torch.bincount(scores.topk(topk, dim=-1).indices.flatten(), minlength=len(counts))
        steps += 1
        average, total = counts / steps, sum(map(len, together))
        for scores in together:
            loss = (scores.sum(0) * average).sum() * (len(counts) * coefficient / (topk * total * total))
            losses.append(loss * workers)
    return losses


def one_layer(logits: Tensor, sigmoid: bool, topk: int, experts: Experts) -> Tensor:
    """The losses of a layer: logits (sequences, tokens, experts) of one microbatch."""
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    share = scores / scores.sum(-1, keepdim=True)
    chosen = torch.zeros_like(scores).scatter_(-1, scores.topk(topk, dim=-1).indices, 1.0)
    over = (1,) if experts.balance == "sequence" else (0, 1)
    number, coefficient = logits.shape[-1], 0.0 if experts.balance == "global" else experts.coefficient
    f = chosen.mean(over) * number / topk
    balance = (f * share.mean(over)).sum(-1).mean() * coefficient
    return balance + experts.z_loss * logits.logsumexp(-1).square().mean()


def prepared(
    kind: str, folder: Path, experts: Experts, rows: int, *, workers: int = 1
) -> tuple[float, dict[str, Tensor]]:
    """(the loss, what the counts of the batch move each layer's bias by). rows: of a microbatch on one worker. workers:
    that take microbatches beside each other, for losses of all of them."""
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

        if experts.assignment == "sinkhorn":
            for _, module in routers(model):
                module.forward = sinkhorn(module, topk)
        hooks = [module.register_forward_hook(note(name)) for name, module in routers(model)]
        losses, by_layer = list[Tensor](), list[list[Tensor]]()
        for first in range(0, SEQUENCES, rows):
            ids, labels = (given[name][first : first + rows] for name in ("input_ids", "labels"))
            seen.clear()
            logits = model(input_ids=ids, use_cache=False).logits
            loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            losses.append(loss + sum(one_layer(x, sigmoid, topk, experts) for x in seen))
            by_layer.append(list(seen))
        if experts.balance == "global":
            losses += [
                one
                for layer in zip(*by_layer, strict=True)
                for one in global_loss(list(layer), topk, experts.coefficient, workers)
            ]
        whole = torch.stack(losses).sum() * rows / SEQUENCES
        whole.backward()
        total = float(whole.detach())
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
