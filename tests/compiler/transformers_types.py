"""Tiny models of transformers, forward and backward, through `torch.compile(backend="gnomon")` against eager.

`python tests/compiler/transformers_types.py [--types llama,bert] [-o FILE]` prints a line a model type: kernels that
were made, those that the backend's check called wrong, the largest difference of the logits over their largest, and of
any parameter's gradient over its own largest or a thousandth of the largest of all. Float32, with random weights, by
`runtime/hf_models.py`. Kernels are used however slow they are. Left out: random numbers (dropout), tested elsewhere.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from compiler import opinfo
from runtime import hf_models

from gnomon.compiler import backend

LOGITS, GRADIENTS = 2e-4, 2e-3
"""Differences that are rounding in float32: sums are in another order than eager's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="", help="default all")
    parser.add_argument("-o", "--output", type=Path, help="file for the table")
    options = parser.parse_args()
    opinfo.untimed()
    lines, wrong = list[str](), 0
    for kind in options.types.split(",") if options.types else hf_models.CONFIGS:
        if not hf_models.CONFIGS[kind]:
            continue
        began = time.time()
        try:
            result = compared(kind)
        except Exception as error:
            result, wrong = f"{type(error).__name__}: {str(error)[:80]} | | | |", wrong + 1
        else:
            wrong += result.endswith("differs |")
        lines.append(f"| {kind} | {result}")
        print(lines[-1], f"{time.time() - began:.0f} s", flush=True)
    head = ["| model type | kernels | called wrong | logits | gradients | |", "|---|---:|---:|---:|---:|---|"]
    if options.output:
        options.output.write_text("\n".join((*head, *lines)) + "\n")
    print(f"{len(lines)} model types, {wrong} that differ")
    sys.exit(wrong > 0)


def compared(kind: str) -> str:
    """The cells of one model type."""
    with hf_models.quiet(), hf_models.Wide():
        model = hf_models.build(kind)
    model = model.float().eval()
    torch.set_default_dtype(torch.float32)
    given = inputs(model)
    wanted, grads = passed(model, model, given)
    torch._dynamo.reset()
    backend.reports.clear()  # it keeps the newest only
    made = torch.compile(model, backend=backend.gnomon)
    for _ in range(2):  # the first call tries the kernels, the second uses them
        logits, found = passed(made, model, given)
    reports = backend.reports
    kernels = sum(len(report.program.groups) for report in reports)
    bad = sum(bool(trial.verdict.get("wrong")) for report in reports for trial in report.trials.values())
    off = float((logits - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
    least = 1e-3 * max(float(b.abs().max()) for b in grads if b.numel())  # a key's bias has none but rounding
    apart = [
        float((a - b).abs().max() / b.abs().max().clamp_min(least))
        for a, b in zip(found, grads, strict=True)
        if b.numel()
    ]
    differs = " differs" if off > LOGITS or max(apart) > GRADIENTS else ""
    return f"{kernels} | {bad} | {off:.1e} | {max(apart):.1e} |{differs} |"


def passed(function: Any, model: Any, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(logits, gradients of their mean square)."""
    model.zero_grad()
    out = function(**given)
    logits = out.logits if hasattr(out, "logits") else out[0]
    logits.square().mean().backward()
    return logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def inputs(model: Any) -> dict[str, torch.Tensor]:
    """Random inputs of a model by its config."""
    generator = torch.Generator().manual_seed(1)
    config = model.config
    if model.main_input_name == "pixel_values":
        size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
        return {"pixel_values": torch.randn(2, getattr(config, "num_channels", 3), size, size, generator=generator)}
    ids = torch.randint(3, config.get_text_config().vocab_size, (2, hf_models.TOKENS), generator=generator)
    if config.is_encoder_decoder:
        return {"input_ids": ids, "decoder_input_ids": ids[:, :-5]}
    return {"input_ids": ids}


if __name__ == "__main__":
    main()
