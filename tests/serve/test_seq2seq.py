"""T5 behind the engine writes what transformers' generate does, whoever runs beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the engine's tests need it")
pytest.importorskip("transformers", reason="transformers is not installed")

from runtime.hf_models import CONFIGS, build, quiet  # noqa: E402

from gnomon.cli import main  # noqa: E402
from gnomon.errors import InputError  # noqa: E402
from gnomon.serve.load import open_model  # noqa: E402
from gnomon.serve.sampling import Sampling  # noqa: E402
from gnomon.serving.scheduler import Scheduler  # noqa: E402
from gnomon.software.engine import engine  # noqa: E402

pytestmark = pytest.mark.torch
RULES = replace(engine("gnomon"), max_seqs=3)
PROMPTS = ([5, 9, 33, 7, 1], [8] * 40, [250, 3])


def write(folder: Path, kind: str) -> Any:
    torch.manual_seed(0)
    with quiet():
        model = build(kind, {**CONFIGS[kind], "vocab_size": 259, "decoder_start_token_id": 0}).float().eval()
        for parameter in model.parameters():  # so that what is read matters, and answers do not repeat a token
            parameter.data *= 1.5
        model.save_pretrained(folder)
    return model


def wanted(model: Any, prompt: list[int], count: int) -> list[int]:
    with torch.no_grad():
        made = model.generate(
            torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False, num_beams=1,
            eos_token_id=None,
        )  # fmt: skip
    return list(made[0, 1:].tolist())


@pytest.mark.parametrize(("kind", "most"), [("t5", 200), ("t5 (gated, untied)", 40), ("mt5", 40)])
def test_greedy_answers_are_those_of_generate(kind: str, most: int, tmp_path: Path) -> None:
    """Up to 200 tokens, beside others of other lengths that come and go, some of whom lose their blocks."""
    model = write(tmp_path, kind)
    block = 2 * CONFIGS[kind]["num_heads"] * CONFIGS[kind]["d_kv"] * 4 * CONFIGS[kind]["num_layers"] * 16
    longest = most + 56
    ours = open_model(tmp_path, RULES, dtype="fp32", kv_bytes=block * (longest // 16 + 1), max_model_len=longest)
    counts = (most, most // 2, 20)
    keys = [
        ours.add(prompt, Sampling(max_tokens=count, temperature=0.0))[0]
        for prompt, count in zip(PROMPTS, counts, strict=True)
    ]
    gone = ours.add([4, 4], Sampling(max_tokens=most // 2, temperature=0.0))[0]
    told: dict[int, list[int]] = {}
    steps, ours.record = 0, []
    while ours.has_work:
        steps += 1
        if steps == 20:
            ours.cancel(gone)
        for one in ours.step():
            told.setdefault(one.key, []).append(one.chosen.token)
        assert ours.memory.problems() == [] and ours.scheduler.free == ours.memory.free
    for key, prompt, count in zip(keys, PROMPTS, counts, strict=True):
        assert told[key] == wanted(model, list(prompt), count)
    assert not ours.model.texts and not ours.model.sources
    assert ours.memory.pools[0].free == ours.memory.pools[0].total
    assert ours.preemptions  # memory is short of what all would have
    again = Scheduler(ours.rules, ours.model.sizes.blocks)  # without memory or a model: the simulator's decisions
    for seen in ours.record:
        for key in seen.cancelled:
            again.cancel(key)
        assert again.step(seen.arrivals, seen.finished) == seen.batch


def test_the_command_generates_and_says_what_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write(tmp_path, "t5")
    assert main(["generate", str(tmp_path), "--prompt", "hello", "--count", "12", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ids"] == wanted(model, list(b"hello"), 12)
    with pytest.raises(InputError, match="hold 32 tokens, and a request may have 512"):
        open_model(tmp_path, RULES, dtype="fp32", kv_bytes=20_000)
    with pytest.raises(InputError, match="as its folder has it"):
        open_model(tmp_path, RULES, dtype="fp32", kv_bytes=1 << 26, weights="int8")
    ours = open_model(tmp_path, RULES, dtype="fp32", kv_bytes=1 << 26, max_model_len=64)
    with pytest.raises(InputError, match=r"60 \+ 10"):
        ours.add([3] * 60, Sampling(max_tokens=10, temperature=0.0))
    for name in ("generation_config.json", "config.json"):
        file = tmp_path / name
        if file.is_file():
            values = json.loads(file.read_text())
            for key in ("decoder_start_token_id", "pad_token_id"):
                values.pop(key, None)
            file.write_text(json.dumps(values))
    with pytest.raises(InputError, match="neither decoder_start_token_id"):
        open_model(tmp_path, RULES, dtype="fp32", kv_bytes=1 << 26)
