"""What axolotl refuses of its own YAML, and what it drops without a plugin.

`refuse(fields)` raises InputError for settings that its validators do not let run (axolotl-ai-cloud/axolotl 067b021
src/axolotl/utils/schemas/validation.py and peft.py), of those that change time or memory. `without_plugins(values)`
takes out keys of integrations that `plugins` does not list: they are no fields then and switch nothing on. Leaves out
rules of evaluation, saving and tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping

from gnomon.errors import nearest
from gnomon.formats.job import Fields, Unexpressed
from gnomon.formats.trainer_words import flag

LEARNING = ("dpo", "gdpo", "grpo", "ipo", "orpo", "kto", "simpo", "ebft")
"""Words of `rl`."""

PLUGINS = {
    "liger_": "axolotl.integrations.liger.LigerPlugin",
    "cut_cross_entropy": "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin",
}
"""Beginning of keys -> the integration that they are of."""

INTEGRATIONS = (
    *PLUGINS.values(),
    "axolotl.integrations.spectrum.SpectrumPlugin",
    "axolotl.integrations.grokfast.GrokfastPlugin",
    "axolotl.integrations.kd.KDPlugin",
    "axolotl.integrations.lm_eval.LMEvalPlugin",
    "axolotl.integrations.llm_compressor.LLMCompressorPlugin",
    "axolotl.integrations.kernels.KernelsPlugin",
    "axolotl.integrations.swanlab.SwanLabPlugin",
    "axolotl.integrations.diffusion.DiffusionPlugin",
    "axolotl.integrations.densemixer.DenseMixerPlugin",
)
"""Its own integrations (src/axolotl/integrations)."""

EIGHT_BITS = ("paged_adamw_8bit", "adamw_8bit", "adamw_bnb_8bit")


def without_plugins(values: Mapping[str, object]) -> tuple[dict[str, object], list[Unexpressed]]:
    """(values, what was taken out of them)."""
    listed = values.get("plugins")
    plugins = [str(one) for one in listed] if isinstance(listed, list | tuple) else [str(listed or "")]
    off = {
        key: plugin
        for key, value in values.items()
        for start, plugin in PLUGINS.items()
        if key.startswith(start) and value and not any(one.endswith(plugin.rpartition(".")[2]) for one in plugins)
    }
    lines = [
        Unexpressed(field=key, value=str(values[key]), why=f"is off without plugins: [{plugin}]")
        for key, plugin in off.items()
    ]
    return {key: value for key, value in values.items() if key not in off}, lines


def refuse(f: Fields) -> None:
    """InputError for what axolotl does not let run."""
    listed = f.peek("plugins")
    for one in map(str, listed if isinstance(listed, list | tuple) else ()):
        if one.startswith("axolotl.") and near(one) and one not in INTEGRATIONS:
            f.fail("plugins", f"{one!r} is no integration of axolotl{nearest(one, INTEGRATIONS)}")
    learning = f.peek("rl")
    if learning is not None and learning is not False and str(learning) not in LEARNING:
        f.fail("rl", f"{learning!r} is no way to learn{nearest(str(learning), LEARNING)}: {', '.join(LEARNING)}")
    if learning and flag(f, "sample_packing"):
        f.fail("sample_packing", f"samples of rl: {learning} are not packed; leave it out")
    fsdp = bool(f.peek("fsdp")) or any(key.startswith("fsdp_config") for key in f.names())
    deepspeed = bool(f.peek("deepspeed")) or any(key.startswith("deepspeed.") for key in f.names())
    if fsdp and deepspeed:
        f.fail("fsdp", "deepspeed and fsdp both shard the model, of which axolotl takes one; leave one out")
    if f.peek("batch_size") and f.peek("gradient_accumulation_steps"):
        f.fail("batch_size", "it and gradient_accumulation_steps say the same; leave one of both out")
    if flag(f, "activation_offloading") and not f.peek("gradient_checkpointing"):
        f.fail("activation_offloading", "it keeps checkpoints on the host: switch gradient_checkpointing on beside it")
    if f.peek("tensor_parallel_size") not in (None, 1) and f.peek("optimizer") in EIGHT_BITS:
        f.fail("optimizer", f"{f.peek('optimizer')} is not divided by tensor_parallel_size; take adamw_torch_fused")


def near(name: str) -> bool:
    """Whether a name is one of an integration's, or close to one."""
    return bool(nearest(name, INTEGRATIONS))
