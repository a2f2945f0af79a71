"""Words of tables of published inference runs -> what Gnomon calls them: devices, engines, formats."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files

from gnomon.errors import InputError
from gnomon.software.engine import Engine, engine

DEVICES: Mapping[str, str] = {
    "a100-sxm-40gb": "a100-sxm-40gb",
    "a100-sxm-80gb": "a100-sxm-80gb",
    "a100-pcie-80gb": "a100-pcie-80gb",
    "a100-?-80gb": "a100-sxm-80gb",
    "a100": "a100-sxm-80gb",
    "1 x a100": "a100-sxm-40gb",
    "h100-sxm-80gb": "h100-sxm-80gb",
    "h100-pcie-80gb": "h100-pcie-80gb",
    "h100-nvl-94gb": "h100-nvl-94gb",
    "h200-sxm-141gb": "h200-sxm-141gb",
    "h200-nvl-141gb": "h200-sxm-141gb",
    "h20-3e-143gb": "h20-sxm-96gb",
    "gh200-96gb": "gh200-96gb",
    "gh200-144gb": "gh200-96gb",
    "b200-sxm-180gb": "b200",
    "b300-sxm-288gb": "b300",
    "gb200": "gb200",
    "gb300": "gb300",
    "l40s": "l40s",
    "rtx4090": "rtx-4090",
    "rtx3090": "rtx-3090",
    "rtx3090ti": "rtx-3090-ti",
    "rtx3080": "rtx-3080",
    "rtx3080ti": "rtx-3080-ti",
    "rtx3070": "rtx-3080",
    "rtx4080": "rtx-4080",
    "rtx4070ti": "rtx-4070-ti",
    "rtx4000-ada": "rtx-4000-ada",
    "rtx5000-ada": "rtx-5000-ada",
    "rtx6000-ada": "rtx-6000-ada",
    "rtx-pro-6000-96gb": "rtx-pro-6000",
    "a6000": "a6000",
    "a40": "a40",
    "a10g": "a10g",
    "mi300x": "mi300x",
    "mi325x": "mi325x",
    "mi355x": "mi355x",
    "mi250": "mi250",
    "mi250x-gcd?": "mi250x",
    "gaudi2": "gaudi-2",
    "max1550": "max-1550",
    "gb10-dgx-spark-128gb": "gb10",
    "strix-halo-8060s": "strix-halo",
    "apple-m2-ultra": "apple-m2-ultra",
    "apple-m2-ultra-76core": "apple-m2-ultra",
    "apple-m2-max-gpu": "apple-m2-max",
    "apple-m1-max-32core": "apple-m1-max",
    "apple-m3-max-40core": "apple-m3-max",
    "apple-m1-7core": "apple-m1",
    "apple-m3-10core": "apple-m3",
    "rx7900xtx": "rx-7900-xtx",
    "ascend-910b(a2)": "ascend-910b",
    "rtx4090|a100 (see notes)": "rtx-4090",
}
"""Device of the table, lower case -> what `--on` takes."""

MACHINES: tuple[tuple[str, str], ...] = (
    (r"5090", "rtx-5090"),
    (r"4090", "rtx-4090"),
    (r"4080", "rtx-4080"),
    (r"4070 ti super", "rtx-4070-ti-super"),
    (r"4070 ti", "rtx-4070-ti"),
    (r"4070", "rtx-4070"),
    (r"3080 ti", "rtx-3080-ti"),
    (r"3060", "rtx-3060"),
    (r"2080 ti", "rtx-2080-ti"),
    (r"a4000", "rtx-a4000"),
    (r"r9700", "radeon-ai-pro-r9700"),
    (r"7900 xtx", "rx-7900-xtx"),
    (r"7900 xt", "rx-7900-xt"),
    (r"9070 xt", "rx-9070-xt"),
    (r"w7700", "radeon-pro-w7700"),
    (r"b580", "arc-b580"),
    (r"gb10", "gb10"),
    (r"m3 ultra", "apple-m3-ultra"),
    (r"m1 ultra", "apple-m1-ultra"),
    (r"m1 max", "apple-m1-max"),
    (r"m4 mac", "apple-m4"),
    (r"framework (mainboard|desktop)", "strix-halo"),
)
"""Patterns of machines, lower case, by the card that is in them."""

ENGINES: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "vllm": ("vllm", {}),
    "vllm-ascend": ("vllm", {}),
    "sglang": ("sglang", {}),
    "dynamo-sglang": ("sglang", {}),
    "trtllm": ("tensorrt-llm", {}),
    "trt": ("tensorrt-llm", {}),
    "dynamo-trt": ("tensorrt-llm", {}),
    "tensorrt-llm": ("tensorrt-llm", {}),
    "nvidia tensorrt-llm": ("tensorrt-llm", {}),
    "optimum nvidia": ("tensorrt-llm", {}),
    "fastertransformer": ("fastertransformer", {}),
    "megatron-lm": ("transformers", {}),
    "llama.cpp": ("llama.cpp", {}),
    "ollama or llama.cpp": ("llama.cpp", {}),
    "ctransformers": ("llama.cpp", {}),
    "gpt-fast": ("gpt-fast", {}),
    "exllama": ("exllama", {}),
    "exllama v2": ("exllama", {}),
    "exllamav2": ("exllama", {}),
    "mlc-llm": ("exllama", {}),
    "mlc llm": ("exllama", {}),
    "deepspeed-mii": ("deepspeed", {}),
    "deepspeed": ("deepspeed", {}),
    "ctranslate": ("deepspeed", {}),
    "transformers (pytorch)": ("transformers", {}),
    "pytorch lightning": ("transformers", {}),
    "litgpt": ("transformers", {}),
    "autogptq": ("transformers", {}),
    "onnx": ("transformers", {}),
    "candle": ("transformers", {}),
}
"""Engine of the table, lower case -> record that stands for it, of Gnomon's or of `engines/` beside this file."""

