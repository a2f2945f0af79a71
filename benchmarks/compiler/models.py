"""Small models of transformers' types through backend "gnomon", forward and backward, against eager.

    python benchmarks/compiler/models.py [--types bert,gpt2,llama] [--dynamic]

Prints a row a type: groups made and kept, kernels that differed, the largest difference of outputs and of
gradients (relative to the largest element), CPU seconds of the first step. Models are those of
benchmarks/capture, with dropout off.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.capture.transformers_types import SMALL, build, inputs  # noqa: E402
from gnomon.compiler import backend  # noqa: E402

TYPES = (
    "bert,gpt2,llama,vit,t5,distilbert,roberta,mistral,qwen2,qwen3,gemma,opt,gpt_neox,bloom,electra,albert,mpnet,deberta-v2,"
    "phi,gptj,codegen,bart,mbart,pegasus,xlnet,ernie,nystromformer,fnet,convbert,squeezebert,falcon,stablelm,olmo,cohere,"
    "starcoder2,granite,clip_vision_model,deit,beit,dinov2,swin,convnext,resnet,regnet,mobilenet_v2,whisper,wav2vec2"
)


def tensors(out: Any) -> list[torch.Tensor]:
    values = out.values() if hasattr(out, "values") else out if isinstance(out, (list, tuple)) else [out]
    return [v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()]


def step(model: torch.nn.Module, call: Any, example: dict[str, torch.Tensor]) -> tuple[list[Any], list[Any]]:
    model.zero_grad()
    outs = tensors(call(**example))
    loss = sum((o * torch.arange(o.numel()).reshape(o.shape).sin()).mean() for o in outs if o.requires_grad)
    loss.backward()
    return [o.detach() for o in outs], [p.grad for p in model.parameters() if p.grad is not None]


def apart(ours: list[Any], theirs: list[Any]) -> float:
    top = max((float(t.abs().max()) for t in theirs if t.numel()), default=1.0) or 1.0
    return max((float((a - b).abs().max()) / top for a, b in zip(ours, theirs, strict=True) if b.numel()), default=0.0)


def row(kind: str, dynamic: bool | None) -> str:
    model = build(kind, SMALL, False).eval()
    for example in inputs(model):
        try:
            theirs = step(model, model, example)
        except Exception:
            continue
        torch._dynamo.reset()
        backend.reports.clear()
        fast = torch.compile(model, backend=backend.gnomon, dynamic=dynamic)
        start = time.process_time()
        step(model, fast, example)
        spent = time.process_time() - start
        ours = step(model, fast, example)
        trials = [trial for graph in backend.reports for trial in graph.trials.values()]
        kept = sum(bool(trial.kept) for trial in trials)
        wrong = sum(bool(trial.verdict.get("wrong")) for trial in trials)
        out, grad = apart(ours[0], theirs[0]), apart(ours[1], theirs[1])
        return f"| {kind} | {len(trials)} | {kept} | {wrong} | {out:.1e} | {grad:.1e} | {spent:.1f} |"
    return f"| {kind} | does not run in eager with small sizes | | | | | |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default=TYPES)
    parser.add_argument("--dynamic", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| type | groups | kept | wrong | outputs apart | gradients apart | first step, CPU s |")
    print("|---" * 7 + "|")
    for kind in options.types.split(","):
        try:
            print(row(kind, True if options.dynamic else None), flush=True)
        except Exception as error:
            print(f"| {kind} | {type(error).__name__}: {str(error).splitlines()[0][:90]} | | | | | |", flush=True)


if __name__ == "__main__":
    main()
