"""An encoder behind a server makes transformers' vectors, and OpenAI's client reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the engine's tests need it")
for package in ("transformers", "openai", "starlette", "uvicorn"):
    pytest.importorskip(package, reason=f"{package} is not installed")

import openai  # noqa: E402
import transformers  # noqa: E402
from runtime.hf_models import CONFIGS, quiet  # noqa: E402
from serve.served import serving  # noqa: E402

from gnomon.errors import InputError  # noqa: E402
from gnomon.serve.encoder import Encoder  # noqa: E402

pytestmark = pytest.mark.torch


def write_encoder(folder: Path, kind: str) -> Any:
    """Random weights without a head; the model."""
    config = {name: value for name, value in CONFIGS[kind].items() if name != "attention_dropout"}
    with quiet():
        made = (
            transformers.AutoModel.from_config(
                transformers.AutoConfig.for_model(kind, **{**config, "vocab_size": 259, "max_position_embeddings": 66})
            )
            .float()
            .eval()
        )
        made.save_pretrained(folder)
    return made


def wanted(model: Any, ids: list[int], pooling: str = "mean") -> torch.Tensor:
    with torch.no_grad():
        states = model(torch.tensor([ids])).last_hidden_state[0]
    return torch.nn.functional.normalize({"mean": states.mean(0), "cls": states[0]}[pooling], dim=0)


@pytest.mark.parametrize(("kind", "longest"), [("bert", 66), ("roberta", 65)])
def test_vectors_are_those_of_transformers(kind: str, longest: int, tmp_path: Path) -> None:
    """At every length up to the last place, pooled by the mean or as the folder says."""
    model = write_encoder(tmp_path, kind)
    ours = Encoder.open(tmp_path, "fp32", None)
    assert ours.max_len == longest
    for length in (1, 7, longest):
        ids = [5 + (7 * i) % 90 for i in range(length)]
        torch.testing.assert_close(ours.embed(ids), wanted(model, ids), rtol=1e-4, atol=1e-5)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    ids = [9, 8, 7]
    torch.testing.assert_close(
        Encoder.open(tmp_path, "fp32", None).embed(ids), wanted(model, ids, "cls"), rtol=1e-4, atol=1e-5
    )
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    with pytest.raises(InputError, match="pooling_mode_lasttoken"):
        Encoder.open(tmp_path, "fp32", None)
    with pytest.raises(InputError, match=f"above the {longest} places"):
        Encoder.open(tmp_path, "fp32", 200)


def test_openais_client_reads_vectors_of_texts_and_is_told_what_is_wrong(tmp_path: Path) -> None:
    model = write_encoder(tmp_path, "bert")
    with serving(tmp_path, "--name", "vectors") as server:
        client = server.client()
        made = client.embeddings.create(model="vectors", input=["hello", "a", [104, 105]])
        assert made.usage.total_tokens == 8 and [one.index for one in made.data] == [0, 1, 2]
        for one, text in zip(made.data, (b"hello", b"a", b"hi"), strict=True):
            torch.testing.assert_close(torch.tensor(one.embedding), wanted(model, list(text)), rtol=1e-3, atol=1e-4)
        few = client.embeddings.create(model="vectors", input="hello", dimensions=4, encoding_format="float")
        short = torch.tensor(made.data[0].embedding[:4])
        torch.testing.assert_close(torch.tensor(few.data[0].embedding), short / short.norm(), rtol=1e-3, atol=1e-4)
        for body, why in (
            ({"input": []}, "1 to 2048"), ({"input": "x" * 80}, "80 tokens, and the model takes at most 66"),
            ({"input": [300]}, "token 300"), ({"input": "a", "dimensions": 999}, "dimensions is at most"),
            ({"input": "a", "extra_body": {"truncate": True}}, "truncate is not supported"),
        ):  # fmt: skip
            with pytest.raises(openai.BadRequestError, match=why):
                client.embeddings.create(model="vectors", **body)
        with pytest.raises(openai.BadRequestError, match="is an encoder"):
            client.completions.create(model="vectors", prompt="a")
