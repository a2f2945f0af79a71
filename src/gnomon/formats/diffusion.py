"""Commands that train diffusion models of images, which no reader has: what is said of them in place of a job.

`diffusion_script(launch)` says whether a command is one, by flags that diffusers' training scripts and kohya's share
(huggingface/diffusers examples/*/train_*.py, kohya-ss/sd-scripts library/train_util.py) and no trainer of language
models has. Leaves out their networks: those are captured.
"""

from __future__ import annotations

from gnomon.formats.format import Sample
from gnomon.formats.shell import Launch
from gnomon.formats.trainer_source import commands_of

MODEL = "pretrained_model_name_or_path"
"""What trainers of language models call `model_name_or_path`."""
IMAGES = frozenset({"resolution", "instance_data_dir", "validation_prompt", "caption_column", "snr_gamma"})
"""Any of these beside it, or beside a `train_batch_size` of its own."""


def diffusion_script(launch: Launch) -> bool:
    """Whether a command trains a diffusion model."""
    named = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in launch.options if word.startswith("--")}
    return bool(named & IMAGES) and bool(named & {MODEL, "train_batch_size"}) and "model_name_or_path" not in named


def refusal(sample: Sample) -> str | None:
    """What to do instead, where a file or pasted text starts such a script; None for any other."""
    found = next((launch for launch in commands_of(sample) if diffusion_script(launch)), None)
    if found is None:
        return None
    return (
        f"{found.program.rpartition('/')[2]} trains a diffusion model, whose network no file of it says; give its "
        "U-Net or transformer as code: gnomon predict MODULE:FUNCTION --inputs … --on CLUSTER (docs/capture.md)"
    )
