"""`expert_load` and `balance_loss`: what a microbatch's routers did, summed over its tokens, and the loss of it.

Ranks with parts of the tokens add the loads up between the two (`sharding`), so both work on local tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnomon.runtime.ops.site import Site


def expert_load(site: Site, logits: Tensor) -> Tensor:
    """(rows, tokens, experts) -> (rows, 2, experts): sums of probabilities, and counts of choices, without a gradient.
    The choice is by the largest probabilities, as the loss of transformers has it, whatever else the router weighs."""
    probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
    chosen = probabilities.detach().topk(site.attr("topk", 1), dim=-1).indices
    counts = torch.zeros_like(probabilities.detach()).scatter_(-1, chosen, 1.0)
    return torch.stack((probabilities.sum(1), counts.sum(1)), dim=1)


def balance_loss(site: Site, load: Tensor, labels: Tensor) -> Tensor:
    """experts x sum over experts of (mean choices) x (mean probability), means over all tokens and layers of the
    microbatch, times the coefficient and how many labels are learnt here: losses are summed over labels."""
    probabilities, counts = load[:, 0].sum(0), load[:, 1].detach().sum(0)
    tokens = counts.sum() / site.attr("topk", 1)
    uneven = (counts / tokens * probabilities / tokens).sum() * counts.numel()
    return uneven * (labels >= 0).sum() * site.attr("coefficient", 0.0)  # a number times integers would be float32
