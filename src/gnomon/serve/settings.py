"""How a folder is served: `Settings`, which the front end and its workers have alike.

Leaves out what a request asks for (`sampling`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gnomon.errors import InputError
from gnomon.late import load_late
from gnomon.serve.sizes import Ways
from gnomon.software.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a server."""

    folder: str
    """With config.json and *.safetensors."""
    tokenizer: Path | None
    """Folder or file of tokenizer.json; None for bytes."""
    name: str
    """That clients ask for."""
    adapters: tuple[tuple[str, Path], ...]
    """(name that clients ask for, folder) of LoRA adapters."""
    rules: Engine
    """The engine's record, with what the user set."""
    dtype: str
    """`fp32`, `bf16` or `fp64`."""
    weights: str
    """How matrices are stored, as `matrices.Forms` reads it."""
    kv_bytes: int
    """Of keys and values of a process."""
    resident_bytes: int | None
    """Of layers' matrices in memory, of a process, where others stay on a disk; None: all."""
    max_model_len: int | None
    """Tokens of prompt and answer; None: as long as the model's config.json says."""
    host: str
    """Address that it listens on."""
    port: int
    """0 takes a free one."""
    api_key: str
    """That requests must bear; empty for none."""
    workers: int
    """Replicas: each has the model."""
    ways: Ways
    """Into how many processes a replica is divided."""
    threads: int
    """Of a worker."""
    expert_copies: int = 0
    """Copies of other processes' experts that a process has room for, of a layer (`copies`)."""
    record_experts: Path | None = None
    """The file that what routers chose is written to at the end."""
    max_waiting: int
    """Requests that wait; one more is refused with 429."""
    max_body_bytes: int
    """Of a request."""
    drain_s: float
    """Seconds that running requests have to end when the server is told to stop."""
    head: str = "exact"
    """Of a decoder: `graph` searches for the likeliest tokens in a graph over the vocabulary (`graph_head`)."""
    buckets: tuple[int, ...] = ()
    """Of an encoder: lengths that texts are padded to, rising (`serving.dispatch`); (): each has its own."""
    every_bucket: bool = False
    """Whether each worker has all of them, in place of one each."""
    patience: float = 1.0
    """As `serving.dispatch.Policy` has it."""

    def __post_init__(self) -> None:
        for name in ("workers", "threads", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        names = [self.name, *(name for name, _ in self.adapters)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise InputError(f"{twice[0]!r} names two models; give each --lora another name")
        if not 0 <= self.port < 65536:
            raise InputError(f"port must be from 0 (a free one) to 65535, got {self.port}")
        if self.host not in ("127.0.0.1", "localhost", "::1") and not self.api_key:
            raise InputError(
                f"host {self.host} can be reached from other machines; give an API key (--api-key or "
                f"GNOMON_API_KEY), or serve on 127.0.0.1"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The names that clients may ask for: the model's, and its adapters'."""
        return (self.name, *(name for name, _ in self.adapters))

    def use_threads(self) -> None:
        """Has torch take the threads of a worker."""
        os.environ["OMP_NUM_THREADS"] = str(self.threads)
        load_late("torch:set_num_threads")(self.threads)
