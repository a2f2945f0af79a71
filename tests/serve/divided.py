"""A model divided over processes, against itself on one: `answers_of(kind, folder)` is asked in the test's process,
`rank` is what the others run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gnomon.runtime.ops.site import Axis
from gnomon.serve.divided import DividedStage, Leader
from gnomon.serve.division import divide
from gnomon.serve.engine import Engine
from gnomon.serve.load import load_share, look
from gnomon.serve.sampling import Sampling
from gnomon.serve.sizes import Ways
from gnomon.serving.foresight import Costs
from gnomon.software.engine import engine

PROMPTS = ([3 + (7 * i) % 90 for i in range(29)], [5, 9, 11], [3 + (5 * i) % 80 for i in range(12)])
COUNT = 14
RULES = replace(engine("gnomon"), max_batched_tokens=16, max_seqs=4)
OPEN: dict[str, Any] = {"dtype": "fp32", "kv_bytes": 1 << 26, "max_model_len": 64}


def asked(engines: Sequence[Engine]) -> list[list[int]]:
    """Greedy answers to all prompts, dealt to the lanes."""
    keys = []
    for number, prompt in enumerate(PROMPTS):
        lane = number % len(engines)
        [key] = engines[lane].add(prompt, Sampling(max_tokens=COUNT, temperature=0))
        keys.append((lane, key))
    made: dict[tuple[int, int], list[int]] = {}
    while any(one.has_work for one in engines):
        for lane, one in enumerate(engines):
            came = one.end() if one.is_under_way else []
            one.begin()
            for token in came:
                made.setdefault((lane, token.key), []).append(token.chosen.token)
            assert one.memory.problems() == []
    return [made[key] for key in keys]


class Line:
    """To all other ranks, as a pipe would be."""

    def send(self, turn: Any) -> None:
        """Said by the first."""
        dist.broadcast_object_list([turn], src=0)


def rank(
    store: Any, rank: int, world_size: int, folders: Sequence[str], ways: Ways, copies: Sequence[int] = (0,)
) -> list[tuple[list[list[int]], int]]:
    """(answers, experts fetched) of each folder's model on the first rank, with as many copies of experts as each of
    `copies` says, which are taken as if they cost nothing."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    groups = [dist.new_group(list(range(at * ways.tp, (at + 1) * ways.tp))) for at in range(ways.pp)]
    tp = Axis(group=groups[rank // ways.tp] if ways.tp > 1 else None, ranks=ways.tp, index=rank % ways.tp)
    out = []
    for folder, room in product(map(Path, folders), copies):
        found = look(folder, RULES, ways=ways, **OPEN)
        share = divide(found.graph_without_loss, ways, rank, tp)
        model = load_share(folder, found, share, expert_copies=room)
        if model.copies is not None:
            model.copies.costs = Costs(touch=0.0, fetch=0.0)
        if rank:
            stage, turn = DividedStage(model), [None]
            while True:
                dist.broadcast_object_list(turn, src=0)
                if turn[0] is None:
                    break
                stage.run(turn[0])
            continue
        lead = Leader(model, [Line()])  # type: ignore[list-item]
        made = asked([Engine(lead, RULES, max_model_len=64, lane=lane) for lane in range(ways.pp)])
        Line().send(None)
        out.append((made, 0 if model.copies is None else model.copies.fetched))
    dist.barrier()
    dist.destroy_process_group()
    return out
