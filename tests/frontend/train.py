"""A captured model trained under plans beside the plain module: run in the processes of a job."""

from __future__ import annotations

import torch
from frontend.models import NanoGPT
from torch import Tensor, nn
from torch.nn import functional

from gnomon.frontend.capture import captured
from gnomon.plans import Mesh, Optimizer, Plan, Precision, Schedule, Workload
from gnomon.runtime import AdamWSettings
from gnomon.runtime.launch.captured_job import executor, weights_of

FP64 = Precision(param="fp64", compute="fp64", grad="fp64", reduce="fp64", master="none", states="fp64")
WORKLOAD = Workload(global_batch_size=4, seq_len=16)
SETTINGS = AdamWSettings(lr=1e-2, weight_decay=0.0, clip_norm=1e9)
STEPS = 3
PLANS = {
    "dp": Plan(mesh=Mesh(dp_replicate=2), precision=FP64, schedule=Schedule(micro_batch_size=1)),
    "zero 1": Plan(
        mesh=Mesh(dp_shard=2), precision=FP64, schedule=Schedule(micro_batch_size=1), optimizer=Optimizer(zero=1)
    ),
    "zero 2": Plan(
        mesh=Mesh(dp_shard=2),
        precision=FP64,
        schedule=Schedule(micro_batch_size=2),
        optimizer=Optimizer(zero=2),
    ),
}


class Mixer(nn.Module):
    """Linears over positions and over features by turns: in the middle two widths meet, of which tp divides one."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.wide, self.narrow, self.head = (
            nn.Linear(6, 10), nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(10, 4)
        )  # fmt: skip

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        mixed = self.positions(x.transpose(1, 2)).transpose(1, 2)
        mixed = mixed + self.narrow(torch.relu(self.wide(mixed)))
        return functional.cross_entropy(self.head(mixed.transpose(1, 2)).mean(1), labels)


def mixer() -> tuple[Mixer, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Mixer().double(), {"x": torch.randn(4, 6, 8, dtype=torch.float64), "labels": torch.arange(4)}


SAMPLES = Workload(global_batch_size=4, seq_len=1)
MIXED = Plan(mesh=Mesh(tp=2), precision=FP64, schedule=Schedule(micro_batch_size=4))


def module() -> NanoGPT:
    torch.manual_seed(0)
    return NanoGPT().double()


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randint(0, 65, (4, 16), generator=generator)  # noqa: E731
    return [{"ids": draw(), "targets": draw()} for _ in range(STEPS)]


def run() -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    """Losses (this rank's parts) and weights by plan."""
    model, trained = module(), {}
    example = {name: x[:2] for name, x in batches()[0].items()}
    graph = captured(model, example, training=False)
    for name, plan in PLANS.items():
        job = executor(model, graph, plan, WORKLOAD, settings=SETTINGS)
        losses = [float(job.step(batch).loss) for batch in batches()]
        trained[name] = (losses, weights_of(job) if not plan.optimizer.zero else {})
    mixing, batch = mixer()
    job = executor(mixing, captured(mixing, batch, training=False), MIXED, SAMPLES, settings=SETTINGS)
    trained["mixer"] = ([float(job.total_loss(job.step(batch))) for _ in range(STEPS)], weights_of(job))
    return trained
