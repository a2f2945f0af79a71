"""The machine that a script believes to be on: GPUs that compute nothing, ranks that are alone, no network.

`pretended(devices)` is a context in which torch.cuda answers as a GPU would, tensors said to be on it stay on the CPU,
parameters beyond REAL have no memory (as accelerate's `init_empty_weights` does it), process groups are torch's `fake`
ones, wrappers of data parallelism are passed through and noted, and connections to other machines are refused. Leaves
out packages of the hub (`hub`) and the step (`step`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.device_mesh
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed import fake_pg
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_flatten, tree_map

from gnomon.frontend.script.seen import SEEN

REAL = 4_000_000
"""Elements of parameters that are kept with their values, so that small models run as they are."""

READERS = ("item", "__bool__", "__float__", "__int__", "__index__", "tolist", "numpy", "__array__", "__format__")
FINITE = {"isnan": False, "isinf": False, "isfinite": True, "isneginf": False, "isposinf": False}
"""Questions on numbers that are not computed -> the answer of a healthy run."""

CAPABILITY = (9, 0)
"""Of the GPU that scripts are told of, which choose bf16 and kernels by it."""


def on_device(x: object) -> bool:
    """Whether an argument names a GPU."""
    if isinstance(x, torch.device):
        return x.type in ("cuda", "xpu", "npu", "mps")
    return isinstance(x, str) and x.partition(":")[0] in ("cuda", "xpu", "npu", "mps")


class OnHost(TorchFunctionMode):
    """A GPU is the CPU; what meets a tensor without memory has none either; numbers that are not there are ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        # Reading an attribute comes as `__get__`: shape, dtype and device are known without memory too, and are left as
        # they are.
        bare = any(x.is_meta for x in tensors) if name != "__get__" else False
        if bare and name in READERS:
            return _number(name, args[0], *args[1:])
        # Loops skip steps whose gradients are not finite; a healthy run has none.
        if bare and name in FINITE:
            return torch.tensor(FINITE[name]).expand(args[0].shape)
        # Everything is on one place here, so a copy to another is the tensor itself.
        if name in ("cuda", "cpu", "pin_memory", "xpu", "npu") and tensors:
            return args[0]
        place = torch.device("meta" if bare else "cpu")
        if bare or any(on_device(x) for x in (*args, *kwargs.values())):
            args = tuple(place if on_device(x) or (bare and _is_place(x)) else x for x in args)
            kwargs = {k: place if on_device(x) or (bare and _is_place(x)) else x for k, x in kwargs.items()}
        # torch refuses an op over tensors with memory and without: whatever meets one without gives its own up.
        if bare and any(not x.is_meta for x in tensors):
            args, kwargs = tree_map(_without_memory, (args, kwargs))
        # Pinned memory is a GPU's driver's, which there may be none of.
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


def _is_place(x: object) -> bool:
    return isinstance(x, torch.device) or (isinstance(x, str) and x in ("cpu", "meta"))


def _without_memory(x: Any) -> Any:
    return x.to("meta") if isinstance(x, Tensor) and not x.is_meta else x


def _number(name: str, tensor: Tensor, *rest: Any) -> Any:
    """What Python gets for numbers that were not computed."""
    # Libraries read numbers for their logs at every step, which is no news to the user.
    if _by_the_script():
        SEEN.note(f"{where()}: reads a number that is not computed here; taken as 1")
    if name == "__format__":
        return format(1.0, rest[0]) if rest and rest[0] else "1.0"
    if name in ("tolist", "numpy", "__array__"):
        # Ones and not zeros: what is read is a count to divide by, a loss for a logarithm, or a mask.
        ones = torch.ones(tensor.shape, dtype=tensor.dtype)
        return ones.tolist() if name == "tolist" else ones.float().numpy()
    return {"__bool__": True, "__float__": 1.0}.get(name, 1.0 if tensor.is_floating_point() else 1)


OURS = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[2]}/", "<")


INSTALLED = ("/site-packages/", "/dist-packages/")


def where() -> str:
    """File and line of the script; of the package that it called where the script is not on the stack."""
    frame, nearest = sys._getframe(1), ""
    while frame is not None:
        file = frame.f_code.co_filename
        if os.path.abspath(file) == os.path.abspath(sys.argv[0]):
            return f"{file}:{frame.f_lineno}"
        if not nearest and not file.startswith(OURS):
            nearest = f"{file}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return nearest or "the script"


def _by_the_script() -> bool:
    """Whether the nearest caller outside of torch is no installed package."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and not any(part in frame.f_code.co_filename for part in INSTALLED)


class PassThrough(nn.Module):
    """A wrapper of data parallelism that does nothing but hold its module."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # DDP itself does not, but scripts' own wrappers do; a missing name raises there all the same.
            return getattr(super().__getattr__("module"), name)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        yield

    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> Tensor:
        return _clip()


class Replicated(PassThrough):
    """Stands in for DistributedDataParallel."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module)
        SEEN.sharding = "ddp"


class Sharded(PassThrough):
    """Stands in for FullyShardedDataParallel."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module)
        _shards(kwargs, "fsdp")


