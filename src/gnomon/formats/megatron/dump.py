"""The command line behind a log: arguments as Megatron-LM lists them at its start, or as an argparse namespace.

`dumped(text)` returns the words `--name value` of that command, and the number of ranks; None where a log has neither.
A log has every argument, defaults and derived values too: arguments of parts that are off (experts, latent attention),
and names that are no options, are left out. Leaves out what options mean (`read`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

from gnomon.formats.megatron.options import known_options

LINE = re.compile(r"^.*?\b([a-z]\w*) \.{3,} (.*?)\s*$", re.MULTILINE)
"""`  tensor_model_parallel_size ...................... 2`, with what a launcher puts before it."""

NAMESPACE = re.compile(r"\b[Nn]amespace\((?=.*\bnum_layers=)", re.DOTALL)
"""The beginning of `Namespace(…, num_layers=24, …)`, as Python prints the arguments."""

TOKEN = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[()\[\]{}]""", re.DOTALL)
"""A string, or a bracket outside of strings."""

ENUMS = re.compile(r"<?(?:AttnBackend|CudaGraphScope)\.(\w+)(?:: [^<>]*>)?")
"""A member of one of Megatron-LM's enumerations, as `str` or `repr` prints it; the option takes its bare name."""

SWITCHED_OFF: Mapping[str, str] = {
    "add_bias_linear": "--disable-bias-linear",
    "apply_rope_fusion": "--no-rope-fusion",
    "bias_dropout_fusion": "--no-bias-dropout-fusion",
    "bias_gelu_fusion": "--no-bias-gelu-fusion",
    "bias_swiglu_fusion": "--no-bias-swiglu-fusion",
    "gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
    "masked_softmax_fusion": "--no-masked-softmax-fusion",
}
"""Argument that is true unless it is switched off -> the option that does so."""

PARTS: Mapping[str, tuple[str, ...]] = {
    "num_experts": ("moe_", "expert_"),
    "multi_latent_attention": ("q_lora", "kv_lora", "qk_head", "qk_pos", "v_head", "rotary_scaling", "mscale", "beta_"),
    "hybrid_override_pattern": ("mamba_", "hybrid_"),
    "swiglu": ("bias_swiglu",),
    "recompute_granularity": ("recompute_",),
    "fp8": ("fp8_", "fp8"),
    "group_query_attention": ("num_query_groups",),
}
"""Argument that turns a part on -> prefixes of the part's other arguments, whose defaults are printed while it is
off."""

DERIVED = frozenset("virtual_pipeline_model_parallel_size params_dtype".split())
"""Arguments named as options that Megatron-LM derives from others."""


def dumped(text: str) -> tuple[list[str], int | None] | None:
    """(words of the command, number of ranks or None) of a log; None where it has no arguments of Megatron-LM."""
    values = _printed(text) or _namespace(text)
    if "num_layers" not in values or "micro_batch_size" not in values:
        return None
    off = [prefix for part, prefixes in PARTS.items() if not _on(values.get(part)) for prefix in prefixes]
    words: list[str] = []
    for name, value in values.items():
        if name in SWITCHED_OFF and value == "False":
            words.append(SWITCHED_OFF[name])
        elif name in known_options() and name not in DERIVED and _on(value) and not name.startswith(tuple(off)):
            words += [f"--{name.replace('_', '-')}", *([] if value == "True" else _words(value))]
    # The table as it was padded, whatever the original vocabulary and its padding were.
    if _on(rows := values.get("padded_vocab_size")):
        words = _without(words, "--vocab-size", "--make-vocab-size-divisible-by")
        words += ["--vocab-size", str(rows), "--make-vocab-size-divisible-by", "1"]
    ranks = values.get("world_size", "")
    return words, int(ranks) if ranks.isdigit() else None


def _printed(text: str) -> dict[str, str]:
    """Name -> value of the lines of Megatron-LM's list."""
    return {name: value for name, value in LINE.findall(text)}


def _namespace(text: str) -> dict[str, str]:
    """Name -> value of the keywords of the first `Namespace(…)`; empty where its bracket does not close or its values
    cannot be read. The closing bracket is found by counting, since a log may go on for megabytes behind it."""
    match = NAMESPACE.search(text)
    if match is None:
        return {}
    depth, end = 0, 0
    for token in TOKEN.finditer(text, match.end() - 1):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if depth == 0:
            end = token.end()
            break
    written = text[match.start() : end].replace("\n", " ")
    # Values whose repr is no expression (`<AttnBackend.auto: 5>`) are spelled as their names, or as nothing.
    spelled = re.sub(r"<[^<>]*>", "None", re.sub(r"<(\w+\.\w+): [^<>]*>", r"'\1'", written))
    for candidate in (written, spelled):
        try:
            call = ast.parse(candidate, mode="eval").body
        except (SyntaxError, ValueError, RecursionError):
            continue
        if isinstance(call, ast.Call):
            return {k.arg: _spelled(k.value) for k in call.keywords if k.arg is not None}
    return {}


def _spelled(node: ast.expr) -> str:
    """A value as Megatron-LM's list prints it; the source of what is no literal (`torch.bfloat16`)."""
    try:
        return str(ast.literal_eval(node))
    except (ValueError, TypeError):
        return ast.unparse(node)


def _on(value: str | None) -> bool:
    """Whether an argument's printed value is there and says something else than no."""
    return value not in (None, "", "None", "False", "[]")


def _words(value: str) -> list[str]:
    """The words of an option's value: the elements of a list, else the value."""
    if value[:1] == "[" and value[-1:] == "]":
        return [ENUMS.sub(r"\1", part.strip().strip("'\"")) for part in value[1:-1].split(",")]
    return [ENUMS.sub(r"\1", value) if ENUMS.fullmatch(value) else value]


def _without(words: list[str], *names: str) -> list[str]:
    """The words but for these options and their values."""
    remaining, dropping = list[str](), False
    for word in words:
        dropping = word in names if word.startswith("--") else dropping
        remaining += [] if dropping else [word]
    return remaining
