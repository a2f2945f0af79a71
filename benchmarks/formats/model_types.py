"""`python benchmarks/formats/model_types.py`: how many of transformers' model types a config.json is read of, and how.

Each type's class makes its own default config, which is read as a file would be: by a reader of its own, by the one of
a type with the same keys, by the generic path, or only the language model inside; otherwise it is refused by name. Of
each that is read, parameters are compared with the model that transformers builds from the same config on the meta
device: the causal model, the body, or the body with a head. `--types a,b` for some. Leaves out weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

from gnomon.errors import GnomonError
from gnomon.formats.huggingface.generic import SHAPES
from gnomon.formats.huggingface.known import NOT_DESCRIBED, READERS, SAME_KEYS
from gnomon.formats.huggingface.read import from_hf_config

WAYS = ("own reader", "same keys", "generic path", "language model inside", "refused, its reason", "refused by name")


def way(kind: str, values: dict[str, Any]) -> str:
    """How a type is read, or refused."""
    if kind in READERS:
        return WAYS[0]
    if kind in SAME_KEYS:
        return WAYS[1]
    if kind in SHAPES:
        return WAYS[2]
    try:
        from_hf_config(values, kind)
    except GnomonError as error:
        return WAYS[4] if kind in NOT_DESCRIBED or "no reader" not in str(error) else WAYS[5]
    return WAYS[3]


def built(config: Any) -> Iterator[int]:
    """Parameters of what transformers builds: the causal model, the body, the body with an untied head."""
    import torch
    import transformers

    autos: tuple[Any, ...] = (transformers.AutoModelForCausalLM, transformers.AutoModel)
    text = config.get_text_config()
    head = text.vocab_size * text.hidden_size if hasattr(text, "vocab_size") and hasattr(text, "hidden_size") else 0
    for auto in autos:
        for entry in (text, config):
            try:
                with torch.device("meta"):
                    body = auto.from_config(entry)
            except Exception:
                continue
            count = sum(p.numel() for p in body.parameters())
            yield count
            yield count + head


def main() -> int:
    """Print the counts, and each type whose parameters differ."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--types", default="", help="names between commas; all of AutoModel")
    asked = options.parse_args()
    warnings.simplefilter("ignore")
    from transformers import CONFIG_MAPPING, __version__, logging
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    quiet: Any = logging
    quiet.set_verbosity_error()
    kinds = [k for k in asked.types.split(",") if k] or sorted({*MODEL_MAPPING_NAMES} & {*CONFIG_MAPPING.keys()})
    counted: Counter[str] = Counter()
    same: Counter[str] = Counter()
    for kind in kinds:
        try:
            config = CONFIG_MAPPING[kind]()
            values = json.loads(config.to_json_string(use_diff=False))
        except Exception:
            counted["no default config"] += 1
            continue
        how = way(kind, values)
        counted[how] += 1
        if how.startswith("refused"):
            continue
        try:
            mine = from_hf_config(values, kind).graph.num_parameters()
        except GnomonError as error:
            same[f"{how}: refused default"] += 1
            print(f"{kind:28} {how}: {str(error)[:110]}", flush=True)
            continue
        theirs = set(built(config))
        same[f"{how}: {'the same' if mine in theirs else 'other' if theirs else 'not built'}"] += 1
        if mine not in theirs:
            near = min(theirs, key=lambda n: abs(n - mine), default=0)
            print(f"{kind:28} {how}: {mine:,} parameters, transformers {near:,}", flush=True)
    print(f"\ntransformers {__version__}: {len(kinds)} model types with a body")
    for name in (*WAYS, "no default config"):
        parts = ", ".join(f"{n} {key.split(': ')[1]}" for key, n in sorted(same.items()) if key.startswith(f"{name}: "))
        print(f"  {name:24} {counted[name]:4}{'   parameters: ' + parts if parts else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
