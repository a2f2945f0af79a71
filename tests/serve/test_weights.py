"""Weights that stay in few bits while they are served: what is computed is the rounded model, and no copy is whole."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the engine's tests need it")
pytest.importorskip("transformers", reason="transformers, which writes the folders, is not installed")

from serve.against_generate import config_of, greedy, served  # noqa: E402

from gnomon.compiler.kernels import stored  # noqa: E402
from gnomon.errors import InputError  # noqa: E402
from gnomon.runtime.checkpoint.compress import compress  # noqa: E402
from gnomon.serve.engine import Engine  # noqa: E402
from gnomon.serve.load import Weights, open_model  # noqa: E402
from gnomon.serve.matrices import Forms  # noqa: E402
from gnomon.software.engine import engine as rules_of  # noqa: E402
from gnomon.storage.names import storage_of  # noqa: E402

pytestmark = pytest.mark.torch
PROMPT = [3 + (7 * i) % 90 for i in range(21)]


def logits_of(engine: Engine) -> torch.Tensor:
    """Of a prompt in pieces and two tokens after it."""
    seen: list[torch.Tensor] = []
    forward = engine.model.forward
    engine.model.forward = lambda rows: seen.append(forward(rows).float()) or seen[-1]  # type: ignore[method-assign]
    engine.add(PROMPT, greedy(3))
    while engine.has_work:
        engine.step()
    return torch.cat(seen)


class _Rounded(Weights):
    """Every matrix as a storage rounds it, by numpy alone; the head in rows of eight bits."""

    form = "int8"

    def mapped(self, name: str) -> torch.Tensor:
        return self[name]

    def __getitem__(self, name: str) -> torch.Tensor:
        value = super().__getitem__(name)
        if value.dim() < 2 or "gate.weight" in name:
            return value
        storage = storage_of("int8" if "embed" in name or "head" in name else self.form)
        matrix = value.float().reshape(-1, value.shape[-1] if "o_proj" not in name else value[0].numel())
        wide = storage.widen(storage.narrow(matrix.numpy()), (len(matrix), matrix.shape[1]))
        return torch.from_numpy(wide).view(value.shape).to(value.dtype)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_a_file_that_is_overwritten_later_changes_nothing(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices are packed from where they lie in their file, and nothing goes on to lie there: tied tables, biases,
    joined matrices, and with fp64, which no kernel computes with."""
    monkeypatch.setattr(
        "serve.against_generate.config_of",
        lambda kind, size: {**config_of(kind, size), "tie_word_embeddings": True},
    )
    served("qwen2", tmp_path)
    engine = open_model(tmp_path, rules_of("gnomon"), dtype=dtype, kv_bytes=1 << 26, max_model_len=64)
    wanted = logits_of(engine)
    for file in tmp_path.rglob("*.safetensors"):
        with file.open("r+b") as out:
            out.write(b"\x11" * file.stat().st_size)
    assert torch.equal(logits_of(engine), wanted)


