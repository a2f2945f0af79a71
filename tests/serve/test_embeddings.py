"""Encoders behind a server make transformers' vectors and classes, and OpenAI's client reads them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the engine's tests need it")
for package in ("transformers", "openai", "starlette", "uvicorn"):
    pytest.importorskip(package, reason=f"{package} is not installed")

import openai  # noqa: E402
import transformers  # noqa: E402
from runtime.hf_models import CONFIGS, quiet  # noqa: E402
from serve.served import serving, workers  # noqa: E402

from gnomon.cli.options.server import ServerOptions  # noqa: E402
from gnomon.cli.serve import settings_of  # noqa: E402
from gnomon.errors import InputError  # noqa: E402
from gnomon.serve import server as server_module  # noqa: E402
from gnomon.serve.drive import drive  # noqa: E402
from gnomon.serve.encoder import Encoder, EncoderKind  # noqa: E402
from gnomon.serving.requests import poisson  # noqa: E402

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
        for padded in (0, longest):
            torch.testing.assert_close(ours.embed(ids, padded), wanted(model, ids), rtol=1e-4, atol=1e-5)
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
    with (
        serving(tmp_path, "--name", "vectors", "--replicas", "2", "--pad-to", "16,66") as server,
        server.client() as client,
    ):
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
        rows = drive(server.url, poisson(12, 1, rate=200.0, count=6), model=None, key="", seed=1, embeds=True)
        assert [(row.error, row.input_len, row.output_len) for row in rows] == [("", 12, 1)] * 6
        assert all(0 <= row.arrival_s < row.first_s == row.end_s for row in rows)
        with pytest.raises(openai.BadRequestError, match="is an encoder"):
            client.completions.create(model="vectors", prompt="a")
        with pytest.raises(openai.BadRequestError, match="no classifier"):
            client.with_options(base_url=server.url).post("/classify", cast_to=object, body={"input": "a"})
        os.kill(workers(server.process.pid)[0], signal.SIGKILL)
        for text in (b"hello", b"a"):  # the other one answers, or says that it had the text
            with contextlib.suppress(openai.InternalServerError):
                [one] = client.embeddings.create(model="vectors", input=text.decode()).data
                torch.testing.assert_close(torch.tensor(one.embedding), wanted(model, list(text)), rtol=1e-3, atol=1e-4)


class InProcess:
    """In place of a pool of processes."""

    def __init__(self, settings: Any, max_len: int) -> None:
        self.encoder = Encoder.open(Path(settings.folder), "fp32", None)
        self.is_ready = True

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def compute(self, ids: Any, types: Any, wants: str) -> Any:
        return self.encoder.classify(list(ids), types, 64).numpy()


async def post(app: Any, path: str, body: object) -> Any:
    """(status, answer) of the app."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    await app({"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
               "headers": headers, "http_version": "1.1", "scheme": "http", "server": ("127.0.0.1", 1),
               "client": ("127.0.0.1", 2), "root_path": ""}, receive, send)  # fmt: skip
    return sent[0]["status"], json.loads(b"".join(one.get("body", b"") for one in sent[1:]))


@pytest.mark.parametrize(("kind", "classes"), [("bert", 3), ("roberta", 1)])
def test_classes_and_scores_are_those_of_transformers(
    kind: str, classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By vLLM's endpoints; chances of a class, and how far a text goes with another."""
    config = {name: value for name, value in CONFIGS[kind].items() if name != "attention_dropout"}
    config |= {"vocab_size": 259, "max_position_embeddings": 66, "num_labels": classes, "initializer_range": 0.4}
    with quiet():
        made = transformers.AutoConfig.for_model(kind, **config)
        model = transformers.AutoModelForSequenceClassification.from_config(made).float().eval()
        model.save_pretrained(tmp_path)
    monkeypatch.setattr(server_module, "WorkerPool", InProcess)
    settings = settings_of(ServerOptions(folder=str(tmp_path), dtype="fp32", name="m"))
    app = server_module.application(settings, server_module._looked(settings))

    def chances(ids: list[int], types: list[int] | None = None) -> torch.Tensor:
        more = {} if types is None or kind == "roberta" else {"token_type_ids": torch.tensor([types])}
        with torch.no_grad():
            logits = model(torch.tensor([ids]), **more).logits[0]
        return logits.softmax(-1) if classes > 1 else logits.sigmoid()

    status, told = asyncio.run(post(app, "/classify", {"model": "m", "input": ["hello", [5, 6, 7]]}))
    assert status == 200 and told["usage"]["prompt_tokens"] == 8
    for one, ids in zip(told["data"], (list(b"hello"), [5, 6, 7]), strict=True):
        torch.testing.assert_close(torch.tensor(one["probs"]), chances(ids), rtol=1e-4, atol=1e-6)
        assert one["label"] == f"LABEL_{int(chances(ids).argmax())}" and one["num_classes"] == classes
    status, told = asyncio.run(post(app, "/v1/score", {"text_1": "ab", "text_2": ["cde", "f"]}))
    if classes > 1:
        assert status == 400 and "3 classes" in told["error"]["message"]
    else:
        for one, other in zip(told["data"], (b"cde", b"f"), strict=True):
            wants = chances([*b"ab", *other], [0, 0] + [1] * len(other))
            assert one["score"] == pytest.approx(float(wants[0]), rel=1e-4)
        assert asyncio.run(post(app, "/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}))[0] == 400
    assert asyncio.run(post(app, "/v1/embeddings", {"input": "a"}))[0] == 400
    assert asyncio.run(post(app, "/classify", {"input": "x" * 80}))[0] == 400


def test_problems_and_models_that_classify(tmp_path: Path) -> None:
    config = {"architectures": ["BertForSequenceClassification"], "model_type": "bert", **CONFIGS["bert"]}
    config.pop("attention_dropout", None)
    for problem, activation in (("multi_label_classification", "sigmoid"), ("regression", "identity")):
        said = {**config, "problem_type": problem, "id2label": {"0": "no", "1": "yes"}}
        (tmp_path / "config.json").write_text(json.dumps(said))
        kind = EncoderKind.of(tmp_path, None)
        assert (kind.activation, kind.labels) == (activation, ("no", "yes"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "problem_type": "odd"}))
    with pytest.raises(InputError, match="problem_type 'odd'"):
        EncoderKind.of(tmp_path, None)
    llama = {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama", **CONFIGS["llama"]}
    (tmp_path / "config.json").write_text(json.dumps(llama))
    with pytest.raises(InputError, match="classifies texts by a llama"):
        EncoderKind.of(tmp_path, None)
