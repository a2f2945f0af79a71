"""Calculon's step times of jobs on standard input, JSON a line; run by `compare.py` in an environment of its own.

    python calculon_driver.py CHECKOUT < jobs.jsonl > answers.jsonl

Only Calculon's public classes are used, with its own system files. Of these two things are changed, for every job
alike: memory is made endless (these jobs ran, whatever Calculon thinks of their memory), and the network between nodes
gets the bandwidth of the job's machines. What Calculon cannot say is answered with the reason.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
import time
from typing import Any

SYSTEMS = {"a100-sxm-80gb": "a100_80g", "a100-sxm-40gb": "a100_80g", "h100-sxm-80gb": "h100_80g_nvl8"}
RECOMPUTE = {"full": "full", "selective": "attn_only", "none": "none"}


def refusal(job: dict[str, Any]) -> str:
    """Why Calculon has no words for a job, or nothing."""
    if job["device"] not in SYSTEMS:
        return f"no system file of {job['device']}"
    if job["zero"] > 1:
        return "ZeRO 2 and 3 (it shards the optimizer only)"
    if job["kv_heads"] not in (1, job["heads"]):
        return "grouped-query attention"
    return ""


def execution(job: dict[str, Any]) -> dict[str, Any]:
    """Its fields of an execution: communication exposed, activations not fused, as in its own validation files."""
    tp, dp, node = job["tp"], job["dp"], job["devices_per_node"]
    parallel = job["sequence_parallel"] and tp > 1
    return {
        "num_procs": job["devices"],
        "tensor_par": tp,
        "pipeline_par": job["pp"],
        "data_par": dp,
        "tensor_par_net": int(tp > node),
        "pipeline_par_net": int(job["devices"] > node),
        "data_par_net": int(tp * dp > node),
        "batch_size": job["global_batch"],
        "microbatch_size": job["micro_batch"],
        "datatype": "float16",
        "fused_activation": False,
        "attention_type": "multihead" if job["kv_heads"] == job["heads"] else "multiquery",
        "activation_recompute": RECOMPUTE[job["recompute"]],
        "pipeline_interleaving": job["vpp"],
        "optimizer_sharding": job["zero"] == 1 and dp > 1,
        "tensor_par_comm_type": "rs_ag" if parallel else "ar",
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": bool(parallel and job["recompute"] != "full"),
        "data_par_overlap": False,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }


def main(root: str) -> None:
    """Answers every job."""
    sys.path.insert(0, root)
    from calculon import System, io
    from calculon.llm import Llm

    files = {name: io.read_json_file(f"{root}/systems/{name}.json") for name in set(SYSTEMS.values())}
    log = logging.getLogger("calculon")
    for line in sys.stdin:
        job = json.loads(line)
        answer: dict[str, Any] = {"id": job["id"], "refused": refusal(job)}
        if not answer["refused"]:
            system = copy.deepcopy(files[SYSTEMS[job["device"]]])
            system["mem1"]["GiB"] = 10**6
            system["networks"][0]["must_be_filled"] = False
            system["networks"][1]["bandwidth"] = job["inter_bytes_per_s"] / 1e9
            # Its feed-forward has two products; a gated one has three of the same size.
            feedforward = job["ffn"] * 3 // 2 if job["gated"] else job["ffn"]
            sizes = {"hidden": job["hidden"], "feedforward": feedforward, "seq_size": job["seq_len"]}
            sizes |= {"attn_heads": job["heads"], "attn_size": job["head_dim"], "num_blocks": job["layers"]}
            begin = time.perf_counter()
            try:
                model = Llm(Llm.Application(sizes), log)
                machines = System(system)
                model.compile(machines, Llm.Execution.from_json(execution(job)))
                model.run(machines)
                answer["step_s"] = model.get_stats_json(False)["total_time"]
            except (Llm.Error, AssertionError, ZeroDivisionError) as error:
                answer["refused"] = f"{type(error).__name__}: {str(error)[:80]}"
            answer["wall_s"] = time.perf_counter() - begin
        print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1])
