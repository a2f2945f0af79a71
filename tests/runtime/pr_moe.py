"""PR-MoE as a plain PyTorch loop, written from the paper: imported by the test and by its processes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from runtime.parity import SETTINGS
from torch import Tensor
from torch.nn import functional

from gnomon.models.pr_moe import PrMoeConfig, pr_moe
from gnomon.plans import Plan, Workload
from gnomon.runtime import Executor
from gnomon.runtime.launch.job import PreparedJob

CONFIG = PrMoeConfig(
    name="tiny", num_layers=4, hidden_size=16, num_heads=2, vocab_size=32, max_positions=16, experts=(0, 4, 0, 8),
    activation="gelu",
)  # fmt: skip
WORK = Workload(global_batch_size=4, seq_len=8)
STEPS = 3
COEFFICIENT = 0.01


def batch(step: int) -> Tensor:
    return torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(step))


def ran(plan: Plan) -> tuple[list[float], Mapping[str, Tensor]]:
    """Losses and parameters, those at the beginning first."""
    executor = Executor(pr_moe(CONFIG), plan, WORK, settings=SETTINGS)
    job = PreparedJob(executor, source=None, owns_group=False)
    begin = {f"begin.{name}": x for name, x in job.state_dict().items()}
    losses = [executor.total_loss(executor.step(batch(step))) for step in range(STEPS)]
    after = job.state_dict()
    executor.leave()
    return losses, {**begin, **after}


def layer(p: Mapping[str, Tensor], index: int, x: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(output, loss that balances experts) of a layer; x: (batch, seq, hidden)."""
    own = {name.removeprefix(f"transformer.h.{index}."): w for name, w in p.items()}
    hidden, heads = CONFIG.hidden_size, CONFIG.num_heads
    normed = functional.layer_norm(x, (hidden,), own["ln_1.weight"], own["ln_1.bias"])
    qkv = normed @ own["attn.c_attn.weight"].reshape(-1, hidden).T + own["attn.c_attn.bias"].reshape(-1)
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.split(hidden, dim=-1))
    scores = q @ k.transpose(-1, -2) / math.sqrt(hidden // heads)
    scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -torch.inf)
    attended = (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
    x = x + attended @ own["attn.c_proj.weight"].reshape(hidden, -1).T + own["attn.c_proj.bias"]
    normed = functional.layer_norm(x, (hidden,), own["ln_2.weight"], own["ln_2.bias"])

    def mlp(path: str, rows: Tensor, at: int | None = None) -> Tensor:
        w1, b1, w2, b2 = (
            own[f"{path}.{n}"] if at is None else own[f"{path}.{n}"][at]
            for n in ("c_fc.weight", "c_fc.bias", "c_proj.weight", "c_proj.bias")
        )
        return functional.gelu(rows @ w1.T + b1) @ w2.T + b2

    if not experts:
        return x + mlp("mlp", normed), x.new_zeros(())
    gates = (normed @ own["mlp.gate.weight"].T).softmax(-1)
    chosen = gates.argmax(-1)
    routed = torch.zeros_like(normed)
    for expert in range(experts):
        mine = chosen == expert
        routed[mine] = gates[mine][:, expert, None] * mlp("mlp.experts", normed[mine], expert)
    share = functional.one_hot(chosen, experts).double().flatten(0, 1).mean(0)
    balance = experts * (gates.flatten(0, 1).mean(0) * share).sum()
    logits = normed @ own["mlp.coefficient.weight"].T + own["mlp.coefficient.bias"]
    coefficient = logits.softmax(-1)
    return x + coefficient[..., :1] * routed + coefficient[..., 1:] * mlp("mlp.mlp", normed), balance


def plain(begin: Mapping[str, Tensor], *, balanced: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of the loop, updated by torch's AdamW with clipping."""
    p = {name: x.clone().requires_grad_() for name, x in begin.items()}
    decays = [x for x in p.values() if x.ndim > 1 and not _is_bias(p, x)]
    rest = [x for x in p.values() if not any(x is other for other in decays)]
    groups = [{"params": decays, "weight_decay": SETTINGS.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps)
    losses = []
    for step in range(STEPS):
        ids, labels = batch(step)[:, :-1], batch(step)[:, 1:]
        x = p["transformer.wte.weight"][ids] + p["transformer.wpe.weight"][: ids.shape[1]]
        balance = torch.zeros((), dtype=torch.float64)
        for index, experts in enumerate(CONFIG.experts):
            x, own = layer(p, index, x, experts)
            balance = balance + own
        normed = functional.layer_norm(x, (16,), p["transformer.ln_f.weight"], p["transformer.ln_f.bias"])
        logits = normed @ p["transformer.wte.weight"].T
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        total = loss + COEFFICIENT * balance if balanced else loss
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(list(p.values()), SETTINGS.clip_norm)
        optimizer.step()
        losses.append(float(total))
    return losses, {name: x.detach() for name, x in p.items()}


def _is_bias(p: Mapping[str, Tensor], x: Tensor) -> bool:
    return next(name for name, other in p.items() if other is x).endswith("bias")


def differences(plans: Sequence[Plan]) -> list[tuple[float, float]]:
    """(of the losses, of the parameters) of each plan's run from the plain loop's."""
    found = []
    for plan in plans:
        losses, parameters = ran(plan)
        begin = {name.removeprefix("begin."): x for name, x in parameters.items() if name.startswith("begin.")}
        expected, after = plain(begin, balanced=plan.experts.has_loss)
        off = max(float((parameters[name].view_as(x) - x).abs().max()) for name, x in after.items())
        found.append((max(abs(a - b) for a, b in zip(losses, expected, strict=True)), off))
    return found
