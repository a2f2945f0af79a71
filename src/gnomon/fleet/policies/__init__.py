"""Scheduling policies, one file each, named by their paper; each a pure function `(State, Forecasts) -> Decisions`.

`policy(name)` finds one, `POLICIES` lists all. Adding one is a file and its name here. Leaves out the replay.
"""

from __future__ import annotations

from gnomon.errors import CatalogueError, nearest
from gnomon.fleet.policies.easyscale import EASYSCALE
from gnomon.fleet.policies.elastic_batch import ELASTIC_BATCH
from gnomon.fleet.policies.elasticflow import ELASTICFLOW
from gnomon.fleet.policies.federated import FEDERATED
from gnomon.fleet.policies.fgd import FGD
from gnomon.fleet.policies.gavel import GAVEL
from gnomon.fleet.policies.gavel import VARIANTS as GAVELS
from gnomon.fleet.policies.lyra import LYRA, VARIANTS
from gnomon.fleet.policies.optimus import OPTIMUS
from gnomon.fleet.policies.pollux import POLLUX
from gnomon.fleet.policies.priority import LAS, SRTF, TIRESIAS
from gnomon.fleet.policies.sharing import COGNN, GANDIVA, QOS
from gnomon.fleet.policies.shockwave import SHOCKWAVE
from gnomon.fleet.policies.sia import SIA
from gnomon.fleet.policies.textbook import BACKFILL, FIFO, SJF
from gnomon.fleet.policies.themis import THEMIS
from gnomon.fleet.state import Policy

POLICIES = (
    FIFO, BACKFILL, SJF, SRTF, LAS, TIRESIAS, THEMIS, GAVEL, *GAVELS, SHOCKWAVE, ELASTICFLOW, GANDIVA, OPTIMUS,
    POLLUX, SIA, LYRA, *VARIANTS, EASYSCALE, COGNN, QOS,
    FEDERATED, FGD, ELASTIC_BATCH,
)  # fmt: skip
"""All, simplest first."""


def policy(name: str) -> Policy:
    """The policy of a name. CatalogueError with the nearest names if there is none."""
    for candidate in POLICIES:
        if candidate.name == name:
            return candidate
    known = [candidate.name for candidate in POLICIES]
    raise CatalogueError(f"unknown policy {name!r}{nearest(name, known)}; known are {', '.join(known)}")
