"""What to expect of a training loop that came without a plan: its module captured, its step predicted here.

`FirstForward` keeps the first forward's inputs and counts microbatches; `expect` captures the module with them, takes
the loop as it is (its optimizer, its dtypes, plain or DDP over the ranks that are there) for the plan, and predicts it
on this machine: as calibrated, or a GPU of the catalogue. InputError with the reason where that cannot be done. What
the loop computes outside of the module, such as its loss, is not in the prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from gnomon.errors import GnomonError, InputError
from gnomon.frontend.capture import capture
from gnomon.graph import Graph
from gnomon.hardware import local_file, parse_cluster
from gnomon.plans import Mesh, Optimizer, Plan, Precision, Schedule, Workload
from gnomon.plans.check import sample_tokens
from gnomon.prediction import Prediction, predict
from gnomon.request import arguments

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
_UPDATES = {
    "AdamW": "adamw", "Adam": "adam", "NAdam": "adam", "RAdam": "adam", "Adafactor": "adafactor", "SGD": "sgd",
    "Lion": "lion", "Muon": "muon",
}  # fmt: skip
"""torch.optim's class -> `Plan.optimizer.kind`."""


class FirstForward:
    """The inputs of a loop's first training forward, and how many forwards a step has."""

    def __init__(self) -> None:
        self.inputs: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
        self.autocast: torch.dtype | None = None
        self.forwards = 0
        """Of the step under way."""
        self.a_step = 0
        """Of the last whole step."""

    def forward(self, device: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """A training forward begins. device: its type."""
        self.forwards += 1
        if self.inputs is None:
            # Copies: a loop may write the next batch into the same tensors.
            self.inputs = tree_map(_copy, (args, dict(named)))
            self.autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def step(self) -> None:
        """The step is over."""
        self.a_step, self.forwards = self.forwards, 0


def _copy(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


def expect(model: nn.Module, optimizer: torch.optim.Optimizer, seen: FirstForward) -> Prediction:
    """Predicts the loop's step. InputError (or another GnomonError) says why it cannot be predicted."""
    if seen.inputs is None or not seen.a_step:
        raise InputError("no forward of the model was seen; call the module that watch was given")
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    replicated = isinstance(model, DistributedDataParallel)
    module = model.module if isinstance(model, DistributedDataParallel) else model
    if any(isinstance(p, DTensor) for p in module.parameters()):
        raise InputError("its parameters are sharded (DTensor), and a module is captured before it is sharded")
    if ranks > 1 and not replicated:
        raise InputError(f"{ranks} ranks run and the model is no DistributedDataParallel: how they share is not known")
    args, named = seen.inputs
    graph = capture(module, _by_name(module, args, named), name=type(module).__name__)
    micro = _batch(args, named)
    tokens = sample_tokens(graph)
    plan = Plan(
        mesh=Mesh(dp_replicate=ranks),
        schedule=Schedule(micro_batch_size=micro),
        optimizer=Optimizer(kind=_update(optimizer), clip=False),  # type: ignore[arg-type]
        precision=_precision(module, seen.autocast),
    )
    workload = Workload(global_batch_size=micro * seen.a_step * ranks, seq_len=tokens or _seq_len(graph, args, named))
    cluster = parse_cluster(machine(module))
    return predict(graph, cluster, plan, workload, arguments.stack(None))


def reason(error: Exception) -> str:
    """One line that says why nothing can be predicted."""
    text = str(error) if isinstance(error, GnomonError) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0] if text else type(error).__name__


def _by_name(module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    return dict(named) if named and not args else args if not named else _merged(module, args, named)


def _merged(module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """Positional inputs under the names that forward gives them, with those given by name."""
    # Without `self`.
    names = module.forward.__code__.co_varnames[1 : module.forward.__code__.co_argcount]
    if len(args) > len(names):
        raise InputError("its forward takes inputs of any number, which have no names")
    return {**dict(zip(names, args, strict=False)), **named}


def _batch(args: tuple[Any, ...], named: Mapping[str, Any]) -> int:
    tensors = [x for x in (*args, *named.values()) if isinstance(x, Tensor) and x.dim() > 0]
    if not tensors:
        raise InputError("its forward takes no tensor whose first dim is the batch")
    return int(tensors[0].shape[0])


def _seq_len(graph: Graph, args: tuple[Any, ...], named: Mapping[str, Any]) -> int:
    """The length of a model's sequences: the second dim of its first input of integers, which capture names `seq`."""
    for x in (*args, *named.values()):
        if isinstance(x, Tensor) and x.dim() > 1 and not x.is_floating_point():
            return int(x.shape[1])
    raise InputError("the length of its sequences is not known: no input of integers has a second dim")


def _update(optimizer: torch.optim.Optimizer) -> str:
    name = type(optimizer).__name__
    kind = _UPDATES.get(name)
    if kind is None:
        raise InputError(f"the update of {name} has no price; known are {', '.join(sorted(_UPDATES))}")
    return "momentum" if kind == "sgd" and any(group.get("momentum") for group in optimizer.param_groups) else kind


def _precision(module: nn.Module, autocast: torch.dtype | None) -> Precision:
    """Parameters, gradients and states lie as the module's parameters do; autocast says what matmuls compute in."""
    param = _DTYPES.get(next((p.dtype for p in module.parameters()), torch.float32), "fp32")
    compute = _DTYPES.get(autocast, param) if autocast is not None else param
    return Precision(
        param=param,  # type: ignore[arg-type]
        compute=compute,  # type: ignore[arg-type]
        grad=param,  # type: ignore[arg-type]
        reduce=param,  # type: ignore[arg-type]
        master="none",
        states=param,  # type: ignore[arg-type]
    )


def machine(module: nn.Module) -> str:
    """What a module is trained on: this machine's devices, one a rank, as `--on` names them. InputError for a machine
    without prices."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    if device.type == "cpu":
        if not local_file().exists():
            raise InputError("this machine is not calibrated; run gnomon calibrate once (a minute)")
        return f"local:{ranks}"
    if device.type != "cuda":
        raise InputError(f"devices of type {device.type} have no prices")
    return f"{ranks}x{torch.cuda.get_device_name(device)}"
