"""A replica of several processes answers as one process does: over tp and over pp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the engine's tests need it")
pytest.importorskip("transformers", reason="transformers, which writes the folders, is not installed")

from runtime.hf_models import build, quiet  # noqa: E402
from serve.against_generate import config_of, served  # noqa: E402
from serve.divided import OPEN, RULES, asked, rank  # noqa: E402

from gnomon import schema  # noqa: E402
from gnomon.cli.options.server import ServerOptions  # noqa: E402
from gnomon.cli.serve import settings_of  # noqa: E402
from gnomon.errors import InputError, PlanError  # noqa: E402
from gnomon.runtime.processes.local import Processes  # noqa: E402
from gnomon.serve.load import look, open_model  # noqa: E402
from gnomon.serve.sizes import Ways  # noqa: E402
from gnomon.serving.file import ServeFile  # noqa: E402
from gnomon.serving.layout import Serving  # noqa: E402
from gnomon.software.engine import engine  # noqa: E402

pytestmark = pytest.mark.torch

KINDS = ("llama", "bloom", "gemma2", "deepseek_v3", "gpt_oss", "mamba2")
WAYS = Ways(tp=2, pp=2)


def test_a_divided_model_answers_as_one_process_does(tmp_path: Path) -> None:
    """Fused and separate projections, biases, tied tables, linear biases, windows, latent attention, experts with and
    without biases, scans. Over tp alone, as a server: `test_server`."""
    folders, wanted = [], []
    for kind in KINDS:
        folders.append(str(tmp_path / kind))
        served(kind, tmp_path / kind)
        wanted.append(asked([open_model(tmp_path / kind, RULES, **OPEN)]))
    made = [own for own, _ in Processes(rank, WAYS.ranks, (folders, WAYS), start_method="forkserver").results()[0]]
    assert dict(zip(KINDS, made, strict=True)) == dict(zip(KINDS, wanted, strict=True))


@pytest.mark.parametrize(
    ("kind", "ways", "more"),
    [
        ("deepseek_v3", Ways(tp=2, ep=2), {"num_hidden_layers": 4}),
        ("gpt_oss", Ways(tp=4, ep=2), {"num_local_experts": 8}),
    ],
)
def test_experts_dealt_out_and_copied_answer_as_one_process_does(
    kind: str, ways: Ways, more: dict[str, int], tmp_path: Path
) -> None:
    """Whole, beside a shared expert; and with biases, each shared by two. Then with copies of those that the next layer
    is foreseen to want, wherever a row is foreseen to move."""
    with quiet():
        build(kind, {**config_of(kind, 512), **more}).float().save_pretrained(tmp_path)
    wanted = asked([open_model(tmp_path, RULES, **OPEN)])
    made = Processes(rank, ways.ranks, ([str(tmp_path)], ways, (0, 2)), start_method="forkserver").results()[0]
    assert [answers for answers, _ in made] == [wanted, wanted]
    assert made[0][1] == 0 < made[1][1]


def test_a_plan_that_deals_out_experts_is_served_and_what_is_only_predicted_is_refused(tmp_path: Path) -> None:
    def planned(**axes: int) -> Ways:
        layout = Serving(weights="fp32", kv="fp32", max_model_len=64, **axes)
        file = tmp_path / "serve.toml"
        schema.save_file(ServeFile.of("mixtral", "2xcpu-process", layout, engine("gnomon")), file)
        made: Ways = settings_of(ServerOptions(folder=str(tmp_path), plan=str(file))).ways
        return made

    assert planned(tp=2, ep=2) == Ways(tp=2, ep=2)
    with pytest.raises(InputError, match=r"dp = 2: attention's data parallelism is predicted only"):
        planned(tp=1, dp=2)
    with pytest.raises(InputError, match="2 copies of experts, which are predicted only"):
        planned(tp=2, ep=2, redundant_experts=2)
    assert (
        settings_of(ServerOptions(folder=str(tmp_path), tensor_parallel_size=2, expert_parallel_size=2)).ways.etp == 1
    )


def test_copies_of_experts_want_experts_of_others_in_memory(tmp_path: Path) -> None:
    def settings(**more: Any) -> Any:
        return settings_of(ServerOptions(folder=str(tmp_path), **more))

    dealt = {"tensor_parallel_size": 2, "expert_parallel_size": 2}
    assert settings(**dealt, expert_copies=2, record_experts="paths.npz").expert_copies == 2
    for wrong, why in (
        ({"expert_copies": 2}, "--expert-parallel-size 2"),
        ({**dealt, "expert_copies": 2, "stream_weights": "1 MiB"}, "leave --stream-weights out"),
        ({"replicas": 2, "record_experts": "paths.npz"}, "one replica"),
    ):
        with pytest.raises(InputError, match=why):
            settings(**wrong)
    layout = Serving(weights="fp32", kv="fp32", max_model_len=64, tp=2, ep=2, expert_copies=3)
    schema.save_file(ServeFile.of("mixtral", "2xcpu-process", layout, engine("gnomon")), tmp_path / "serve.toml")
    assert settings(plan=str(tmp_path / "serve.toml")).expert_copies == 3


def test_what_does_not_divide_is_said(tmp_path: Path) -> None:
    served("granitemoehybrid", tmp_path / "hybrid")
    with pytest.raises(PlanError, match="tp = 2 does not divide 1"):
        look(tmp_path / "hybrid", RULES, ways=Ways(tp=2), **OPEN)
    served("llama", tmp_path / "llama")
    with pytest.raises(PlanError, match="tp = 3 does not divide"):
        look(tmp_path / "llama", RULES, ways=Ways(tp=3), **OPEN)
    with pytest.raises(PlanError, match=r"no experts that ep = 2"):
        look(tmp_path / "llama", RULES, ways=Ways(tp=2, ep=2), **OPEN)
    with pytest.raises(InputError, match="does not divide tensor-parallel size 2"):
        Ways(tp=2, ep=3)
    with pytest.raises(PlanError, match="lower pp"):
        look(tmp_path / "llama", RULES, ways=Ways(pp=64), **OPEN)