def _shards(kwargs: dict[str, Any], version: str) -> None:
    SEEN.sharding = version
    if (strategy := kwargs.get("sharding_strategy")) is not None:
        SEEN.shards["strategy"] = str(getattr(strategy, "name", strategy)).lower()
    # FSDP2 has no strategies: this is its word for keeping parameters gathered until backward.
    if kwargs.get("reshard_after_forward") is False:
        SEEN.shards["strategy"] = "shard_grad_op"
    mixed = kwargs.get("mixed_precision") or kwargs.get("mp_policy")
    # Methods that FSDP2 gives a module and training loops call; nothing is sharded here, so they do nothing.
    for name in ("param_dtype", "reduce_dtype"):
        if (dtype := getattr(mixed, name, None)) is not None:
            SEEN.shards[name] = str(dtype).removeprefix("torch.")
    offload = kwargs.get("cpu_offload") or kwargs.get("offload_policy")
    if getattr(offload, "offload_params", False) or type(offload).__name__ == "CPUOffloadPolicy":
        SEEN.shards["offload"] = True


def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
    _shards(kwargs, "fsdp2")
    for name in (
        "set_requires_gradient_sync",
        "set_is_last_backward",
        "unshard",
        "reshard",
        "set_reshard_after_backward",
    ):
        for one in module if isinstance(module, (list, tuple)) else (module,):
            object.__setattr__(one, name, lambda *a, **k: None)
    return module


def _clip(*args: Any, **kwargs: Any) -> Tensor:
    SEEN.clipped = True
    # A norm for who logs it; clipping itself changes no time that a plan knows but the wait, which SEEN has.
    return torch.tensor(1.0)


class Scaler:
    """Stands in for GradScaler and scales by one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def scale(self, loss: Any) -> Any:
        return loss

    def unscale_(self, optimizer: Any) -> None:
        pass

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    def update(self, *args: Any) -> None:
        pass

    def get_scale(self) -> float:
        return 1.0

    def is_enabled(self) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Autocast(contextlib.ContextDecorator):
    """Stands in for torch.autocast: notes its dtype and casts nothing."""

    def __init__(self, device_type: str = "cuda", dtype: Any = None, enabled: bool = True, **rest: Any) -> None:
        # torch's own defaults: fp16 on GPUs, bf16 on CPUs.
        self.dtype = (dtype or torch.float16) if enabled else None
        if device_type == "cpu" and dtype is None and enabled:
            self.dtype = torch.bfloat16

    def __enter__(self) -> Autocast:
        # What counts is around the first forward that is trained on; what comes after a backward may be an evaluation.
        if self.dtype is not None and not SEEN.backwards:
            SEEN.autocast = str(self.dtype).removeprefix("torch.")
        return self

    def __exit__(self, *error: Any) -> None:
        pass


def _compile(model: Any = None, **kwargs: Any) -> Any:
    SEEN.compiled = True
    return model if model is not None else lambda function: function


def _again(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for torch.utils.checkpoint and calls the function: what is saved does not matter here."""
    SEEN.checkpointed = True
    for option in ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"):
        kwargs.pop(option, None)
    return function(*args, **kwargs)


def _properties(*args: Any) -> Any:
    return types.SimpleNamespace(
        name="GPU", major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=80 * 2**30, multi_processor_count=132
    )


def _cuda(devices: int) -> Iterator[Any]:
    """Makes torch.cuda answer as on a machine with so many devices, as long as what is inside runs."""
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        # Of one machine, as scripts index its devices by local rank.
        "device_count": lambda: max(1, min(devices, 8)),
        "current_device": lambda: 0,
        "is_bf16_supported": lambda *a, **k: True,
        "get_device_capability": lambda *a, **k: CAPABILITY,
        "get_device_name": lambda *a, **k: "GPU",
        "get_device_properties": _properties,
        "mem_get_info": lambda *a, **k: (80 * 2**30, 80 * 2**30),
        "memory_stats": lambda *a, **k: {},
        "memory_summary": lambda *a, **k: "",
        "get_rng_state": lambda *a, **k: torch.get_rng_state(),
        # Says that no CUDA context is there: forked workers of data loaders ask before they start.
        "is_initialized": lambda: False,
    }
    zero = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    nothing = (
        "set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all", "reset_peak_memory_stats", "init",
        "set_rng_state", "set_per_process_memory_fraction", "ipc_collect", "reset_max_memory_allocated",
    )  # fmt: skip
    answers |= {name: lambda *a, **k: 0 for name in zero} | {name: lambda *a, **k: None for name in nothing}
    for name, answer in answers.items():
        if hasattr(torch.cuda, name):
            yield mock.patch.object(torch.cuda, name, answer)


