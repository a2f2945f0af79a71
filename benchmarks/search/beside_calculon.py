"""Gnomon's search beside Calculon's, of one job on one machine in one run: 175B on 512 A100.

    python benchmarks/search/beside_calculon.py CHECKOUT [SAMPLE]      # default 2000

CHECKOUT: of github.com/calculon-ai/calculon; it needs pandas and psutil in the environment.

Calculon prices every execution of its space (`calculon llm-optimal-execution`), so a random sample of them is timed and
the time of all is extrapolated. Its model and system files are its own (gpt3-175B, a100_80g, float16); the batch is
512 sequences for both. Seconds are those of one core. The optima are of two models of the same machine, so they are
shown beside each other and not compared.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from speed import JOBS, run  # noqa: E402

JOB = "175b on 512"
DEVICES, BATCH, SEED = 512, 512, 0


def executions(llm: Any, app: Any, networks: int, offload: bool) -> Iterator[dict[str, Any]]:
    """Every execution that its optimal-execution command tries with its defaults."""
    for tp in llm.get_all_tensor_parallelisms(DEVICES, app.hidden, app.attn_heads):
        for pp in llm.get_all_pipeline_parallelisms(DEVICES, tp, app.num_blocks):
            dp = llm.get_data_parallelism(DEVICES, tp, pp)
            if dp > BATCH:
                continue
            nets = [range(networks) if ways > 1 else (0,) for ways in (tp, pp, dp)]
            away = (True, False) if offload else (False,)
            fields = itertools.product(
                llm.get_valid_pipeline_interleavings(app.num_blocks, pp),
                ("full", "attn_only", "none"),
                (True, False) if dp > 1 else (False,),
                ("ar", "p2p_rs_ag", "rs_ag"),
                (True, False) if dp > 1 else (False,),
                ("none", "ring", "pipe") if tp > 1 else ("none",),
                away,
                away,
                list(llm.get_valid_microbatch_sizes(app.seq_size, tp, dp, BATCH - BATCH % dp, pp)),
                *nets,
            )
            for virtual, again, sharded, kind, dp_over, tp_over, weights, optimizer, micro, tn, pn, dn in fields:
                for redo in (True, False) if llm.can_redo_ag(kind, again) else (False,):
                    for activations in away if again != "full" else (False,):
                        yield {
                            "num_procs": DEVICES, "tensor_par": tp, "pipeline_par": pp, "data_par": dp,
                            "tensor_par_net": tn, "pipeline_par_net": pn, "data_par_net": dn,
                            "batch_size": BATCH - BATCH % dp, "microbatch_size": micro, "datatype": "float16",
                            "fused_activation": True, "attention_type": "multihead", "activation_recompute": again,
                            "pipeline_interleaving": virtual, "optimizer_sharding": sharded,
                            "tensor_par_comm_type": kind, "tensor_par_overlap": tp_over, "seq_par_ag_redo": redo,
                            "data_par_overlap": dp_over, "weight_offload": weights, "activations_offload": activations,
                            "optimizer_offload": optimizer, "training": True,
                        }  # fmt: skip


def main(root: str, sample: int) -> None:
    """Prints the table."""
    sys.path.insert(0, root)
    from calculon import System, io
    from calculon.llm import Llm

    log = logging.Logger("calculon")
    app = Llm.Application(io.read_json_file(f"{root}/models/gpt3-175B.json"))
    machines = System(io.read_json_file(f"{root}/systems/a100_80g.json"))
    every = list(executions(Llm, app, machines.num_networks, machines.mem2.capacity > 0))
    chosen = random.Random(SEED).sample(every, min(sample, len(every)))
    best: tuple[float, dict[str, Any]] | None = None
    start, good = time.process_time(), 0
    for given in chosen:
        try:
            model = Llm(app, log)
            model.compile(machines, Llm.Execution.from_json(given))
            model.run(machines)
            step_s = model.get_stats_json(False)["total_time"]
        except Llm.Error:
            continue
        good += 1
        if best is None or step_s < best[0]:
            best = step_s, given
    spent = time.process_time() - start
    commit = subprocess.run(["git", "-C", root, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    print(f"{time.strftime('%Y-%m-%d')}, Calculon {commit.stdout.strip()}")
    with TemporaryDirectory() as folder:
        run(JOBS[JOB], folder)  # compiles
        ours = run(JOBS[JOB], folder)
    print("| | points | core s | best step s | best plan |\n|---|---|---|---|---|")
    print(f"| gnomon | {ours['points']:,} | {ours['core_s']:.1f} | {ours['step_s']:.3f} | {ours['plan']} |")
    print(
        f"| Calculon, sample | {len(chosen):,} ({good:,} run) | {spent:.1f} | {best[0] if best else 0:.3f} | "
        f"{json.dumps(shown(best[1])) if best else 'none'} |"
    )
    whole = spent * len(every) / len(chosen)
    print(f"| Calculon, all, extrapolated | {len(every):,} | {whole:,.0f} | | |")


def shown(given: dict[str, Any]) -> dict[str, Any]:
    """What is not at its default."""
    return {name: value for name, value in given.items() if value not in (False, "none", "float16", "multihead")}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 2000)
