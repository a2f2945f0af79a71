"""Scripts that train diffusion models: one line says what they are and what to do; none is taken for another's job."""

from __future__ import annotations

from pathlib import Path

import pytest

from gnomon.cli import main
from gnomon.errors import InputError
from gnomon.request.job_file import read_job

SCRIPTS = {
    "text to image": "accelerate launch train_text_to_image.py --pretrained_model_name_or_path=$M "
    "--resolution=512 --train_batch_size=1 --gradient_accumulation_steps=4 --output_dir o",
    "no weights": "accelerate launch train_unconditional.py --dataset_name d --resolution=64 --train_batch_size=16 "
    "--gradient_accumulation_steps=1 --output_dir o",
    "a subject": "python train_dreambooth_flux.py --pretrained_model_name_or_path m --instance_data_dir d",
}


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_diffusion_script_is_told_how_its_network_is_given(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / "train.sh").write_text(SCRIPTS[kind] + "\n")
    for more in ([], ["--model", "llama-2-7b"]):
        assert main(["predict", str(path), "--on", "8xa100", *more]) == 2
        said = capsys.readouterr().err
        assert "trains a diffusion model" in said and "MODULE:FUNCTION" in said and len(said) < 230
    with pytest.raises(InputError, match="trains a diffusion model"):
        read_job(path, "8xa100")


def test_a_language_models_script_is_none(tmp_path: Path) -> None:
    """Though it has a batch and a prompt of its own."""
    command = "torchrun --nproc_per_node 8 run_clm.py --model_name_or_path gpt2 --per_device_train_batch_size 4"
    (path := tmp_path / "train.sh").write_text(command + " --train_batch_size 4 --resolution 512 --output_dir o\n")
    assert read_job(path, "8xa100").graph.num_parameters() == 124_439_808