def _wrapped() -> Iterator[Any]:
    """What is put in place of torch's own."""
    yield mock.patch.object(torch, "compile", _compile)
    yield mock.patch.object(nn.Module, "compile", lambda self, *a, **k: _compile(self))
    yield mock.patch.object(torch, "autocast", Autocast)
    yield mock.patch.object(torch.amp, "autocast", Autocast)
    yield mock.patch.object(
        torch.cuda.amp, "autocast", lambda enabled=True, dtype=None, **k: Autocast("cuda", dtype, enabled)
    )
    for place in (torch.amp, torch.cuda.amp):
        yield mock.patch.object(place, "GradScaler", Scaler)
    yield mock.patch.object(torch.utils.checkpoint, "checkpoint", _again)
    yield mock.patch.object(nn.utils, "clip_grad_norm_", _clip)
    yield mock.patch.object(nn.utils.clip_grad, "clip_grad_norm_", _clip)
    for place in (nn.parallel, nn.parallel.distributed):
        yield mock.patch.object(place, "DistributedDataParallel", Replicated)
    yield mock.patch.object(nn, "DataParallel", PassThrough)
    yield mock.patch.object(nn.parallel, "DataParallel", PassThrough)
    yield mock.patch.object(torch, "set_default_device", lambda *a, **k: None)
    original = DeviceContext.__init__
    yield mock.patch.object(
        DeviceContext,
        "__init__",
        lambda self, device: original(self, torch.device("cpu") if on_device(device) else device),
    )


def _group(devices: int) -> Iterator[Any]:
    """One rank of so many, whose collectives do nothing."""
    begin = dist.init_process_group

    def single(*args: Any, **kwargs: Any) -> None:
        begin(backend="fake", rank=0, world_size=devices, store=fake_pg.FakeStore())

    yield mock.patch.object(dist, "init_process_group", single)
    make = dist.device_mesh.init_device_mesh
    for place in (dist, dist.device_mesh):
        yield mock.patch.object(place, "init_device_mesh", lambda kind, *a, **k: make("cpu", *a, **k))


def _parameters() -> Any:
    """`register_parameter` by which parameters beyond REAL lose their memory; one that is shared stays one."""
    register = nn.Module.register_parameter
    # The parameters themselves are kept beside their ids, since an id is used again once its object is gone.
    copies: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    num_elements = 0

    def registered(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        nonlocal num_elements
        if isinstance(param, nn.Parameter) and not param.is_meta and param.layout is torch.strided:
            if id(param) in copies:
                param = copies[id(param)][1]
            elif num_elements + param.numel() > REAL:
                bare = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
                bare.__dict__.update(param.__dict__)
                copies[id(param)] = (param, bare)
                param = bare
            else:
                copies[id(param)] = (param, param)
                num_elements += param.numel()
        register(self, name, param)

    return mock.patch.object(nn.Module, "register_parameter", registered)


HERE = ("127.0.0.1", "::1", "localhost", "", None)
"""This machine."""


def _connections() -> Iterator[Any]:
    """No connection but to this machine, and no look-up of a name of another."""
    look_up = socket.getaddrinfo

    def refused(host: Any) -> OSError:
        return socket.gaierror(f"no network: the script is run without it ({host})")

    def looked_up(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in HERE:
            raise refused(host)
        return look_up(host, *args, **kwargs)

    yield mock.patch.object(socket, "getaddrinfo", looked_up)
    for name in ("connect", "connect_ex"):
        begin = getattr(socket.socket, name)

        def connected(self: socket.socket, address: Any, begin: Any = begin) -> Any:
            if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in HERE:
                raise refused(address[0])
            return begin(self, address)

        yield mock.patch.object(socket.socket, name, connected)


OFFLINE = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_MODE": "disabled",
    "WANDB_DISABLED": "true",
    "TRACKIO_MODE": "disabled",
    "ACCELERATE_USE_CPU": "true",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}
"""Variables of the process in which a script runs."""


def environment(devices: int) -> dict[str, str]:
    """Variables of that process: offline, and what torchrun gives rank 0 of so many."""
    if devices == 1:
        return dict(OFFLINE)
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(devices), "LOCAL_WORLD_SIZE": str(min(devices, 8))}
    return {**OFFLINE, **ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "GROUP_RANK": "0"}


@contextlib.contextmanager
def pretended(devices: int) -> Iterator[None]:
    """The machine, for as long as the context lasts."""
    os.environ.update(environment(devices))
    loader = torch.utils.data.DataLoader.__init__

    def one_process(self: Any, *args: Any, **kwargs: Any) -> None:
        loader_args = args[:5]  # dataset, batch_size, shuffle, sampler, batch_sampler; then num_workers
        further = dict(zip(("collate_fn", "pin_memory", "drop_last"), args[6:9], strict=False))
        kwargs = {**further, **kwargs, "num_workers": 0, "pin_memory": False}
        for name in ("persistent_workers", "prefetch_factor", "multiprocessing_context", "pin_memory_device"):
            kwargs.pop(name, None)
        loader(self, *loader_args, **kwargs)

    with contextlib.ExitStack() as stack:
        for patch in (*_cuda(devices), *_wrapped(), *_group(devices), _parameters(), *_connections()):
            stack.enter_context(patch)
        stack.enter_context(mock.patch.object(torch.utils.data.DataLoader, "__init__", one_process))
        stack.enter_context(OnHost())
        yield
