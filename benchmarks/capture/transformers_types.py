"""How many of transformers' model types `gnomon.capture` takes: built tiny, captured, proved, priced, FLOPs compared.

`python benchmarks/capture/transformers_types.py --out results.jsonl [--types llama,bert]` writes a line a type, goes on
where it was stopped, and prints the table. Every type of `AutoModel` is built from its own config with small sizes and
random values (a type whose small config does not build is built with two layers on the meta device), each in a process
of its own, forked from one that has everything imported, with a limit of CPU seconds and of address space; what it
told before a limit is kept. Types are tried in a random order of a fixed seed, so that a run which is stopped early is
a sample. A type counts as captured only if a Graph came out; where none did, the module itself is tried on the same
inputs. `plans` are those under which the Graph is then priced, `planned` the fastest that `gnomon.plan` finds for 8
H100s in a few CPU seconds; `proof` is outputs and gradients within 1e-9 in float64; small models are then trained here
(`trained`). Predicted seconds are those of `gnomon calibrate`. Leaves out heads: `AutoModel` is the body.
"""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import math
import os
import random
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "depth",
          "num_decoder_layers", "num_encoder_layers", "e_layers", "d_layers")  # fmt: skip
SEARCH_S = 2.0
"""CPU seconds that the search for a plan may take."""
WAITS = 20
"""Wall seconds that a type may take for each CPU second: the machine may be busy."""
SMALL = {
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "embed_dim": 64, "dim": 64, "encoder_embed_dim": 64,
    "intermediate_size": 96, "d_ff": 96, "ffn_dim": 96, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "n_inner": 96,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_attention_heads": 4, "n_head": 4,
    "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "d_kv": 16, "vocab_size": 512, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "projection_dim": 32, "image_size": 64,
    "context_length": 256, "projection_intermediate_size": 96, "linear_num_heads": 4,
}  # fmt: skip
"""Sizes of a small model, for the fields that a config has."""


