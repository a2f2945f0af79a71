"""A replica of several processes answers as one process does: over tp and over pp."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the engine's tests need it")
pytest.importorskip("transformers", reason="transformers, which writes the folders, is not installed")

from serve.against_generate import served  # noqa: E402
from serve.divided import OPEN, RULES, asked, rank  # noqa: E402

from gnomon.errors import InputError, PlanError  # noqa: E402
from gnomon.runtime.processes.local import Processes  # noqa: E402
from gnomon.serve.load import look, open_model  # noqa: E402
from gnomon.serve.sizes import Ways  # noqa: E402

pytestmark = pytest.mark.torch

KINDS = ("llama", "bloom", "gemma2", "deepseek_v3", "gpt_oss", "mamba2")
WAYS = Ways(tp=2, pp=2)
MIXTURES = ("mixtral", "deepseek_v3", "gpt_oss")


def test_a_divided_model_answers_as_one_process_does(tmp_path: Path) -> None:
    """Fused and separate projections, biases, tied tables, linear biases, windows, latent attention, experts with and
    without biases, scans. Over tp alone, as a server: `test_server`."""
    folders, wanted = [], []
    for kind in KINDS:
        folders.append(str(tmp_path / kind))
        served(kind, tmp_path / kind)
        wanted.append(asked([open_model(tmp_path / kind, RULES, **OPEN)]))
    made = Processes(rank, WAYS.ranks, (folders, WAYS), start_method="forkserver").results()[0]
    assert dict(zip(KINDS, made, strict=True)) == dict(zip(KINDS, wanted, strict=True))


@pytest.mark.parametrize("ways", [Ways(tp=2, ep=2), Ways(tp=4, ep=2)], ids=["ep2", "tp4-ep2"])
def test_experts_dealt_out_answer_as_one_process_does(ways: Ways, tmp_path: Path) -> None:
    """Whole, and each shared by two; with biases, and a shared expert beside."""
    kinds = MIXTURES if ways.etp == 1 else ("gpt_oss",)
    folders, wanted = [], []
    for kind in kinds:
        folders.append(str(tmp_path / kind))
        served(kind, tmp_path / kind)
        wanted.append(asked([open_model(tmp_path / kind, RULES, **OPEN)]))
    made = Processes(rank, ways.ranks, (folders, ways), start_method="forkserver").results()[0]
    assert dict(zip(kinds, made, strict=True)) == dict(zip(kinds, wanted, strict=True))


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
