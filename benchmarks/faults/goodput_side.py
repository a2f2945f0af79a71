"""One side of `goodput`: trains until it is killed, and writes each rank's process and each step that is behind it.

python goodput_side.py SIDE LOG FOLDER [REPLICA]
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SEQUENCES, TOKENS, EVERY = 8, 64, 10
SIZES = {
    "name": "bytes", "num_layers": 4, "hidden_size": 64, "num_heads": 2, "num_kv_heads": 2, "head_dim": 32,
    "ffn_size": 256, "vocab_size": 256,
}  # fmt: skip


def line(log: str, text: str) -> None:
    """Of one write."""
    with Path(log).open("a") as file:
        file.write(f"{text}\n")


# --- torch


def model() -> torch.nn.Module:
    """The plain Llama of the tests, with the same values on every rank."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
    plain: Any = import_module("runtime.plain_llama")
    config: Any = import_module("gnomon.models.llama").LlamaConfig(**SIZES)
    torch.manual_seed(0)
    made: torch.nn.Module = plain.Llama(config)
    return made


def batch(step: int, rank: int) -> torch.Tensor:
    """This rank's half of a step's ids."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 256, (SEQUENCES, TOKENS + 1), generator=generator)
    return ids[rank * SEQUENCES // 2 : (rank + 1) * SEQUENCES // 2]


def torchrun(log: str, folder: str) -> None:
    """DistributedDataParallel with checkpoints."""
    dist.init_process_group("gloo")
    rank, kept = dist.get_rank(), Path(folder) / "checkpoint.pt"
    line(log, f"pid {rank} {os.getpid()}")
    module = model()
    wrapped = torch.nn.parallel.DistributedDataParallel(module)
    update = torch.optim.AdamW(module.parameters(), lr=3e-4, fused=True)
    done = 0
    if kept.exists():
        saved = torch.load(kept)
        module.load_state_dict(saved["model"])
        update.load_state_dict(saved["update"])
        done = saved["step"]
    while True:
        done += 1
        loss_of(wrapped, batch(done, rank)).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        update.step()
        update.zero_grad()
        if rank == 0:
            line(log, f"step {done} {time.time()}")
            if done % EVERY == 0:
                state = {"model": module.state_dict(), "update": update.state_dict(), "step": done}
                torch.save(state, kept.with_suffix(".new"))
                kept.with_suffix(".new").rename(kept)


def loss_of(module: Any, ids: torch.Tensor) -> torch.Tensor:
    """Mean over tokens."""
    total: torch.Tensor = module(ids[:, :-1], ids[:, 1:])
    return total / ids[:, 1:].numel()


def torchft(log: str, replica: int) -> None:
    """A replica of its own, which heals from the other's memory. Its DistributedDataParallel ends the survivor by an
    AssertionError when the other is lost (torchft 0.2, torch 2.13), so gradients go through the Manager."""
    from datetime import timedelta

    ft: Any = import_module("torchft")
    line(log, f"pid {replica} {os.getpid()}")
    module = model()
    update = torch.optim.AdamW(module.parameters(), lr=3e-4, fused=True)

    def load(state: Any) -> None:
        module.load_state_dict(state["model"])
        update.load_state_dict(state["update"])

    def state() -> Any:
        return {"model": module.state_dict(), "update": update.state_dict()}

    manager = ft.Manager(
        pg=ft.ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=1, load_state_dict=load,
        state_dict=state, replica_id=f"replica_{replica}", timeout=timedelta(seconds=10), hostname="127.0.0.1",
    )  # fmt: skip
    managed = ft.Optimizer(manager, update)
    while True:
        managed.zero_grad()
        before = manager.current_step()
        loss_of(module, batch(before, replica)).backward()
        grads = [x.grad for x in module.parameters() if x.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        manager.allreduce(flat).wait()
        for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(mean.view_as(grad))
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        managed.step()
        if manager.current_step() > before:
            line(log, f"step {manager.current_step()} {time.time()}")


# --- Gnomon


def gnomon(side: str, log: str, folder: str) -> None:
    """`run` on text, each process saying its steps."""
    plans: Any = import_module("gnomon.plans")
    runtime: Any = import_module("gnomon.runtime")
    llama: Any = import_module("gnomon.models.llama")
    text = Path(folder) / "text"
    text.mkdir()
    for i in range(60):
        (text / f"{i}.txt").write_text(f"the loss goes down, line {i % 7} of the text. " * 40)
    fp32 = plans.Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")
    stages = side == "gnomon-stages"
    passes = (plans.Pass(name="bamboo"),) if stages else ()
    order = plans.Schedule(name="one_f_one_b", num_microbatches=4 if stages else 1, passes=passes)
    mesh = plans.Mesh(pp=2) if stages else plans.Mesh(dp_replicate=2)
    given = runtime.Job(
        graph=llama.llama(llama.LlamaConfig(**SIZES)), plan=plans.Plan(mesh=mesh, schedule=order, precision=fp32),
        workload=plans.Workload(global_batch_size=SEQUENCES, seq_len=TOKENS), steps=10**6,
        data=runtime.Source(path=text, cache=Path(folder) / "tokens"), quiet=True, max_restarts=100,
        memory_checkpoint_every=int(side == "gnomon-memory"),
        checkpoints=Path(folder) / "saved" if side == "gnomon-disk" else None,
        checkpoint_every=EVERY if side == "gnomon-disk" else 0,
    )  # fmt: skip
    os.environ[LOG] = log
    running: Any = import_module("gnomon.runtime.launch.run")
    running.train = said_train
    if (scheme := running.scheme_of(given)) is None:
        running.run(given)
    else:
        running.run_scheme(given, replace(scheme, train=said_stages if stages else said_surviving))


LOG = "GNOMON_GOODPUT_LOG"


def _say(rank: int) -> None:
    """Has this process say its steps, under its rank."""
    log, loops = os.environ[LOG], import_module("gnomon.runtime.launch.train")
    line(log, f"pid {rank} {os.getpid()}")
    ends = loops.Loop.ends

    def ended(self: Any, step: int, *rest: Any, **named: Any) -> Any:
        if dist.get_rank() == 0:
            line(log, f"step {step} {time.time()}")
        return ends(self, step, *rest, **named)

    loops.Loop.ends = ended  # type: ignore[attr-defined]


def said_train(job: Any) -> Any:
    """`train`."""
    _say(dist.get_rank())
    return import_module("gnomon.runtime.launch.train").train(job)


def said_surviving(job: Any, membership: Any) -> Any:
    """`train_surviving`; a process that comes for another one has its rank once it has met the others."""
    return _with_rank("survivors", "train_surviving", job, membership)


def said_stages(job: Any, membership: Any) -> Any:
    """`train_with_copies`."""
    return _with_rank("takeover", "train_with_copies", job, membership)


def _with_rank(module: str, function: str, job: Any, membership: Any) -> Any:
    meet = type(membership).meet
    said = []

    def met(self: Any, epoch: Any) -> bool:
        if not said:
            place = epoch.members.index(self.process)
            said.append(epoch.ranks[place])
            _say(said[0])
        done: bool = meet(self, epoch)
        return done

    type(membership).meet = met
    return getattr(import_module(f"gnomon.runtime.launch.{module}"), function)(job, membership)


def main() -> None:
    """As the first argument says."""
    side, log, folder, *rest = sys.argv[1:]
    torch.set_num_threads(1)
    if side == "torchrun":
        torchrun(log, folder)
    elif side == "torchft":
        torchft(log, int(rest[0]))
    else:
        gnomon(side, log, folder)


if __name__ == "__main__":
    main()
