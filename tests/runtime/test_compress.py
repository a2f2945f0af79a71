"""Folders that `gnomon compress` writes: codes by the formula, zeros where they should be, read back, and refusals.

Oracles: the formulas written out here, and transformers on the widened weights.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runtime.hf_models import CONFIGS, build, quiet
from safetensors.torch import load_file, save_file
from torch.nn import functional

from gnomon.cli import main
from gnomon.errors import InputError
from gnomon.formats.huggingface.known import layout
from gnomon.runtime.checkpoint import pretrained
from gnomon.runtime.checkpoint.admm import admm
from gnomon.runtime.checkpoint.awq import _best, scales_of
from gnomon.runtime.checkpoint.compress import by_rows, compress, gptq, inputs_of_linears, read_text, wanda
from gnomon.runtime.parameters.packed import PackedFolder, open_folder
from gnomon.runtime.parameters.weights import Folder
from gnomon.storage.integers import Integers
from gnomon.storage.n_of_m import NM
from gnomon.storage.names import storage_of  # noqa: E402
from gnomon.storage.unstructured import Bitmap

UP = "model.layers.0.mlp.up_proj.weight"
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write(folder: Path, dtype: torch.dtype) -> Path:
    config = {**CONFIGS["llama"], "vocab_size": 256, "intermediate_size": 64, "hidden_size": 64, "head_dim": 16}
    torch.manual_seed(0)
    with quiet():
        build("llama", config).to(dtype).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("compress") / "base", torch.float32)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": f"line {i}: a fox jumps over {i * i} dogs"}) + "\n" for i in range(60)))
    return path


def compressed(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main(["compress", *map(str, words), "--json"]) == 0
    made: dict[str, Any] = json.loads(capsys.readouterr().out)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_mean_what_the_formula_gives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: torch.dtype, bits: int
) -> None:
    """(code - 2^(bits - 1)) * scale of a group of 32, scale = largest / (2^(bits - 1) - 1) in the folder's dtype."""
    source, out = write(tmp_path / "in", dtype), tmp_path / "out"
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    made = compressed(capsys, source, "--bits", bits, "--group", 32, "-o", out)
    assert made["loss"] is None and made["bytes_after"] < made["bytes_before"]
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before
    old, new, folder = load_file(source / "model.safetensors"), load_file(out / "model.safetensors"), open_folder(out)
    assert isinstance(folder, PackedFolder)
    for name, weight in old.items():
        if name.split(".")[-2] not in LINEARS:
            assert torch.equal(new[name], weight), name
            continue
        words, scales = new[f"{name}_packed"], new[f"{name}_scale"]
        assert scales.dtype == dtype and new[f"{name}_shape"].tolist() == list(weight.shape)
        shifts = torch.arange(0, 32, bits)
        codes = ((words.long()[..., None] >> shifts) & (2**bits - 1)).flatten(1) - 2 ** (bits - 1)
        groups = weight.float().reshape(len(weight), -1, 32)
        top = 2 ** (bits - 1) - 1
        assert torch.equal(scales, (groups.abs().amax(-1) / top).to(dtype)), name
        by = scales.float()[..., None]
        wanted = (groups / by).round().clamp(-top - 1, top)
        assert torch.equal(codes.float().reshape(len(codes), -1, 32), wanted), name
        assert torch.equal(folder.read(name), (wanted * by).flatten(1)), name
        off = float((folder.read(name) - weight.float()).norm() / weight.float().norm())
        assert made["errors"][name] == pytest.approx(off, rel=1e-4)