def shrunk(config: Any, sizes: Mapping[str, int]) -> Any:
    """The config with few layers, and the given sizes wherever it has such a field, in its parts too."""
    held = vars(config)
    for key in LAYERS:
        if isinstance(held.get(key), int) and not isinstance(held[key], bool):
            _set(config, key, min(held[key], 2))
    latent = "qk_nope_head_dim" in held  # whose key heads are its heads, and whose head has two parts
    for key, size in sizes.items():
        if latent and key in ("num_key_value_heads", "head_dim"):
            continue
        if isinstance(held.get(key), int) and not isinstance(held[key], bool):
            _set(config, key, min(held[key], size))
    if latent and sizes:
        _set(config, "num_key_value_heads", held.get("num_attention_heads"))
        if "head_dim" in held:
            _set(config, "head_dim", held.get("qk_rope_head_dim"))
    for value in held.values():
        if sizes and isinstance(value, dict) and sum(value.get("mrope_section") or ()) != 0:
            half = int((held.get("head_dim") or held["hidden_size"] // held["num_attention_heads"]) / 2)
            half = int(half * value.get("partial_rotary_factor", 1.0))
            value["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
        elif sizes and isinstance(value, dict) and "rope_theta" in value and "glm" in config.model_type:
            value["mrope_section"] = [4, 2, 2]  # whose default is for heads of 128
    types = held.get("layer_types", ())
    if isinstance(types, (list, tuple)) and types:  # two layers, of two kinds if there are
        other = next((kind for kind in types if kind != types[0]), types[0])
        _set(config, "layer_types", [types[0], types[1] if len(set(types)) == 1 else other][: len(types)])
    if "upsample_groups" in held and sizes:
        _set(config, "upsample_groups", held["hidden_size"])
    if "vocab_size" in sizes:
        for key, value in list(held.items()):
            if key.endswith(("token_id", "token_index")) and isinstance(value, int) and value >= sizes["vocab_size"]:
                _set(config, key, sizes["vocab_size"] - 1 - len(key) % 7)
    for value in list(held.values()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            shrunk(value, sizes)
    return config


def filled(config: Any) -> bool:
    """Gives fields that are None, without which some configs do not build, a small value. Whether there were any."""
    held = vars(config)
    width = (held.get("hidden_size") or 64) // (held.get("num_attention_heads") or 4)
    values = {
        "head_dim": width, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts": 4, "num_experts_per_tok": 2,
        "top_k_experts": 2, "moe_intermediate_size": 32, "layer_types": ["full_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse"],
    }  # fmt: skip
    missing = [key for key in values if key in held and held[key] is None]
    for key in missing:
        _set(config, key, values[key])
    parts = [
        filled(value) for value in list(held.values()) if hasattr(value, "to_dict") and hasattr(value, "model_type")
    ]
    return bool(missing) or any(parts)


def _set(config: Any, key: str, value: Any) -> None:
    try:
        setattr(config, key, value)
    except Exception:
        pass


def inputs(model: Any) -> Iterator[dict[str, Any]]:
    """Examples that such a model may take, the likeliest first."""
    import torch

    config = model.config
    names = list(inspect.signature(model.forward).parameters)
    ids = torch.randint(5, 100, (2, 16))
    find = partial(_find, config)
    side = find("image_size", 224)
    tall, wide = (side, side) if isinstance(side, int) else (side[0], side[-1]) if side else (224, 224)
    channels = find("num_channels", 0) or find("in_channels", 3) or 3
    pixels = torch.randn(2, channels, tall, wide)
    if "grid_thw" in names or "image_grid_thw" in names and "input_ids" not in names:
        patch, times = find("patch_size", 14), find("temporal_patch_size", 1) or 1
        patches = torch.randn(16, channels * times * patch * patch)
        grid = "grid_thw" if "grid_thw" in names else "image_grid_thw"
        yield {"hidden_states" if "hidden_states" in names else "pixel_values": patches,
               grid: torch.tensor([[1, 4, 4]])}  # fmt: skip
    if "returns_to_go" in names:
        sides = {"states": find("state_dim", 17), "actions": find("act_dim", 4), "rewards": 1, "returns_to_go": 1}
        steps = torch.arange(8).repeat(2, 1)
        yield {**{name: torch.randn(2, 8, size) for name, size in sides.items()}, "timesteps": steps,
               "attention_mask": torch.ones(2, 8, dtype=torch.long)}  # fmt: skip
    if "past_values_padding" in names:
        length = int(find("context_length", 512))
        yield {"past_values": torch.randn(2, length), "past_values_padding": torch.zeros(2, length, dtype=torch.long),
               "freq": torch.zeros(2, 1, dtype=torch.long)}  # fmt: skip
    text = {"input_ids": ids}
    decoder = {"decoder_input_ids": ids.clone()} if "decoder_input_ids" in names else {}
    if "bbox" in names:
        yield {**text, "bbox": torch.zeros(2, 16, 4), **decoder}
        yield {**text, "bbox": torch.zeros(2, 16, 4, dtype=torch.long), **decoder}
    if "qformer_input_ids" in names:
        yield {**text, "qformer_input_ids": ids.clone(), "pixel_values": pixels, **decoder}
    if "input_ids" in names:
        yield {**text, **decoder}
        if "pixel_values" in names:
            yield {**text, "pixel_values": pixels, **decoder}
            yield {**text, "pixel_values": pixels[:, None].repeat(1, int(find("num_frames", 4) or 4), 1, 1, 1)}
    if "pixel_values" in names:
        yield {"pixel_values": pixels}
    if "input_features" in names:
        mel = find("num_mel_bins", 80) or 80
        length = 2 * int(find("max_source_positions", 64) or 64)
        yield {"input_features": torch.randn(2, mel, length), **decoder}
        yield {"input_features": torch.randn(2, 64, mel), **decoder}
        yield {"input_features": torch.randn(2, 64, 2 * mel), **decoder}
        for key in ("input_dim", "feature_projection_input_dim", "input_feat_per_channel"):
            if find(key, 0):
                yield {"input_features": torch.randn(2, 64, int(find(key, 0))), **decoder}
    if "input_values" in names:
        yield {"input_values": torch.randn(2, 4000)}
        yield {"input_values": torch.randn(2, 1, 4000)}
        yield {"input_values": torch.randn(2, int(find("max_length", 1024) or 1024), find("num_mel_bins", 128) or 128)}
    if "past_values" in names:
        length = int(find("context_length", 0) or 0)
        lags = max(find("lags_sequence", [0]) or [0])
        channels = int(find("num_input_channels", 1) or 1)
        yield {"past_values": torch.randn(2, length, channels)}
        yield {
            "past_values": torch.randn(2, length + lags), "past_time_features": torch.randn(2, length + lags, 1),
            "past_observed_mask": torch.ones(2, length + lags),
        }  # fmt: skip
    if "pixel_values_videos" in names or "pixel_values" in names:
        video = torch.randn(2, int(find("num_frames", 4) or 4), channels, tall, wide)
        yield {"pixel_values_videos" if "pixel_values_videos" in names else "pixel_values": video}
    if "inputs" in names:
        yield {"inputs": torch.randn(2, 16, int(find("d_model", 64)))}
    if "inputs_embeds" in names:
        yield {"inputs_embeds": torch.randn(2, 16, int(find("hidden_size", 64) or 64))}
    yield from rare(names, find, ids, pixels)


def rare(names: list[str], find: Any, ids: Any, pixels: Any) -> Iterator[dict[str, Any]]:
    """Examples that few models take. find: a field of the config, or else the given value."""
    import torch

    channels = pixels.shape[1]
    if "spatial_shapes" in names and "pixel_attention_mask" in names:  # patches of images, padded to one length
        patches = torch.randn(2, 16, channels * find("patch_size", 16) ** 2)
        yield {**({"input_ids": ids} if "input_ids" in names else {}), "pixel_values": patches,
               "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
               "spatial_shapes": torch.tensor([[4, 4], [4, 4]])}  # fmt: skip
    if "spatial_shapes" in names and "attention_mask" in names and "pixel_values" in names:
        patches = torch.randn(2, 16, channels * find("patch_size", 16) ** 2)
        yield {"pixel_values": patches, "attention_mask": torch.ones(2, 16, dtype=torch.long),
               "spatial_shapes": torch.tensor([[4, 4], [4, 4]])}  # fmt: skip
    if "task_inputs" in names:
        yield {"pixel_values": pixels, "task_inputs": torch.randint(5, 100, (2, int(find("task_seq_len", 77))))}
    if "prompt_pixel_values" in names:
        tall_wide = find("image_size", [896, 448])
        tall, wide = (tall_wide, tall_wide) if isinstance(tall_wide, int) else tall_wide
        one = torch.randn(2, channels, tall // 2, wide)
        yield {"pixel_values": one, "prompt_pixel_values": one.clone(), "prompt_masks": one.clone()}
    if names[:1] == ["pixel_values"]:  # pairs of images whose points are matched
        yield {"pixel_values": pixels[None].clone()}
    if "input_values" in names and "decoder_input_ids" in names:
        yield {"input_values": torch.randn(2, 4000), "decoder_input_ids": ids.clone()}
    if "decoder_input_values" in names:
        rows = torch.randn(2, 16, int(find("hidden_size", 64)))
        yield {"input_values": rows, "decoder_input_values": rows.clone()}
    if "input_features_mask" in names or "feature_attention_mask" in names:
        mask = "input_features_mask" if "input_features_mask" in names else "feature_attention_mask"
        mel, length = find("num_mel_bins", 80) or 80, 2 * int(find("max_source_positions", 64) or 64)
        yield {"input_features": torch.randn(2, mel, length), mask: torch.ones(2, length, dtype=torch.long)}
        yield {"input_features": torch.randn(2, 64, mel), mask: torch.ones(2, 64, dtype=torch.long)}
    if "input_features" in names and "attention_mask" in names and "input_ids" not in names:
        for size in (find("input_size", 0), find("num_mel_bins", 80)):
            if size:
                yield {"input_features": torch.randn(2, 64, int(size)),
                       "attention_mask": torch.ones(2, 64, dtype=torch.long)}  # fmt: skip
    if "input_features" in names and "is_longer" in names:
        side = find("spec_size", 256)
        yield {"input_ids": ids, "input_features": torch.randn(2, 1, side * 4, find("num_mel_bins", 64))}
    if "input_ids" in names and "input_values" in names:
        yield {"input_ids": ids, "input_values": torch.randn(2, 1, 4000)}
    if "input_features" in names and "input_values" in names:
        yield {"input_features": torch.randn(2, 64, 160), "input_values": torch.randn(2, 1, 64 * 320)}


def _find(config: Any, key: str, default: Any) -> Any:
    for place in (config, *(getattr(config, n, None) for n in ("vision_config", "audio_config", "text_config"))):
        value = getattr(place, key, None) if place is not None else None
        if value is not None:
            return value
    return default


def build(kind: str, sizes: Mapping[str, int], meta: bool, dtype: Any = None) -> Any:
    import torch
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    config = shrunk(AutoConfig.for_model(kind), sizes)
    with torch.device("meta" if meta else "cpu"):
        try:
            return AutoModel.from_config(config, dtype=dtype or torch.float32)
        except Exception:
            if not filled(config):
                raise
            return AutoModel.from_config(config, dtype=dtype or torch.float32)


Told = Callable[[dict[str, Any]], None]
"""Takes the row as far as it is."""


def one(kind: str, prove_too: bool, told: Told) -> dict[str, Any]:
    """What became of one type."""
    import torch

    torch.set_num_threads(1)
    errors, built, ran = list[str](), False, False
    # On the meta device torch has grouped matmuls in bfloat16 only.
    tries = (
        ("small", SMALL, torch.float32),
        ("two layers", {}, torch.float32),
        ("two layers, bf16", {}, torch.bfloat16),
    )
    for how, sizes, dtype in tries:
        try:
            model = build(kind, sizes, True, dtype)
            if how == "small":
                if sum(p.numel() for p in model.parameters()) > 60_000_000:
                    raise MemoryError("its small config is large")
                model = build(kind, sizes, False)
        except Exception as error:
            errors.append(f"{how}: build: {_said(error)}")
            continue
        built = True
        for given in inputs(model):
            example = {name: x.to(dtype) if x.is_floating_point() else x for name, x in given.items()}
            try:
                return caught(kind, how, model, example, prove_too and how == "small", told)
            except Exception as error:
                errors.append(f"{how}: {', '.join(example)}: {_said(error)}")
                eager = _eager(model, example)
                ran |= not eager
                if eager:
                    errors[-1] += f"; in eager: {eager}"
    why = errors or ["no example of its inputs is made here"]
    return {"type": kind, "captured": False, "built": built, "ran": ran, "errors": why}


def _eager(model: Any, example: Mapping[str, Any]) -> str:
    """Why the module itself does not take an example; nothing where it does."""
    import torch

    device = next(iter(model.parameters())).device
    try:
        with torch.no_grad():
            model(**{name: x.to(device) for name, x in example.items()})
    except Exception as error:
        return _said(error)
    return ""


def caught(kind: str, how: str, model: Any, example: Any, prove_too: bool, told: Told) -> dict[str, Any]:
    """The row of a type that is captured; an exception where it is not."""
    from gnomon.frontend.capture import captured
    from gnomon.frontend.opaque import shares

    begin = time.process_time()
    result = captured(model, example, name=kind)
    spent, graph = time.process_time() - begin, result.graph
    moved, used = shares(graph, {}), set(graph.parameters())
    row: dict[str, Any] = {
        "type": kind,
        "captured": True,
        "cpu_s": round(spent, 2),
        "how": how,
        "inputs": sorted(example),
        "notes": list(result.notes),
        "steps": result.steps,
        "blocks": len(graph.blocks),
        "layers": len(graph.layers()),
        "longest_run": max(call.repeat for call in graph.calls),
        "symbols": list(result.symbols),
        "opaque_bytes": round(sum(s.bytes for s in moved.values()), 3),
        "opaque_flops": round(sum(s.flops for s in moved.values()), 3),
        "parameters": graph.num_parameters() + graph.num_frozen(),
        "unused": len([n for n, p in model.named_parameters() if p.requires_grad and n not in used]),
    }
    row["plans"] = priced(graph)
    row["unread_flops"] = sum(flops for _, flops in result.unread)
    told(row)
    _then(row, "flops_error", lambda: flops_error(model, example, graph, row["unread_flops"]))
    told(row)
    if prove_too:
        from benchmarks.capture.trained import trained

        trained(model, example, row)
        told(row)
        _then(row, "proof", lambda: proof(model, example))
        told(row)
    _then(row, "planned", lambda: planned(graph))
    return row


def _then(row: dict[str, Any], key: str, function: Any) -> None:
    try:
        row[key] = function()
    except Exception as error:
        row[key] = f"failed: {_said(error)}"


def planned(graph: Any) -> dict[str, Any]:
    """The fastest plan that is found for 8 GPUs: its step and its mesh."""
    import gnomon
    from gnomon.plans import Workload
    from gnomon.plans.check import sample_tokens
    from gnomon.search.budget import until

    fixed = {dim.size for block in graph.blocks for dim in block.dims if dim.name == "batch"} - {None}
    workload = Workload(global_batch_size=8 * max(fixed, default=2), seq_len=sample_tokens(graph) or 16)
    best = gnomon.plan(graph, "1x8xh100-sxm", workload, keep_going=until(SEARCH_S), top=1).best
    if not best:
        raise ValueError("no plan fits")
    mesh = best[0].plan.mesh
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    return {"step_s": float(best[0].step_s), "mesh": {n: getattr(mesh, n) for n in names if getattr(mesh, n) > 1}}


def priced(graph: Any) -> dict[str, float | str]:
    """Plan of 8 GPUs -> predicted seconds a step, or why it cannot be priced."""
    import gnomon
    from gnomon.plans import Mesh, Optimizer, Plan, Schedule, Workload

    fixed = {dim.size for block in graph.blocks for dim in block.dims if dim.name == "batch"} - {None}
    one = Schedule(micro_batch_size=max(fixed, default=2))
    plans = {
        "dp 8": Plan(mesh=Mesh(dp_replicate=8), schedule=one),
        "zero 3": Plan(mesh=Mesh(dp_shard=8), schedule=one, optimizer=Optimizer(zero=3)),
        "tp 2": Plan(mesh=Mesh(dp_replicate=4, tp=2), schedule=one),
        "pp 2": Plan(mesh=Mesh(dp_replicate=4, pp=2), schedule=one),
    }
    rows: dict[str, float | str] = {}
    for name, plan in plans.items():
        for seq_len in (16, 1):  # 1: of a model that takes no sequences
            try:
                workload = Workload(global_batch_size=8 * one.micro_batch_size, seq_len=seq_len)
                rows[name] = float(gnomon.predict(graph, "1x8xh100-sxm", plan, workload).step_s)
                break
            except Exception as error:
                rows.setdefault(name, _said(error))
    return rows


def convolution_backward_flops(grad: Any, x: Any, weight: Any, *rest: Any, **named: Any) -> int:
    """Of the gradients that are wanted, each as many as the forward has. torch's own formula counts the weight gradient
    of a grouped convolution as if it were not: 17 times its forward for both gradients of 16 groups, in place of 2."""
    transposed, mask = bool(rest[4]), rest[7]
    rows = x if transposed else grad
    return 2 * math.prod(rows) * math.prod(weight[1:]) * sum(mask[:2])


def flops_error(model: Any, example: Any, graph: Any, unread: int = 0) -> float:
    """Of the forward and backward together, against torch's counter with attention as products. unread: FLOPs of
    products that no output depends on, which the Graph is without and capture says."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from gnomon.frontend.capture import quiet
    from gnomon.frontend.trace import named_tensors
    from gnomon.graph import BF16, UNFUSED, Setting, graph_work
    from gnomon.runtime.module.stage import bound

    own = {
        torch.ops.aten.convolution_backward: convolution_backward_flops,
        torch.ops.aten._grouped_mm: grouped_flops,
        torch.ops.aten.linalg_solve_triangular: solve_flops,
        torch.ops.aten.mkldnn_rnn_layer: lstm_flops,
        torch.ops.aten.mkldnn_rnn_layer_backward: lstm_backward_flops,
    }
    counter = FlopCounterMode(display=False, custom_mapping=own)
    device = next(iter(model.parameters())).device
    given = {name: x.to(device) for name, x in example.items()}
    with quiet(model, True), sdpa_kernel(SDPBackend.MATH), torch.device(device), counter as counted:
        try:
            out = model(**given)
        except RuntimeError as error:
            if "on meta tensors" in str(error):  # a capture follows numbers from shapes, eager PyTorch does not
                raise ValueError("it reads numbers, and was built without any (on the meta device)") from None
            raise
        outs = [t for _, t in named_tensors(out) if t.requires_grad and t.is_floating_point()]
        sum(t.float().sum() for t in outs).backward()
    setting = Setting(sizes=bound(graph.inputs, example), dtypes=BF16, causal_flops="full")
    mine = float(graph_work(graph, UNFUSED, setting).total.matmul_flops) + unread
    return round(mine / max(counted.get_total_flops(), 1) - 1, 5)


def grouped_flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Of products of rows that belong to experts, which torch's counter leaves out. a, b: shapes; (rows, k) and
    (experts, k, n), or (k, rows) and (rows, n), or (experts, m, k) and (k, rows)."""
    shared = len(a) == 3 and len(b) == 2  # the columns of b are divided among the experts
    return int(2 * math.prod(a) * b[-1] // (a[0] if shared else 1))


def solve_flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Of a triangular solve, left out too: half of a square matrix times b. Shapes: (…, n, n) and (…, n, m)."""
    return int(math.prod(b) * a[-1])


def lstm_flops(x: Any, w: Any, h: Any, *_: Any, **__: Any) -> int:
    """Of one layer in one direction, which torch's counter leaves out too. Shapes: of all rows, and of both weights."""
    return int(2 * math.prod(x[:-1]) * (math.prod(w) + math.prod(h)))


def lstm_backward_flops(x: Any, w: Any, h: Any, *_: Any, **__: Any) -> int:
    """Gradients of rows and weights."""
    return 2 * lstm_flops(x, w, h)


def proof(model: Any, example: Any) -> dict[str, Any]:
    from benchmarks.capture.trained import in_float64
    from gnomon.runtime.checks.prove import prove

    result = prove(in_float64(model), example)
    return {"outputs": result.outputs, "gradients": result.gradients, "first": result.first, "holds": result.holds}


def _said(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines or [''])[0][:160]}"


def _child(kind: str, prove_too: bool, limits: tuple[float, float], pipe: Any) -> None:
    warnings.simplefilter("ignore")
    cpu_s, gib = limits
    resource.setrlimit(resource.RLIMIT_CPU, (round(cpu_s), round(cpu_s) + 5))
    resource.setrlimit(resource.RLIMIT_AS, (round(gib * 2**30),) * 2)
    try:
        with open(os.devnull, "w") as nowhere:
            sys.stderr = nowhere
            pipe.send(one(kind, prove_too, pipe.send) | {"done": True})
    except BaseException as error:
        why = [_said(error), traceback.format_exc()[-400:]]
        pipe.send({"type": kind, "captured": False, "errors": why, "done": True})


def types() -> list[str]:
    """Every type that `AutoModel` builds."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return [kind for kind in MODEL_MAPPING_NAMES if kind in CONFIG_MAPPING]


def run(
    kinds: list[str], out: Path, limits: tuple[float, float], prove_too: bool, until: float
) -> list[dict[str, Any]]:
    """A process for each type, forked from one that has everything imported. limits: CPU seconds and GiB of each."""
    import torch  # noqa: F401
    import transformers

    sys.path.insert(0, str(Path(__file__).parents[2]))
    import benchmarks.capture.trained  # noqa: F401
    import gnomon.runtime.checks.prove  # noqa: F401
    from gnomon.request import verbs  # noqa: F401

    transformers.logging.set_verbosity_error()
    logging.disable(logging.CRITICAL)
    build("bert", SMALL, True)  # what all models import
    context = get_context("fork")
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {row["type"] for row in rows}
    for kind in kinds:
        if kind in done or time.time() > until:
            continue
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(kind, prove_too, limits, theirs))
        process.start()
        theirs.close()
        row = heard(mine, process, kind, limits[0])
        process.kill()
        process.join()
        rows.append(row)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            f"{len(rows)} {kind}: {'captured' if row['captured'] else row.get('errors')}", file=sys.stderr, flush=True
        )
    return rows


def heard(pipe: Any, process: Any, kind: str, cpu_s: float) -> dict[str, Any]:
    """The last that a process told of its type, with why it told no more."""
    row, end = {"type": kind, "captured": False, "errors": list[str]()}, time.time() + WAITS * cpu_s
    try:
        while not row.pop("done", False):
            if not pipe.poll(max(end - time.time(), 0)):
                row["stopped"] = f"no answer in {WAITS * cpu_s:.0f} s of wall time"
                break
            row = pipe.recv()
    except EOFError:
        process.join()
        at_limit = process.exitcode == -signal.SIGXCPU
        row["stopped"] = f"over {cpu_s:.0f} CPU s" if at_limit else f"the process ended with {process.exitcode}"
    if not row["captured"] and "stopped" in row:
        row["errors"] = [row["stopped"]]
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("transformers_types.jsonl"))
    parser.add_argument("--types", default="")
    parser.add_argument("--limit-s", type=float, default=60.0, help="CPU seconds of a type")
    parser.add_argument("--limit-gib", type=float, default=8.0, help="address space of a type")
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--no-proof", action="store_true")
    parser.add_argument(
        "--join", type=Path, nargs="*", default=(), help="files of earlier runs, the latest last; none new"
    )
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from benchmarks.capture.types_table import table

    every = types()
    if given.join:
        known = dict[str, dict[str, Any]]()
        for row in (json.loads(line) for file in given.join for line in file.read_text().splitlines()):
            old = known.get(row["type"], {}) if row.get("part") else {}  # of `types_memory`
            both = isinstance(old.get("step"), dict) and "step" in row
            known[row["type"]] = old | row | ({"step": old["step"] | row["step"]} if both else {})
        print(table(list(known.values()), len(every)))
        return
    kinds = given.types.split(",") if given.types else random.Random(0).sample(every, len(every))
    limits = given.limit_s, given.limit_gib
    rows = run(kinds, given.out, limits, not given.no_proof, time.time() + 60 * given.minutes)
    print(table(rows, len(every)))


if __name__ == "__main__":
    main()
