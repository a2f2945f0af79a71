"""A language model with experts stacked in one parameter, computed in the ways that captured models do: its steps under
plans that divide experts, run in the processes of a job."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnomon.frontend.capture import CapturedModule, captured
from gnomon.plans import Layout, Mesh, Optimizer, Plan, Precision, Schedule, Workload
from gnomon.runtime import AdamWSettings
from gnomon.runtime.launch.captured_job import executor, weights_of

EXPERTS, CHOSEN, WIDTH, INNER, VOCAB, POSITIONS = 4, 2, 12, 20, 30, 6
FP64 = Precision(param="fp64", compute="fp64", grad="fp64", reduce="fp64", master="none", states="fp64")
WORKLOAD = Workload(global_batch_size=4, seq_len=POSITIONS)
SETTINGS = AdamWSettings(lr=1e-2, weight_decay=0.0, clip_norm=1e9)
STEPS = 3
BASE = Plan(mesh=Mesh(dp_shard=2, ep=2), precision=FP64, schedule=Schedule(micro_batch_size=1))
PLANS = {
    "ep": BASE,
    "zero 1": replace(BASE, optimizer=Optimizer(zero=1)),
    "zero 3": replace(BASE, optimizer=Optimizer(zero=3)),
    "tp": replace(BASE, mesh=Mesh(tp=2, ep=2), layout=Layout(sequence_parallel=True)),
}


class Experts(nn.Module):
    """(tokens, width) and each token's experts with their weights -> (tokens, width). way: `gathered` weights, rows
    `sorted` by expert for a grouped product, or gathered weights that are `turned`, with biases."""

    def __init__(self, way: str, experts: int = EXPERTS, width: int = WIDTH, inner: int = INNER) -> None:
        super().__init__()
        self.way, self.experts, shapes = way, experts, ((2 * inner, width), (width, inner))
        up, down = (shape[::-1] if way == "turned" else shape for shape in shapes)
        self.up, self.down = (nn.Parameter(0.3 * torch.randn(experts, *shape)) for shape in (up, down))
        if way == "turned":
            self.up_bias = nn.Parameter(0.3 * torch.randn(experts, 2 * inner))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        topk, owner = chosen.shape[1], chosen.reshape(-1)
        if self.way == "sorted":
            return self._sorted(x, owner, weights.reshape(-1), topk)
        rows = x.repeat_interleave(topk, dim=0)
        if self.way == "turned":
            wide = torch.bmm(rows.unsqueeze(1), self.up[owner]).squeeze(1) + self.up_bias[owner]
            gate, up = wide[..., ::2], wide[..., 1::2]
            out = torch.bmm(((up + 1) * gate.clamp(max=2.0) * torch.sigmoid(gate)).unsqueeze(1), self.down[owner])
            out = out.squeeze(1)
        else:
            gate, up = torch.bmm(self.up[owner], rows.unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
            out = torch.bmm(self.down[owner], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (out * weights.reshape(-1).unsqueeze(-1)).view(*chosen.shape, -1).sum(1)

    def _sorted(self, x: Tensor, owner: Tensor, weights: Tensor, topk: int) -> Tensor:
        owner, order = torch.sort(owner)
        ends = torch.histc(owner.float(), bins=self.experts, min=0, max=self.experts - 1).cumsum(0, dtype=torch.int32)
        rows = x[order // topk]
        gate, up = F.grouped_mm(rows, self.up.transpose(-2, -1), offs=ends).chunk(2, dim=-1)
        out = F.grouped_mm(F.silu(gate) * up, self.down.transpose(-2, -1), offs=ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.size(0), device=order.device)
        return (out * weights[order].unsqueeze(-1))[back].view(-1, topk, x.shape[-1]).sum(1)


class Mixture(nn.Module):
    """Two layers of a router and experts between an embedding and a head."""

    def __init__(self, way: str = "gathered", **sizes: int) -> None:
        super().__init__()
        width, experts = sizes.get("width", WIDTH), sizes.get("experts", EXPERTS)
        self.chosen = sizes.pop("chosen", CHOSEN)
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.routers = nn.ModuleList(nn.Linear(width, experts, bias=False) for _ in range(2))
        self.layers = nn.ModuleList(Experts(way, **sizes) for _ in range(2))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for router, layer in zip(self.routers, self.layers, strict=True):
            flat = x.view(-1, x.shape[-1])
            weights, chosen = router(flat).softmax(-1).topk(self.chosen, dim=-1)
            x = x + layer(flat, chosen, weights).view_as(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def plans(way: str) -> dict[str, Plan]:
    return PLANS if way == "gathered" else {"ep": BASE}


def module(way: str) -> Mixture:
    torch.manual_seed(0)
    return Mixture(way).double()


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randint(0, VOCAB, (4, POSITIONS), generator=generator)  # noqa: E731
    return [{"ids": draw(), "targets": draw()} for _ in range(STEPS)]


def capture(model: nn.Module) -> CapturedModule:
    return captured(model, {name: x[:2] for name, x in batches()[0].items()}, training=False)


def run() -> dict[str, tuple[list[float], dict[str, Tensor], int]]:
    """Losses (this rank's parts), weights and this rank's elements of all experts, by way and plan."""
    trained = {}
    for way in ("gathered", "turned"):
        model = module(way)
        found = capture(model)
        for name, plan in plans(way).items():
            job = executor(model, found, plan, WORKLOAD, settings=SETTINGS)
            parts = [part for stage in job.stages.values() for part in stage.own_parameters if part.experts]
            held = sum(slot.stop - slot.start for part in parts for slot in part.slots)
            losses = [float(job.step(batch).loss) for batch in batches()]
            trained[f"{way} {name}"] = (losses, weights_of(job) if not plan.optimizer.zero else {}, held)
    return trained