@pytest.mark.parametrize(("kind", "form"), [("llama", "int8"), ("llama", "int4-g32"), ("qwen3_moe", "int8")])
def test_rounded_weights_give_the_rounded_models_logits(
    kind: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernels, whose activations have eight bits too, and by float32 with weights that numpy rounded."""
    length = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
    monkeypatch.setattr(
        "serve.against_generate.config_of",
        lambda kind, size: {**(own := config_of(kind, size)), **{k: v for k, v in length.items() if k in own}},
    )
    _, plain = served(kind, tmp_path)
    monkeypatch.setattr(_Rounded, "form", form)
    whole = logits_of(plain)
    with monkeypatch.context() as patch:
        patch.setattr("gnomon.serve.load.Weights", _Rounded)
        wanted = logits_of(open_model(tmp_path, plain.rules, dtype="fp32", kv_bytes=1 << 24))
    for dtype in ("fp32", "bf16"):
        ours = open_model(tmp_path, plain.rules, dtype=dtype, weights=form, kv_bytes=1 << 24)
        got = logits_of(ours)
        off = (got - wanted).abs().max() / wanted.abs().max()
        assert off < (0.03 if dtype == "fp32" else 0.06), (kind, form, dtype, float(off))
    if form.startswith("int4"):  # the rounding is much more than what kernels add to it
        assert (whole - wanted).abs().max() > 2 * (got - wanted).abs().max()


def test_a_compressed_folder_stays_packed_in_bfloat16_and_is_exact_in_float32(tmp_path: Path) -> None:
    served("llama", tmp_path / "whole")
    compress(tmp_path / "whole", tmp_path / "small", storage_of("int4-g16"), "rtn")  # type: ignore[arg-type]
    rules = served("llama", tmp_path / "whole")[1].rules
    exact = open_model(tmp_path / "small", rules, dtype="fp32", kv_bytes=1 << 24)
    packed = open_model(tmp_path / "small", rules, dtype="bf16", kv_bytes=1 << 24)
    forms = {one.storage.name for one in packed.model.program.weights}
    assert {"int4-g16"} < forms and {one.storage.name for one in exact.model.program.weights} == {"fp32"}
    wanted, got = logits_of(exact), logits_of(packed)
    assert (got - wanted).abs().max() < 0.06 * wanted.abs().max()
    layers = [one for one in packed.model.program.weights if one.storage.name == "int4-g16"]
    assert all(one.by == "kernel" and one.bytes * 2 < one.shape[0] * one.shape[1] * 2 for one in layers)


@pytest.mark.parametrize("form", ["2:4", "0.75"])
def test_a_sparse_folder_is_multiplied_by_what_it_keeps(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Zeros are not multiplied by, and the numbers are those of the same folder read as whole matrices; what was taken
    and why is said."""
    served("llama", tmp_path / "whole")
    compress(tmp_path / "whole", tmp_path / "small", storage_of(form), "magnitude")  # type: ignore[arg-type]
    rules = served("llama", tmp_path / "whole")[1].rules
    with monkeypatch.context() as patch:
        patch.setattr("gnomon.serve.load.sparse_as", lambda path: None)
        wanted = logits_of(open_model(tmp_path / "small", rules, dtype="fp32", kv_bytes=1 << 24))
        patch.undo()
        patch.setattr(stored, "has_sparse", lambda: False)
        capsys.readouterr()
        whole = open_model(tmp_path / "small", rules, dtype="fp32", kv_bytes=1 << 24)
        assert f"matrices of {form} are multiplied whole: kernels of sparse weights are for" in capsys.readouterr().err
        assert (logits_of(whole) - wanted).abs().max() < 1e-5 * wanted.abs().max()
    if not stored.has_sparse():
        pytest.skip("this machine multiplies sparse weights whole")
    # matrices of this size are as fast whole: what is predicted of them is said here
    taken = "n of m" if form == "2:4" else "listed"
    monkeypatch.setattr(stored, "predicted", lambda *_: {taken: 1e-6, "dense": 1.0})
    for dtype, near in (("fp32", 1e-5), ("bf16", 0.06)):
        ours = open_model(tmp_path / "small", rules, dtype=dtype, kv_bytes=1 << 24)
        layers = [one for one in ours.model.program.weights if isinstance(one, stored.PackedSparse)]
        assert len(layers) == len(ours.model.program.weights) - 1, "all but the head"
        assert all(one.form.kind == taken and one.num_weights * 2 <= one.shape[0] * one.shape[1] for one in layers)
        said = capsys.readouterr().err
        assert f"matrices of {form}" in said
        assert f"by {taken} for 4 rows: predicted ms {taken} 0.001, dense 1000.000" in said
        got = logits_of(ours)[: len(wanted) if dtype == "fp32" else 1]  # roundings may choose other tokens than these
        assert (got - wanted[: len(got)]).abs().max() < near * wanted.abs().max()


def test_a_table_that_is_the_heads_matrix_is_read_by_rows() -> None:
    weight, ids = torch.randn(40, 24), torch.tensor([0, 15, 16, 39, 3])
    for name, limit in (("fp32", 0.0), ("bf16", 4e-3), ("int8", 1e-2)):
        packed = stored.pack(weight, storage_of(name), {"fp32": "fp32", "bf16": "bf16"}.get(name, "int8"))  # type: ignore[arg-type]
        rows = stored.rows_of(packed, ids).float()
        assert (rows - weight[ids]).abs().max() <= limit * weight.abs().max()


@pytest.mark.parametrize(
    ("form", "dtype", "why"),
    [
        ("int4-g64", torch.float64, "take bf16"),
        ("nf4", torch.bfloat16, "served as"),
        ("int5", torch.bfloat16, "no way"),
    ],
)
def test_forms_that_are_not_served_are_refused(form: str, dtype: torch.dtype, why: str) -> None:
    with pytest.raises(InputError, match=why):
        Forms.of(form, dtype)
