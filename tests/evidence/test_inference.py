"""A table of inference runs is read into what a person would have asked, and scored."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from evidence.__main__ import main
from evidence.inference import tables
from evidence.inference.left_out import Refit, best_host
from evidence.inference.rows import read
from evidence.inference.score import scores
from gnomon.errors import InputError
from gnomon.software.engine import engine

COLUMNS = (
    "id family model model_key params_b precision kv_precision device num_devices engine tp pp ep dp mode input_len "
    "output_len load_kind load metric value second_metric second_value third_metric third_value spec_decode flag notes"
).split()


def row(**given: str) -> dict[str, str]:
    plain = {
        "id": "r1", "family": "own", "model_key": "llama3-8b", "precision": "bf16", "device": "h100-sxm-80gb",
        "num_devices": "1", "engine": "vllm", "tp": "1", "pp": "1", "ep": "1", "dp": "1", "mode": "agg",
        "input_len": "512", "output_len": "32", "load_kind": "concurrency", "load": "4", "metric": "tpot_ms",
        "value": "7.5", "second_metric": "ttft_ms", "second_value": "40",
    }  # fmt: skip
    return dict.fromkeys(COLUMNS, "") | plain | given


def test_pools_depths_guesses_and_layers_on_one_device_after_another_are_read() -> None:
    notes = "P:1x(tp4,dp1,ep4) D:5x(tp8,dp1,ep8)"
    asked = read(row(mode="disagg", model_key="deepseek-v3", device="b200-sxm-180gb", notes=notes, num_devices="44"))
    assert asked.pools is not None and (asked.pools.prefill.tp, asked.pools.prefill_count) == (4, 1)
    assert (asked.serving.tp, asked.serving.ep, asked.pools.decode_count) == (8, 8, 5)
    deep = read(
        row(
            engine="llama.cpp", mode="single-stream", load_kind="batch", load="1", metric="tokens_per_s_prefill",
            input_len="10240", notes="prefill; depth 8192; ubatch 256", device="strix-halo-8060s",
        )
    )  # fmt: skip
    assert (deep.prefix, deep.inputs, deep.ubatch) == (8192, 2048, 256)
    assert read(row(spec_decode="mtp", model_key="deepseek-v3", tp="8", num_devices="8")).serving.draft == "mtp"
    split = read(row(engine="llama.cpp", tp="4", num_devices="4"))
    assert (split.serving.tp, split.serving.pp) == (1, 4)
    with pytest.raises(InputError, match="model not in the tables"):
        read(row(model_key="", model="nobody's"))


def test_validate_scores_such_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows([row(), row(id="r2", device="abacus"), row(id="r3", flag="impossible")])
    assert main(["validate", str(path)]) == 0
    out = capsys.readouterr().out
    assert "answered 1 of 2" in out and "device not in the tables" in out
    assert [line.split()[1] for line in out.splitlines() if line.startswith("own") and "answered" not in line] == [
        "TPOT",
        "TTFT",
    ]


def test_constants_without_a_source_do_not_depend_on_it() -> None:
    """Host times and ggml's rates of one source's rows are those that the other gives, whatever its own were."""
    small = {"model_key": "llama3-8b", "input_len": "64", "output_len": "8", "mode": "single-stream", "load": "1"}
    ggml = {**small, "engine": "llama.cpp", "metric": "tokens_per_s_decode", "device": "rtx-4090", "load_kind": "batch"}
    host = {**small, "metric": "latency_ms", "load_kind": "batch"}

    def rows(own: float) -> list[dict[str, str]]:
        return [
            row(id="a", family="own", **{**host, "value": str(60 * own)}),
            row(id="b", family="other", **{**host, "value": "150"}),
            row(id="c", family="own", **{**ggml, "value": str(40 * own)}),
            row(id="d", family="other", **{**ggml, "value": "20"}),
        ]

    one, two = (Refit(rows(own)) for own in (1.0, 3.0))
    vllm, ada = ("vllm", "0.19"), ("ggml", "ada")
    assert one.host_s(vllm, "own") == two.host_s(vllm, "own") == best_host([rows(1.0)[1]]) > 5e-3
    assert one.rates(ada, "own") == two.rates(ada, "own")
    assert one.rates(ada, "other") != two.rates(ada, "other")
    # fitted: twenty tokens a second are what the other's rates give
    [made] = scores(rows(1.0)[3], one.without("own"))
    assert made.predicted == pytest.approx(made.measured, rel=0.02)
    lines = "\n".join(one.lines())
    assert "ggml on ada" in lines and "vllm 0.19" in lines


def test_records_of_engines_of_published_runs_are_whole() -> None:
    """A field that is added to `Engine` is said of these too."""
    found = sorted((Path(tables.__file__).parent / "engines").glob("*.toml"))
    assert len(found) > 5
    for path in found:
        record = engine(str(path))
        assert record.name and {name for fact in record.facts for name in fact.fields} >= {"streams_weights", "version"}
