"""Small real jobs on CPUs, recorded by torch.profiler: thirteen kinds, and faults put into them on purpose.

Each job is a function that makes `(step, batches)`; a fault changes it. `record` runs it for a few steps in this
process, or in two with gloo, writes a Kineto trace a rank, and returns the seconds between steps by the wall clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.profiler import ProfilerActivity, profile

STEPS = 5
"""Recorded; two more go before."""

Step = Callable[[torch.Tensor], None]


def _train(model: nn.Module, loss: Callable[[torch.Tensor], torch.Tensor], fault: str = "") -> Step:
    plain = fault == "optimizer not fused"
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, foreach=False, fused=False if plain else None)
    if not plain:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)  # type: ignore[assignment]

    def step(x: torch.Tensor) -> None:
        if fault == "host too slow":
            # The host is held between ops, as a slow logger or hook holds it.
            for part in x.chunk(4):
                loss(part).backward()
                time.sleep(0.01)
        else:
            loss(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def mlp(fault: str) -> tuple[Step, Callable[[], torch.Tensor]]:
    """Linear, ReLU, linear."""
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
    return _train(model, lambda x: model(x).square().mean(), fault), lambda: torch.randn(256, 512)


def encoder(fault: str) -> tuple[Step, Callable[[], torch.Tensor]]:
    """A transformer encoder."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 4, 512, batch_first=True), 3)
    return _train(model, lambda x: model(x).square().mean(), fault), lambda: torch.randn(16, 64, 128)


def convolutions(fault: str) -> tuple[Step, Callable[[], torch.Tensor]]:
    """Convolution, batch norm, pooling."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.MaxPool2d(2), nn.Flatten(),
        nn.LazyLinear(10),
    )  # fmt: skip
    model(torch.randn(2, 3, 32, 32))
    return _train(model, lambda x: model(x).square().mean(), fault), lambda: torch.randn(16, 3, 32, 32)


def llama(fault: str) -> tuple[Step, Callable[[], torch.Tensor]]:
    """transformers' Llama, small."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=128, intermediate_size=344, num_hidden_layers=3, num_attention_heads=4, vocab_size=1000
    )
    model = LlamaForCausalLM(config)
    return (
        _train(model, lambda x: model(input_ids=x, labels=x).loss, fault),
        lambda: torch.randint(0, 1000, (8, 64)),
    )


def mixture(fault: str) -> tuple[Step, Callable[[], torch.Tensor]]:
    """transformers' Mixtral, small: routing, experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=500, num_local_experts=4,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    return (
        _train(model, lambda x: model(input_ids=x, labels=x).loss, fault),
        lambda: torch.randint(0, 500, (4, 64)),
    )


def recurrent(fault: str) -> tuple[Step, Callable[[], torch.Tensor]]:
    """An LSTM."""
    model = nn.LSTM(64, 128, 2, batch_first=True)
    return _train(model, lambda x: model(x)[0].square().mean(), fault), lambda: torch.randn(16, 64, 64)


class _Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(50_000, 64, mode="sum")
        self.top = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(self.table(x))  # type: ignore[no-any-return]


def recommender(fault: str) -> tuple[Step, Callable[[], torch.Tensor]]:
    """Embedding bags."""
    model = _Recommender()
    return _train(model, lambda x: model(x).square().mean(), fault), lambda: torch.randint(0, 50_000, (512, 20))


def accumulation(fault: str) -> tuple[Step, Callable[[], torch.Tensor]]:
    """Four microbatches a step."""
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)

    def step(x: torch.Tensor) -> None:
        for part in x.chunk(4):
            model(part).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: torch.randn(512, 256)


def compiled(fault: str) -> tuple[Step, Callable[[], torch.Tensor]]:
    """torch.compile; the fault changes the batch's size each step, so that it compiles again."""
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 256))
    again = fault == "compilation within the step"
    run = torch.compile(model, dynamic=False if again else None)
    sizes = iter(range(64, 10_000, 8)) if again else None
    step = _train(model, lambda x: run(x).square().mean(), fault)
    return step, lambda: torch.randn(next(sizes) if sizes else 128, 256)


