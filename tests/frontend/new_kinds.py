"""A module of the two kinds that one file each adds, `clip` and `nm_linear`, trained under plans as a job does."""

from __future__ import annotations

import torch
from frontend.train import FP64, SETTINGS, STEPS
from torch import Tensor, nn
from torch.nn import functional

from gnomon.frontend.capture import captured
from gnomon.plans import Mesh, Plan, Schedule, Workload
from gnomon.runtime.launch.captured_job import executor
from gnomon.runtime.ops import function_of

WORKLOAD = Workload(global_batch_size=4, seq_len=8)
PLANS = {
    "tp": Plan(mesh=Mesh(tp=2), precision=FP64, schedule=Schedule(micro_batch_size=4)),
    "dp": Plan(mesh=Mesh(dp_replicate=2), precision=FP64, schedule=Schedule(micro_batch_size=2)),
}


class Sparse(nn.Module):
    """A feed-forward with 2 of 4 weights, clipped, between a table and a head."""

    def __init__(self) -> None:
        super().__init__()
        function_of("nm_linear")  # defines the custom op
        self.table, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.up, self.down = (nn.Parameter(torch.randn(*shape) / 4) for shape in ((24, 16), (16, 24)))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.table(ids)
        wide = torch.clamp(torch.ops.gnomon.nm_linear(x, self.up, 2, 4), min=-0.5, max=0.75)
        x = x + torch.ops.gnomon.nm_linear(wide, self.down, 2, 4)
        return functional.cross_entropy(self.head(x).view(-1, 32), targets.view(-1))


def module() -> Sparse:
    torch.manual_seed(0)
    return Sparse().double()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(0, 32, (4, 8), generator=generator) for name in ("ids", "targets")}


def run() -> dict[str, list[float]]:
    """Losses (this rank's parts) by plan."""
    result = captured(module(), batch())
    losses = {}
    for name, plan in PLANS.items():
        ex = executor(module(), result, plan, WORKLOAD, settings=SETTINGS)
        losses[name] = [float(ex.step(batch()).loss) for _ in range(STEPS)]
    return losses
