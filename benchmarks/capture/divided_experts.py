"""Which of transformers' mixtures of experts train with divided experts: ep = 2 on two processes beside a plain loop.

`python benchmarks/capture/divided_experts.py --out rows.jsonl [--types mixtral,olmoe]` takes
every type of `AutoModel` whose code speaks of experts, builds it small with experts in all layers, gives it a head and
a loss (`trained.Headed`), captures it and takes two steps in float64 under dp_shard = 2 with ep = 2, whose ranks have
other tokens each. It writes a line a type, goes on where it was stopped, and prints a table. A type counts where it is
built and captured and its graph has stacked experts, or a module's name says that it has experts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.capture import trained, transformers_types
from gnomon.frontend.capture import captured
from gnomon.graph import Graph, with_dispatch
from gnomon.plans import Mesh
from gnomon.plans.experts import whole_experts

PLAN = replace(trained.BASE, mesh=Mesh(dp_shard=2, ep=2))
SPARSE = {
    "first_k_dense_replace": 0, "num_dense_layers": 0, "enable_moe_block": True, "n_group": 1, "num_expert_group": 1,
    "topk_group": 1, "encoder_sparse_step": 1, "decoder_sparse_step": 1, "num_experts_per_token": 2, "moe_topk": 2,
    "num_experts": 4, "expert_layer_period": 1, "expert_layer_offset": 0, "num_experts_per_tok": 2,
}  # fmt: skip
"""Fields with which a config has experts in every layer, of those that it has."""


def kinds() -> list[str]:
    """Types whose code speaks of experts."""
    import transformers
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    models, found = Path(transformers.__file__).parent / "models", []
    for kind in MODEL_MAPPING_NAMES:
        files = (models / model_type_to_module_name(kind)).glob("modeling_*.py")
        if any(re.search("[Ee]xperts", file.read_text(encoding="utf-8")) for file in files):
            found.append(kind)
    return found


def sparse(config: Any) -> None:
    """Experts in every layer, where the config can have them."""
    held = vars(config)
    for key, value in SPARSE.items():
        if key in held and (held[key] is not None or key.startswith("num_experts")):
            setattr(config, key, value)
    if isinstance(held.get("mlp_layer_types"), (list, tuple)):
        config.mlp_layer_types = ["sparse"] * len(held["layer_types"] if held.get("layer_types") else (0, 0))
    for inner in list(held.values()):
        if hasattr(inner, "to_dict") and hasattr(inner, "model_type"):
            sparse(inner)


def built(kind: str) -> Any:
    """The module, small."""
    from transformers import AutoConfig, AutoModel

    errors = []
    for wanted in (True, False):
        torch.manual_seed(0)
        config = transformers_types.shrunk(AutoConfig.for_model(kind), transformers_types.SMALL)
        if wanted:
            sparse(config)
        for again in (False, True):
            try:
                if not again or transformers_types.filled(config):
                    return AutoModel.from_config(config, dtype=torch.float32)
            except Exception as error:
                errors.append(error)
    raise errors[0]


def headed(kind: str) -> tuple[trained.Headed, dict[str, Tensor]]:
    """The module with a loss, in float64, and an example that it takes."""
    model, errors = built(kind), []
    for given in transformers_types.inputs(model):
        try:
            whole = trained.Headed(model, given).eval()
            rows = len(next(iter(given.values())))
            example = {**given, "answers": torch.randint(0, trained.CLASSES, (rows,))}
            whole = trained.in_float64(whole)
            example = {name: x.double() if x.is_floating_point() else x for name, x in example.items()}
            with torch.no_grad():
                whole(**example)
            return whole, example
        except Exception as error:
            errors.append(error)
            model = built(kind)
    raise errors[0] if errors else ValueError("no example of its inputs is made here")


def other_rows(example: dict[str, Tensor]) -> dict[str, Tensor]:
    """Twice the rows, whose second half has the tokens of the first in reverse."""
    wide = trained.wider(example, 2)
    if (ids := wide.get("input_ids")) is not None:
        half = len(ids) // 2
        ids[half:] = ids[half:].flip(-1)
    return wide


def row(kind: str) -> dict[str, Any]:
    """What became of one type."""
    try:
        model, example = headed(kind)
        found = captured(model, example, training=False)
    except Exception as error:
        return {"type": kind, "captured": False, "why": trained._said(error)}
    graph = found.graph
    told = {"type": kind, "captured": True, "experts": has_experts(graph)}
    if not told["experts"]:
        return told
    if with_dispatch(graph) is graph:
        return told | {"why": whole_experts(graph)}
    try:
        batch = other_rows(example)
        losses, got = trained.plain_losses(model, batch), trained._on_two(model, found, PLAN, batch)
    except Exception as error:
        return told | {"why": trained._said(error)}
    if isinstance(got, str):
        return told | {"why": got}
    return told | {"off": max(abs(a / b - 1) for a, b in zip(got, losses, strict=True))}


def has_experts(graph: Graph) -> bool:
    """Whether weights of the graph are experts'."""
    named = any("experts." in f"{name}." for name in graph.parameters() if "shared_expert" not in name)
    return named or with_dispatch(graph) is not graph


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The page."""
    mixtures = [r for r in rows if r.get("experts")]
    ran = [r for r in mixtures if "off" in r]
    right = [r for r in ran if r["off"] <= trained.TOLERANCE]
    yield f"- types whose code speaks of experts: {len(rows)}; captured: {sum(r['captured'] for r in rows)}"
    yield f"- of them with experts that are trained at this size: {len(mixtures)}"
    worst = f"; worst {max(r['off'] for r in ran):.1e}" if ran else ""
    yield f"- two steps under ep = 2 have the losses of a plain loop to 1e-9: {len(right)} of {len(mixtures)}{worst}"
    yield from ("", "| type | losses off, relative | why not |", "|---|---|---|")
    for r in sorted(rows, key=lambda r: r["type"]):
        off = f"{r['off']:.1e}" if "off" in r else "-"
        why = r.get("why", "") if r["captured"] else f"not captured: {r['why']}"
        why = why or ("" if r.get("experts") else "no experts that are trained")
        yield f"| {r['type']} | {off} | {why.replace('|', '/')[:240]} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--types", default="")
    given = parser.parse_args()
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    lines = given.out.read_text(encoding="utf-8").splitlines() if given.out.exists() else []
    rows = [json.loads(line) for line in lines]
    done = {r["type"] for r in rows}
    for kind in given.types.split(",") if given.types else kinds():
        if kind in done:
            continue
        rows.append(row(kind))
        with given.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