def tiny_ops(fault: str) -> tuple[Step, Callable[[], torch.Tensor]]:
    """A loop over positions with small elementwise ops, as a naive recurrence is written."""
    scale = nn.Parameter(torch.ones(32))

    def loss(x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(4, 32)
        for t in range(x.shape[1]):
            state = torch.tanh(state * scale + x[:, t])
        return state.square().mean()

    model = nn.Module()
    model.scale = scale
    return _train(model, loss), lambda: torch.randn(4, 200, 32)


def narrow(fault: str) -> tuple[Step, Callable[[], torch.Tensor]]:
    """Many small layers: an update of 400 parameters."""
    model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(200)))
    return _train(model, lambda x: model(x).square().mean(), fault), lambda: torch.randn(512, 48)


def data_parallel(fault: str) -> tuple[Step, Callable[[], torch.Tensor]]:
    """DistributedDataParallel with gloo; faults: one slow rank, or gradients reduced in one go after the backward."""
    model = nn.Sequential(*(nn.Linear(768, 768) for _ in range(6)))
    slow = fault == "slow rank" and dist.get_rank() == 1
    weight = torch.randn(768, 768)
    late = fault == "exposed communication"
    run = model if late else nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)

    def step(x: torch.Tensor) -> None:
        run(x).square().mean().backward()
        if slow:
            for _ in range(30):
                weight @ weight
        if late:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: torch.randn(8 if late else 64, 768)


def sharded(fault: str) -> tuple[Step, Callable[[], torch.Tensor]]:
    """FSDP2 with gloo."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _train(model, lambda x: model(x).square().mean(), fault), lambda: torch.randn(64, 512)


JOBS = {
    job.__name__: job
    for job in (
        mlp, encoder, convolutions, llama, mixture, recurrent, recommender, accumulation, compiled, tiny_ops,
        narrow, data_parallel, sharded,
    )
}  # fmt: skip

FAULTS = (
    ("data_parallel", "slow rank"),
    ("data_parallel", "exposed communication"),
    ("encoder", "data loading"),
    ("mlp", "host too slow"),
    ("narrow", "optimizer not fused"),
    ("compiled", "compilation within the step"),
    ("tiny_ops", "tiny kernels"),
)
"""(job, fault): what can be wrong without a GPU. Of devices the tests write traces with known faults."""


class _Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, make: Callable[[], torch.Tensor], wait_s: float) -> None:
        self.make, self.wait_s = make, wait_s

    def __len__(self) -> int:
        return STEPS + 3

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.wait_s)
        return self.make()


def _batches(make: Callable[[], torch.Tensor], fault: str) -> Iterator[torch.Tensor]:
    wait = 0.03 if fault == "data loading" else 0.0
    return iter(torch.utils.data.DataLoader(_Rows(make, wait), batch_size=None))


def record(job: str, fault: str, folder: Path, *, marks: bool = True) -> list[float]:
    """Runs the job, writes `rank<r>.json` into the folder, and returns the seconds of its steps on rank 0."""
    folder.mkdir(parents=True, exist_ok=True)
    if job in ("data_parallel", "sharded"):
        mp.spawn(_rank, (job, fault, str(folder), marks), nprocs=2)
        return [float(line) for line in (folder / "seconds.txt").read_text().split()]
    return _steps(job, fault, folder, 0, marks)


def _rank(rank: int, job: str, fault: str, folder: str, marks: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        seconds = _steps(job, fault, Path(folder), rank, marks)
        if rank == 0:
            Path(folder, "seconds.txt").write_text("\n".join(map(str, seconds)))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _steps(job: str, fault: str, folder: Path, rank: int, marks: bool) -> list[float]:
    torch.manual_seed(0)
    step, make = JOBS[job](fault)
    batches = _batches(make, fault)
    for _ in range(2):
        step(next(batches))
    times = []
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True) as recording:
        for i in range(STEPS):
            began = time.perf_counter()
            if marks:
                with torch.profiler.record_function(f"ProfilerStep#{i}"):
                    step(next(batches))
            else:
                step(next(batches))
            times.append(time.perf_counter() - began)
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    recording.export_chrome_trace(str(folder / f"rank{rank}.json"))
    return times