WEIGHTS: tuple[tuple[str, str], ...] = (
    (r"fp16|float16|bf16|bfloat16|^f16| f16|float32|^$", "bf16"),
    (r"fp8", "fp8"),
    (r"mxfp4", "mxfp4"),
    (r"fp4", "nvfp4"),
    (r"int8-wo", "int8-wo"),
    (r"int8", "int8"),
    (r"nf4", "nf4"),
    (r"int4", "int4-wo"),
    (r"q8", "q8_0"),
    (r"q6", "q6_k"),
    (r"q5", "q5_k"),
    (r"q4_0", "q4_0"),
    (r"q4", "q4_k"),
    (r"q3", "q3_k"),
    (r"q2", "q2_k"),
)
"""Patterns of precisions, lower case -> format, tried in order."""


def device(text: str) -> str:
    """What `--on` takes. InputError where no table has it."""
    name = text.lower()
    found = DEVICES.get(name) or next((to for pattern, to in MACHINES if re.search(pattern, name)), None)
    if found is None:
        raise InputError("device not in the tables")
    return found


VERSIONS: Mapping[tuple[str, str], str] = {
    ("argonne", "vllm"): "vllm-0.4",
    ("ml-energy-v3", "vllm"): "vllm-0.11",
    ("mlc-llm-perf-bench", "vllm"): "vllm-0.4",
    ("prem-benchmarks", "vllm"): "vllm-0.4",
}
"""(Family, engine) -> the record of the release that was new when it was measured, where that is far from today's."""


def rules(text: str, family: str = "") -> Engine:
    """The record of an engine. InputError where no table has it."""
    name = text.strip().lower()
    if name.startswith("autoawq"):
        name = "transformers (pytorch)"
    if name not in ENGINES:
        raise InputError("engine not in the tables")
    record, changes = ENGINES[name]
    record = VERSIONS.get((family, record), record)
    own = files("evidence.inference").joinpath("engines", f"{record}.toml")
    return replace(engine(str(own) if own.is_file() else record), **changes)  # type: ignore[arg-type]


def weights(text: str) -> str:
    """A name of `FORMATS`. InputError where no table has it."""
    found = next((to for pattern, to in WEIGHTS if re.search(pattern, text.lower())), None)
    if found is None:
        raise InputError("precision not in the tables")
    return found
