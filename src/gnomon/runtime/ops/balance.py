"""`expert_load`, `layer_balance`, `balance_loss`: what a microbatch's routers did, summed over its tokens, and losses.

Ranks with parts of the tokens add the loads up between the two (`sharding`), so both work on local tensors. What
routers of other ranks and earlier microbatches did is the engine's (`step.step_load`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnomon.runtime.ops.site import Site


def expert_load(site: Site, logits: Tensor) -> Tensor:
    """(rows, tokens, experts) -> (rows, 2 or 3, experts): sums of probabilities, counts of choices, without a gradient,
    and with `z_loss` an equal part each of the sum of squared log-sum-exps. The choice is by the largest probabilities,
    as the loss of transformers has it and DeepSeek-V3's equation 18, whatever else the router weighs."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if site.attr("fn", "softmax") == "sigmoid":
        scores = wide.sigmoid()
        # As the router's weights: all sigmoids of a token may be 0.
        probabilities = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    else:
        probabilities = wide.softmax(-1)
    chosen = probabilities.detach().topk(site.attr("topk", 1), dim=-1).indices
    counts = torch.zeros_like(probabilities.detach()).scatter_(-1, chosen, 1.0)
    sums = [probabilities.sum(1), counts.sum(1)]
    if site.attr("z_loss", False):
        square = wide.logsumexp(-1).square().sum(1, keepdim=True)
        # An equal part for each expert, so that the row's sum over experts is the number again and one tensor holds all
        # that ranks add up.
        sums.append((square / wide.shape[-1]).expand_as(sums[0]))
    return torch.stack(sums, dim=1)


def choices(load: Tensor) -> Tensor:
    """How many tokens chose each expert (experts). load: (rows, 2 or 3, experts)."""
    return load[:, 1].detach().sum(0)


def step_load(site: Site, load: Tensor) -> Tensor:
    """The same, where a microbatch on one rank is all there is; the engine has others' (`step.step_load`)."""
    return choices(load)


def layer_balance(site: Site, load: Tensor, step: Tensor | None = None) -> Tensor:
    """Terms (rows, 1) whose sum is a layer's balance loss: coefficient x experts x sum over experts of (share of
    choices) x (mean probability), of the microbatch, or of each sequence by itself and the mean over sequences; and the
    z-loss, the mean over tokens of squared log-sum-exps. step: (experts) choices whose shares stand for those of the
    microbatch."""
    rows, topk = load.shape[0], site.attr("topk", 1)
    chosen, experts = load[:, 1].detach(), load.shape[2]
    # Each token is counted once for each of its topk choices.
    tokens = chosen.sum(-1, keepdim=True) / topk
    if site.attr("per", "layer") == "sequence":
        shares, means = chosen / (tokens * topk), load[:, 0] / tokens
    else:
        tokens = tokens.sum(0, keepdim=True)
        shares = chosen.sum(0, keepdim=True) / (tokens * topk) if step is None else (step / step.sum()).unsqueeze(0)
        means = load[:, 0].sum(0, keepdim=True) / tokens
    # Over rows: the terms of all rows are added up, and each is the layer's whole loss (or its sequence's) divided by
    # them.
    losses = (shares * means).sum(-1, keepdim=True) * (experts * site.attr("coefficient", 0.0) / rows)
    losses = losses.expand(rows, 1)
    if z_loss := site.attr("z_loss", 0.0):
        losses = losses + load[:, 2].sum(-1, keepdim=True) * z_loss / (chosen.sum() / topk)
    return losses


def balance_loss(site: Site, load: Tensor, labels: Tensor) -> Tensor:
    """experts x sum over experts of (mean choices) x (mean probability), means over all tokens and layers of the
    microbatch, times the coefficient and how many labels are learnt here: losses are summed over labels. `layers`: the
    losses of layers, added up, are there already."""
    if site.attr("layers", False):
        return load.sum() * (labels >= 0).sum()
    probabilities, counts = load[:, 0].sum(0), load[:, 1].detach().sum(0)
    tokens = counts.sum() / site.attr("topk", 1)
    uneven = (counts / tokens * probabilities / tokens).sum() * counts.numel()
    return uneven * (labels >= 0).sum() * site.attr("coefficient", 0.0)  # a number times integers would be float32
