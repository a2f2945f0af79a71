"""Bytes that tensors take while they live: of a process (`LiveBytes`), and of each layer of a stage (`LayerBytes`).

Every op that runs under a `LiveBytes` is seen, those of backward too; a storage counts from the op that makes it until
it is freed. `LayerBytes` is told by a `Stage` where layers begin and end, and runs each one that is to be recomputed
once more without, to see what it would keep. Left out: what is there before, workspaces inside kernels, and what
allocators round.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gnomon.methods.mimose import ForwardBytes


class LiveBytes(TorchDispatchMode):
    """Counts while it is entered; storages that are freed later are taken off later."""

    def __init__(self, device: torch.device) -> None:
        """Takes the device whose tensors count."""
        super().__init__()
        self.device = device
        self.now = 0
        """Bytes of storages that were made under it and are not freed."""
        self.most = 0
        """Largest `now` since `again`."""
        self._known: set[int] = set()

    def again(self) -> None:
        """Begins a new largest from here on."""
        self.most = self.now

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for x in _tensors((args, kwargs)):
            if x.device.type == self.device.type:
                self._see(x, is_new=False)
        result = func(*args, **(kwargs or {}))
        for x in _tensors(result):
            if x.device.type == self.device.type:
                self._see(x, is_new=True)
        self.most = max(self.most, self.now)
        return result

    def add(self, x: Tensor) -> None:
        """Counts what another thread made, which no mode of this one sees."""
        self._see(x, is_new=True)
        self.most = max(self.most, self.now)

    def _see(self, x: Tensor, *, is_new: bool) -> None:
        storage = x.untyped_storage()
        # Of the storage, not of its memory: all views have the same one.
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        nbytes = storage.nbytes() if is_new else 0  # what an op reads and nobody made was there before
        self.now += nbytes
        weakref.finalize(storage, self._gone, key, nbytes).atexit = False

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def _tensors(x: object) -> Iterator[Tensor]:
    """Lists the tensors in what an op takes or returns: tensors, sequences of them, and plain values."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (tuple, list)):
        for part in x:
            yield from _tensors(part)
    elif isinstance(x, Mapping):
        yield from _tensors(tuple(x.values()))


class LayerBytes:
    """Bytes of each layer for one microbatch at one stage, whose layers run one after the other."""

    def __init__(self, live: LiveBytes, layers: int) -> None:
        """Takes live, entered from before the forward until after the backward."""
        self.live, self.start = live, live.now
        self.kept_bytes, self.left_bytes, self.work = ([0] * layers for _ in range(3))
        self.before = [0] * layers
        """What the layers before each left."""
        self.most = 0
        """Of the microbatch."""
        self.current = 0

    def begin(self, layer: int) -> None:
        """Is called before a layer's forward."""
        self._turn(layer)
        self.before[layer] = self.live.now - self.start

    def kept_by(self, layer: int, forward: Callable[[], Sequence[Tensor]]) -> None:
        """Runs the layer as it is where it is not recomputed, and forgets what it made."""
        began = self.live.now
        outputs = forward()
        self.kept_bytes[layer] = self.live.now - began
        del outputs

    def end(self, layer: int, outputs: Iterable[Tensor]) -> None:
        """Its forward is over. outputs: what it made, by whose gradients its backward begins."""
        self.left_bytes[layer] = self.live.now - self.start - self.before[layer]
        for x in outputs:
            if x.requires_grad:
                x.register_hook(partial(self._back, layer))

    def forward_bytes(self) -> ForwardBytes:
        """What each layer held, once the backward is over."""
        self._turn(self.current)
        kept_bytes = [
            max(kept_bytes, left_bytes) for kept_bytes, left_bytes in zip(self.kept_bytes, self.left_bytes, strict=True)
        ]
        return ForwardBytes(kept_bytes=tuple(kept_bytes), left_bytes=tuple(self.left_bytes), work=tuple(self.work))

    def _back(self, layer: int, grad: Tensor) -> None:
        if layer != self.current:
            self._turn(layer)

    def _turn(self, layer: int) -> None:
        """What was held until now was the work of the layer before."""
        work_bytes = self.live.most - self.start
        self.work[self.current] = max(self.work[self.current], work_bytes - self.before[self.current])
        self.most, self.current = max(self.most, work_bytes), layer
        self.live.again()