@pytest.mark.parametrize("form", ["2:4", "4:16", "0.9", "block:16x16:0.75"])
@pytest.mark.parametrize("method", ["magnitude", "wanda", "admm"])
def test_so_many_are_kept(
    base: Path, corpus: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, form: str, method: str
) -> None:
    monkeypatch.setattr(
        "gnomon.runtime.checkpoint.compress.columns_read", lambda graph, kept, vectors: kept
    )  # the pattern alone
    out = tmp_path / "out"
    made = compressed(capsys, base, "--sparsity", form, "--method", method, "--data", corpus, "-o", out)
    assert np.isfinite([made["loss"]["before"], made["loss"]["after"]]).all()
    old, new = load_file(base / "model.safetensors"), load_file(out / "model.safetensors")
    assert old.keys() == new.keys()
    for name, weight in new.items():
        if name.split(".")[-2] not in LINEARS:
            assert torch.equal(weight, old[name])
            continue
        kept = weight != 0
        assert method == "admm" or torch.equal(weight[kept], old[name][kept])
        if ":" in form and not form.startswith("block"):
            n, m = map(int, form.split(":"))
            assert (kept.reshape(len(kept), -1, m).sum(-1) == n).all(), name
        elif form == "0.9":
            rows = [round(0.1 * weight.shape[1])] * weight.shape[0]
            assert (
                int(kept.sum()) == round(0.1 * weight.numel())
                if method == "magnitude"
                else kept.sum(1).tolist() == rows
            )
        else:
            tiles = kept.reshape(len(kept) // 16, 16, -1, 16).transpose(1, 2)
            assert int(tiles.any(-1).any(-1).sum()) == round(0.25 * weight.numel() / 256)
            assert bool((tiles.flatten(2).all(-1) | ~tiles.flatten(2).any(-1)).all())
    assert json.loads((out / "config.json").read_text())["sparsity_config"]["storage"] == form


@pytest.mark.parametrize("words", [("--bits", 4), ("--bits", 4, "--method", "gptq"), ("--sparsity", "2:4")])
def test_the_loss_is_that_of_transformers(
    base: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[object, ...]
) -> None:
    """On the held-out rows, with the weights that the new folder stands for."""
    out = tmp_path / "out"
    loss = compressed(capsys, base, *words, "--data", corpus, "-o", out)["loss"]
    rows, folder = read_text(corpus, base, None).held_out, open_folder(out)
    with quiet():
        model = build("llama", json.loads((base / "config.json").read_text())).float()
    for which, weights in (("before", open_folder(base)), ("after", folder)):
        model.load_state_dict({name: weights.read(name).clone() for name in weights.entries}, strict=False)
        with torch.no_grad():
            logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        wanted = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        assert loss[which] == pytest.approx(float(wanted), rel=1e-5)
    assert loss["tokens"] == rows[:, 1:].numel() and loss["before"] != loss["after"]
    graph = pretrained.model_of(out).graph
    assert graph.num_parameters() == pretrained.model_of(base).graph.num_parameters()


def test_inputs_are_those_of_transformers(base: Path, corpus: Path) -> None:
    """Sums of squares of what each linear is given over the rows that a method sees."""
    rows, model = read_text(corpus, base, None).tokens, pretrained.model_of(base)
    where = layout(model.graph, model.model_type)
    ours = inputs_of_linears(pretrained.load(base), where, rows, squares=True).sums
    with quiet():
        theirs = build("llama", json.loads((base / "config.json").read_text())).float()
    theirs.load_state_dict(load_file(base / "model.safetensors"), strict=False)
    wanted: dict[str, torch.Tensor] = {}
    for name, module in theirs.named_modules():
        if name.endswith(LINEARS):

            def keep(_: object, given: tuple[torch.Tensor, ...], name: str = f"{name}.weight") -> None:
                x = given[0].detach().flatten(0, -2).double()
                wanted[name] = x.T @ x

            module.register_forward_pre_hook(keep)
    with torch.no_grad():
        theirs(input_ids=rows[:, :-1], use_cache=False)
    assert len(wanted) == 14 and wanted.keys() <= ours.keys()
    for name, square in wanted.items():
        torch.testing.assert_close(ours[name], square, rtol=1e-4, atol=1e-4 * float(square.abs().max()))


@pytest.mark.parametrize(
    ("kind", "why"),
    [("t5", "it reads decoder_input_ids"), ("bert", "it reads token_type_ids")],
)
def test_no_loss_is_measured_where_it_is_another(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, why: str
) -> None:
    with quiet():
        build(kind, {**CONFIGS[kind], "vocab_size": 256}).save_pretrained(tmp_path / "in")
    config = json.loads((tmp_path / "in/config.json").read_text())
    config.pop("attention_dropout", None)
    (tmp_path / "in/config.json").write_text(json.dumps(config))
    words = ["compress", str(tmp_path / "in"), "--bits", "8", "--group", "0", "-o", str(tmp_path / "out")]
    assert main([*words, "--data", str(corpus)]) == 2
    assert why in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert main(words) == 0


def test_files_with_an_index_stay_so_many(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with quiet():
        model = build("llama", json.loads((base / "config.json").read_text())).float()
        model.load_state_dict(load_file(base / "model.safetensors"), strict=False)
        model.save_pretrained(tmp_path / "in", max_shard_size="60KB")
    compressed(capsys, tmp_path / "in", "--bits", 4, "-o", tmp_path / "out")
    compressed(capsys, base, "--bits", 4, "-o", tmp_path / "one")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1 and f"{UP}_packed" in index["weight_map"]
    many, one = open_folder(tmp_path / "out"), open_folder(tmp_path / "one")
    assert many.entries.keys() == one.entries.keys()
    assert all(torch.equal(many.read(name), one.read(name)) for name in one.entries)


def test_a_loss_that_is_not_finite_leaves_nothing(
    base: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([5.5, float("inf")])
    monkeypatch.setattr("gnomon.runtime.checkpoint.compress._loss", lambda model, rows: next(losses))
    words = ["compress", str(base), "--sparsity", "0.9", "--data", str(corpus), "-o", str(tmp_path / "out")]
    assert main(words) == 2
    assert "the loss would be inf (it was 5.5000); nothing was written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_packed_folder_writes_words_and_is_not_exported_to(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compressed(capsys, base, "--bits", 8, "-o", tmp_path / "out")
    assert main(["generate", str(tmp_path / "out"), "--prompt", "a fox", "--count", "3", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["ids"]) == 3
    with pytest.raises(InputError, match="has its weights packed"):
        pretrained.check_export(tmp_path / "new", tmp_path / "out")


def test_gptq_loses_less_of_the_product_than_rounding() -> None:
    """On inputs that go together; with inputs that have nothing to do with each other it is rounding."""
    chance = np.random.default_rng(0)
    weight = chance.normal(size=(24, 64)).astype(np.float32)
    x = chance.normal(size=(256, 8)) @ chance.normal(size=(8, 64)) + 0.1 * chance.normal(size=(256, 64))
    form = Integers(bits=4, group=32, scale="float32")
    plain = form.narrow(weight)

    def lost(arrays: Any) -> float:
        return float(np.linalg.norm(x @ (form.widen(arrays, weight.shape) - weight).T))

    assert lost(gptq(form, weight, x.T @ x, lambda scales: scales)) < 0.6 * lost(plain)
    apart = gptq(form, weight, np.eye(64), lambda scales: scales)
    assert all(np.array_equal(apart[name], plain[name]) for name in plain)


def test_wanda_keeps_what_is_large_times_its_input() -> None:
    chance = np.random.default_rng(1)
    score, sums = np.abs(chance.normal(size=(6, 16))).astype(np.float32), chance.uniform(0, 9, 16)
    by = score * np.sqrt(sums)
    kept = wanda(NM(n=2, m=4), score, sums)
    for row in range(6):
        for start in range(0, 16, 4):
            best = sorted(range(start, start + 4), key=lambda i: -by[row, i])[:2]
            assert set(np.flatnonzero(kept[row, start : start + 4]) + start) == set(best)
    kept = wanda(Bitmap(kept=0.25), score, sums)
    assert all(set(np.flatnonzero(kept[row])) == set(np.argsort(-by[row])[:4]) for row in range(6))


def test_admm_loses_less_of_the_product_than_what_only_puts_zeros() -> None:
    """Inputs that go together make up for each other's weights."""
    chance = np.random.default_rng(0)
    x = chance.standard_normal((400, 24)) @ chance.standard_normal((24, 64)) + 0.3 * chance.standard_normal((400, 64))
    x *= chance.uniform(0.2, 3, 64)
    weight, squares = chance.standard_normal((32, 64)).astype(np.float32), x.T @ x
    for storage in (NM(n=2, m=4), NM(n=4, m=16), Bitmap(kept=0.3)):

        def lost(made: np.ndarray) -> float:
            return float(np.linalg.norm(x @ (made - weight).T))

        made = admm(weight, squares, lambda sizes, storage=storage: by_rows(storage, sizes))
        plain = np.where(storage.mask(np.abs(weight)), weight, 0)
        chosen = np.where(wanda(storage, np.abs(weight), np.diag(squares)), weight, 0)
        assert lost(made) < 0.8 * min(lost(plain), lost(chosen))
        assert (made != 0).sum() <= (chosen != 0).sum() and np.array_equal(
            made, np.where(storage.of_zeros(made)[1], made, 0)
        )


@pytest.mark.parametrize("bits", ["fp8", "ternary"])
def test_eight_bit_floats_and_ternary_weights_mean_what_the_formulas_give(
    bits: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = compressed(capsys, base, "--bits", bits, "-o", tmp_path / "out")
    folder, whole = open_folder(tmp_path / "out"), Folder.of(base)
    files = load_file(str(tmp_path / "out" / "model.safetensors"))
    assert made["errors"]
    for name in made["errors"]:
        read, weight = folder.read(name), whole.read(name).float()
        if bits == "fp8":
            assert files[name].dtype == torch.float8_e4m3fn
            assert torch.equal(read, files[name].float() * files[f"{name}_scale"])
            assert (read - weight).abs().max() <= weight.abs().max() / 16
        else:
            groups = read.view(len(read), -1, min(64, read.shape[1]))
            sizes = weight.view(groups.shape).abs().mean(-1, keepdim=True)
            assert torch.allclose(groups.abs(), sizes * (groups != 0), rtol=1e-2)
            assert torch.equal(groups.sign(), (weight.view(groups.shape) / sizes).round().clamp(-1, 1).sign())
    pretrained.load(tmp_path / "out")


def test_what_cannot_be_done_is_one_line_and_leaves_nothing(
    base: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    shutil.copy(base / "config.json", tmp_path / "empty")
    damaged = tmp_path / "damaged"
    shutil.copytree(base, damaged)
    held = load_file(base / "model.safetensors")
    held[UP] = held[UP].clone()
    held[UP][0, 0] = float("nan")
    save_file(held, damaged / "model.safetensors")
    little = tmp_path / "little.txt"
    little.write_text("ab")
    assert main(["compress", str(base), "--bits", "4", "-o", str(tmp_path / "packed")]) == 0
    before, out = sorted(tmp_path.iterdir()), tmp_path / "out"
    for words, said in (
        ((base, "--bits", 5), "is none of 4, 8, fp8, ternary"),
        ((base,), "--bits 4, 8, fp8 or ternary, or --sparsity"),
        ((base, "--bits", "fp8", "--group", 32), "a scale for each output"),
        ((base, "--bits", "ternary", "--method", "gptq"), "rounds to -1, 0 and 1"),
        ((base, "--bits", 4, "--sparsity", "2:4"), "not both"),
        ((base, "--bits", 4, "--group", 48), "of the 48 that share a scale; take --group "),
        ((base / "model.safetensors", "--bits", 4), "is a file; give its folder"),
        ((base, "--bits", 4, "--method", "wanda"), "takes rtn or gptq"),
        ((base, "--bits", 4, "--method", "gptq"), "give it text (--data)"),
        ((base, "--sparsity", "4:2"), "0 < n < m"),
        ((base, "--sparsity", "3:7"), "no multiple of 7"),
        ((base, "--sparsity", "csr:0.9"), "is not known"),
        ((base, "--sparsity", "block:0x16:0.9"), "is not known"),
        ((base, "--sparsity", "block:48x16"), "does not divide into blocks of 48 x 16"),
        ((base, "--sparsity", "1.5"), "is not known"),
        ((base, "--sparsity", "2:4", "--group", 64), "leave it out"),
        ((tmp_path / "none", "--bits", 4), "there is no folder"),
        ((tmp_path / "empty", "--bits", 4), "no model.safetensors"),
        ((tmp_path / "packed", "--bits", 8), "quantised already"),
        ((damaged, "--bits", 4), "not finite"),
        ((damaged, "--sparsity", "2:4", "--data", corpus), "the loss of"),
        ((base, "--bits", 4, "--data", little), "give more text"),
    ):
        assert main(["compress", *map(str, words), "-o", str(out)]) == 2, words
        error = capsys.readouterr().err.strip().splitlines()
        assert said in error[-1], (words, error)
        assert sorted(tmp_path.iterdir()) == before, words
    assert main(["compress", str(base), "--bits", "4", "-o", str(tmp_path / "packed")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["compress", str(base), "--bits", "4", "-o", str(base / "inside")]) == 2
    assert "nothing is changed" in capsys.readouterr().err


def test_what_is_printed(base: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compress", str(base), "--bits", "8", "-o", str(tmp_path / "a")]) == 0
    assert "loss   not measured" in capsys.readouterr().out
    assert main(["compress", str(base), "--bits", "8", "--data", str(corpus), "-o", str(tmp_path / "b")]) == 0
    text = capsys.readouterr().out
    assert "held-out tokens" in text and "relative error" in text and "worst of 14" in text


def test_awq_takes_its_scales_back_and_rounds_nearer_where_inputs_are_large(
    base: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every power is tried here one by one; in eight bits the function is that of the folder that it was made from."""
    made = compressed(
        capsys, base, "--bits", 8, "--group", 16, "--method", "awq", "--data", corpus, "-o", tmp_path / "8"
    )
    assert made["loss"]["after"] == pytest.approx(made["loss"]["before"], abs=2e-3)
    old, new = load_file(base / "model.safetensors"), load_file(tmp_path / "8" / "model.safetensors")
    norm = "model.layers.0.post_attention_layernorm.weight"
    assert not torch.equal(old[norm], new[norm]) and torch.equal(old["model.norm.weight"], new["model.norm.weight"])
    scales = (old[norm] / new[norm]).numpy()
    folder = open_folder(tmp_path / "8")
    up = folder.read(UP).numpy() / scales
    by = (folder.read(UP.replace("up_proj", "gate_proj")).numpy() / scales) / old[
        UP.replace("up_proj", "gate_proj")
    ].numpy()
    assert np.median(np.abs(by - 1)) < 0.02
    rows = np.median(up / old[UP].numpy(), 1)  # the linear before takes back what the next one's inputs were given
    down = (
        folder.read(UP.replace("up_proj", "down_proj")).numpy() * rows / old[UP.replace("up_proj", "down_proj")].numpy()
    )
    assert np.median(np.abs(down - 1)) < 0.02

    rng, form = np.random.default_rng(0), Integers(bits=4, group=16, scale="float32")
    weights = {"a": rng.normal(size=(12, 32)).astype(np.float32), "b": rng.normal(size=(8, 32)).astype(np.float32)}
    x = rng.normal(size=(50, 32)) * np.where(np.arange(32) % 11 == 0, 30, 1)

    def rounded(w: np.ndarray) -> np.ndarray:
        return form.widen(form.narrow(w), (w.shape[0], w.shape[1]))

    chosen = _best(weights, x.T @ x, rounded)

    def error(s: np.ndarray) -> float:
        return sum(float(np.sum(((rounded(w * s) / s - w) @ x.T) ** 2)) for w in weights.values())

    size = np.sqrt((x**2).sum(0))
    powers = [size ** (i / 20) / np.sqrt((size ** (i / 20)).max() * (size ** (i / 20)).min()) for i in range(20)]
    errors = [error(s.astype(np.float32)) for s in powers]
    assert error(chosen) == pytest.approx(min(errors), rel=1e-4) and min(errors) < 0.5 * errors[0]


def test_awq_is_refused_where_it_has_no_place_for_scales(
    corpus: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match="whose places are known of llama, .* and this is gemma; take gptq"):
        scales_of({}, "gemma", lambda name: np.zeros((1, 1), np.float32), {}, lambda x: x)
    for words in (("--bits", "4"), ("--bits", "fp8", "--data", corpus), ("--sparsity", "2:4", "--data", corpus)):
        assert main(["compress", str(base), *map(str, words), "--method", "awq", "-o", str(tmp_path / "out")]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1 and not (tmp_path / "out").exists()


def test_layers_errors_are_those_of_what_they_make(
    base: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside transformers' hidden states of both folders."""
    made = compressed(capsys, base, "--sparsity", "2:4", "--data", corpus, "-o", tmp_path / "out")
    from transformers import AutoModelForCausalLM

    row = read_text(corpus, base, None).held_out[0][None, :-1]
    states = []
    for folder in (base, tmp_path / "out"):
        with quiet(), torch.no_grad():
            model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
            seen: list[torch.Tensor] = []
            for layer in model.model.layers:
                layer.register_forward_hook(lambda m, i, o, seen=seen: seen.append(o[0] if isinstance(o, tuple) else o))
            model(input_ids=row)
        states.append(seen)
    for n, one in enumerate(made["layers"]):
        wanted = float((states[1][n] - states[0][n]).norm() / states[0][n].norm())
        assert one["layer"] == n and one["outputs"] == pytest.approx(wanted, rel=1e-3)
        own = {name: e for name, e in made["errors"].items() if f".{n}." in name}
        assert min(own.values()) <= one["weights"] <= max(own.values())
    assert len(made["layers"]) == 2


def test_how_far_it_is_is_told(base: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    made = compress(base, tmp_path / "out", storage_of("int8"), "rtn", note=lambda *far: told.append(far))  # type: ignore[arg-type]
    assert told == [(number, len(made.errors)) for number in range(len(made.errors))]


def test_groups_that_are_too_small_and_gguf_files_are_told_as_such(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compress", str(base), "--bits", "4", "--group", "7", "-o", str(tmp_path / "out")]) == 2
    assert "--group 7: a scale is of 8 weights at least" in capsys.readouterr().err
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert main(["compress", str(file), "--bits", "4", "-o", str(tmp_path / "out")]) == 2
    assert f"gnomon checkpoint convert {file} --to fp32 -o FOLDER" in capsys.readouterr().err


def test_what_zeros_make_idle_changes_no_result(
    base: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks leave whole rows and columns; without the propagation the folder gives the same numbers, bit by bit."""
    words = (base, "--sparsity", "block:16x16:0.8", "--data", corpus)
    less = compressed(capsys, *words, "-o", tmp_path / "less")
    monkeypatch.setattr("gnomon.runtime.checkpoint.compress.columns_read", lambda graph, kept, vectors: kept)
    plain = compressed(capsys, *words, "-o", tmp_path / "plain")
    assert less["idle"] > 0 == plain["idle"] and less["loss"] == plain["loss"]
    ids = torch.arange(24)[None] * 5 % 200
    made: Any = [pretrained.load(tmp_path / name, logits=True).output({"input_ids": ids}) for name in ("less", "plain")]
    assert torch.equal(made[0], made[1])
    zeros = [sum(int((x == 0).sum()) for x in load_file(tmp_path / name / "model.safetensors").values())
             for name in ("less", "plain")]  # fmt: skip
    assert zeros[0] - zeros[1] == less["idle"]
