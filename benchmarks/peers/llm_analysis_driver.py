"""llm-analysis's step times of jobs on standard input, JSON a line; run by `compare.py` in an environment of its own.

    python llm_analysis_driver.py EFFICIENCY < jobs.jsonl > answers.jsonl

The released package with its own device files, memory made endless. EFFICIENCY is the share of the peak FLOP/s that it
asks its user for; of the memory's bandwidth it is told 0.9. What it cannot say is answered with the reason.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
import time
from typing import Any

DEVICES = ("a100-sxm-80gb", "a100-sxm-40gb", "h100-sxm-80gb", "v100-sxm-16gb", "v100-sxm-32gb")


def main(efficiency: float) -> None:
    """Answers every job."""
    with contextlib.redirect_stdout(io.StringIO()):  # it greets
        from llm_analysis import analysis, config

    logging.disable(logging.CRITICAL)
    steps = analysis.ActivationRecomputation
    recompute = {"full": steps.FULL, "selective": steps.SELECTIVE, "none": steps.NONE}
    dtype = config.get_dtype_config_by_name("w16a16e16")
    for line in sys.stdin:
        job = json.loads(line)
        answer: dict[str, Any] = {"id": job["id"], "refused": ""}
        begin = time.perf_counter()
        if job["device"] not in DEVICES:
            answer["refused"] = f"no device file of {job['device']}"
        else:
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    answer["step_s"] = _step_s(job, analysis, config, dtype, recompute[job["recompute"]], efficiency)
            except (Exception, SystemExit) as error:  # it asserts and exits
                answer["refused"] = f"{type(error).__name__}: {str(error)[:80]}"
        answer["wall_s"] = time.perf_counter() - begin
        print(json.dumps(answer))


def _step_s(job: dict[str, Any], analysis: Any, config: Any, dtype: Any, recompute: Any, efficiency: float) -> float:
    device = config.get_gpu_config_by_name(job["device"])
    device.mem_per_GPU_in_GB = 10**6
    model = config.ModelConfig(
        name=job["id"],
        num_layers=job["layers"],
        n_head=job["heads"],
        num_key_value_heads=job["kv_heads"],
        hidden_dim=job["hidden"],
        vocab_size=job["vocab"],
        max_seq_len=job["seq_len"],
        ffn_embed_dim=job["ffn"],
        expansion_ratio=job["ffn"] / job["hidden"],
    )
    parallel = config.ParallelismConfig(
        tp_size=job["tp"],
        pp_size=job["pp"],
        dp_size=job["dp"],
        sp_size=job["tp"] if job["sequence_parallel"] else 1,
    )
    made = analysis.LLMAnalysis(model, device, dtype, parallel, flops_efficiency=efficiency, hbm_memory_efficiency=0.9)
    result = made.training(
        batch_size_per_gpu=job["micro_batch"],
        global_batch_size=job["global_batch"],
        seq_len=job["seq_len"],
        total_num_tokens=10**6,
        activation_recomputation=recompute,
        ds_zero=analysis.DSZeRO(job["zero"]),
        flash_attn=job["flash"],
        mlp_gated_linear_units=job["gated"],
    )
    return float(result["latency_per_iter"])


if __name__ == "__main__":
    main(float(sys.argv[1]))
