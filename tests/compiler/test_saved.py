"""Saved ahead of time: a folder that runs without a compiler, refuses other inputs and says what is damaged."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import gnomon  # noqa: E402
from gnomon import trust  # noqa: E402
from gnomon.compiler import build, saved  # noqa: E402
from gnomon.compiler.kernels import columns  # noqa: E402
from gnomon.errors import CaptureError, InputError  # noqa: E402

pytestmark = pytest.mark.torch


class Recommender(nn.Module):
    """Columns of embeddings, a norm, attention and a softmax; one tensor and one keyword in, a dict out."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(50, 8) for _ in range(6))
        self.norm, self.out = nn.LayerNorm(48), nn.Linear(48, 40)
        self.register_buffer("shift", torch.randn(48))

    def forward(self, ids: torch.Tensor, *, dense: torch.Tensor) -> dict[str, torch.Tensor]:
        rows = torch.cat([table(ids[:, n]) for n, table in enumerate(self.tables)], 1)
        hidden = F.gelu(self.norm(rows + self.shift * dense))
        heads = hidden.view(1, -1, 4, 12).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(-1, 48)
        return {"hidden": hidden, "share": F.softmax(self.out(mixed), -1)}


def inputs(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(batch)
    return torch.randint(0, 50, (batch, 6), generator=make), torch.randn(batch, 48, generator=make)


@pytest.fixture(scope="module")
def model() -> Recommender:
    torch.manual_seed(0)
    return Recommender().eval()


@pytest.fixture(scope="module")
def folder(model: Recommender, tmp_path_factory: pytest.TempPathFactory) -> Path:
    ids, dense = inputs(5)
    rows = torch.export.Dim("rows", min=1, max=64)
    place = tmp_path_factory.mktemp("saved") / "model"
    return gnomon.save(
        model, (ids,), place, kwargs={"dense": dense}, dynamic_shapes={"ids": {0: rows}, "dense": {0: rows}}
    )


@pytest.fixture(scope="module")
def loaded(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> saved.LoadedModel:
    """As a process without a compiler has it, with nothing in its cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GNOMON_CACHE", str(tmp_path_factory.mktemp("empty")))
        patch.setattr(build, "_loaded", {})
        patch.setattr(build, "has_compiler", lambda: False)
        columns._kernel.cache_clear()
        made = gnomon.load(folder)
        assert made.compiled.columns and all(planned.function for planned in made.compiled.program.groups)
        assert columns._kernel(torch.float32) is not None
        assert build.libraries(["int other;"]) == [None]
    return made


@given(batch=st.integers(1, 64))
@settings(max_examples=20, deadline=None)
def test_every_size_it_was_saved_for_gives_what_the_module_gives(
    model: Recommender, loaded: saved.LoadedModel, batch: int
) -> None:
    ids, dense = inputs(batch)
    with torch.no_grad():
        want = model(ids, dense=dense)
    got = loaded(ids, dense=dense)
    assert list(got) == list(want)
    for name in want:
        torch.testing.assert_close(got[name], want[name])
        assert not got[name].requires_grad


def test_one_compilation_serves_them_all(loaded: saved.LoadedModel) -> None:
    assert len(loaded.compiled.program.groups) >= 2 and len(loaded.compiled.columns) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda ids, dense: ((ids.int(),), {"dense": dense}), r"'ids' is torch.int32 on cpu, and was saved as torch"),
        (lambda ids, dense: ((ids[:, :5],), {"dense": dense}), r"'ids' is \(3, 5\), and was saved as .*, '6'\)"),
        (lambda ids, dense: ((ids,), {"dense": dense[:2]}), r"'dense' is \(2, 48\), and was saved as"),
        (lambda ids, dense: ((ids[:0],), {"dense": dense[:0]}), r"'ids' is \(0, 6\), .*; 1 <= \w+ <= 64"),
        (lambda ids, dense: (inputs(65)[:1], {"dense": inputs(65)[1]}), r"'ids' is \(65, 6\), .* <= 64"),
        (lambda ids, dense: ((ids,), {}), r"keyword arguments \['dense'\], and got \[\]"),
        (lambda ids, dense: ((ids, ids), {"dense": dense}), "inputs are nested as"),
        (lambda ids, dense: ((3,), {"dense": dense}), "'ids' is int, and was saved as"),
    ],
)  # fmt: skip
def test_other_inputs_are_refused(loaded: saved.LoadedModel, change: object, said: str) -> None:
    args, kwargs = change(*inputs(3))  # type: ignore[operator]
    with pytest.raises(InputError, match=said):
        loaded(*args, **kwargs)


class Magnitudes(nn.Module):
    """Halves of a convolution, which begin at different places of its result; work of one kernel on them, and views."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.out = nn.Conv1d(3, 16, 3), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        real, imaginary = self.parts(x * 2.0 + 1.0).chunk(2, 1)
        return self.out((real.square() + imaginary.square()).sqrt()).transpose(1, 2)[:, 1:].sigmoid()


@pytest.fixture(scope="module")
def magnitudes(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, saved.LoadedModel]:
    torch.manual_seed(0)
    module = Magnitudes().eval()
    place = tmp_path_factory.mktemp("magnitudes") / "model"
    return module, gnomon.load(gnomon.save(module, (torch.randn(2, 3, 8),), place))


def lying(sizes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Inputs of these sizes as a caller may have them."""
    *before, last = sizes
    return {
        "dense": torch.randn(sizes),
        "every second": torch.randn(*before, 2 * last)[..., ::2],
        "turned": torch.randn(sizes[::-1]).permute(*range(len(sizes))[::-1]),
        "one for all": torch.randn(*before, 1).expand(sizes),
        "behind others": torch.randn(3 + torch.Size(sizes).numel())[3:].view(sizes),
        "to be negated": torch.randn(sizes, dtype=torch.complex64).conj().imag,
        "a parameter": nn.Parameter(torch.randn(sizes)),
    }


def test_inputs_that_lie_otherwise_are_read_as_they_lie(
    magnitudes: tuple[nn.Module, saved.LoadedModel], model: Recommender, loaded: saved.LoadedModel
) -> None:
    module, of_one_size = magnitudes
    for _ in range(3):  # on trial, then with what that chose
        for name, x in lying((2, 3, 8)).items():
            made = of_one_size(x)
            torch.testing.assert_close(made, module(x).detach(), msg=lambda said, name=name: f"{name}: {said}")
            assert not made.requires_grad and torch.is_grad_enabled()
    ids = inputs(7)[0]
    for dense in lying((7, 48)).values():  # sizes that change, and keywords
        with torch.no_grad():
            want = model(ids, dense=dense)
        got = loaded(ids.t().contiguous().t(), dense=dense)
        for name in want:
            torch.testing.assert_close(got[name], want[name])
    for wrong in (torch.randn(2, 3, 8).to_sparse(), torch.randn(2, 3, 7), torch.randn(2, 3, 8).double(), 3):
        with pytest.raises(InputError, match="was saved as"):
            of_one_size(wrong)
    with pytest.raises(InputError, match="nested"):
        of_one_size()


def test_views_of_a_saved_program_lie_where_they_lay(magnitudes: tuple[nn.Module, saved.LoadedModel]) -> None:
    module, loaded = magnitudes
    x = torch.randn(2, 3, 8)
    for _ in range(3):
        torch.testing.assert_close(loaded(x), module(x).detach())
    assert not any(trial.verdict.get("wrong") for trial in loaded.compiled.trials.values())
    nodes = {node.target: node for node in loaded.compiled.program.graph.nodes}
    places = [user.meta["val"].storage_offset() for user in nodes[torch.ops.aten.split.Tensor].users]
    assert sorted(places) == [0, 8 * 6]
    with torch.no_grad():  # weights are read at each call
        held = next(one for one in loaded._held if one is not None and one.shape == (5, 6))
        held.mul_(2.0), module.out.weight.mul_(2.0)
        torch.testing.assert_close(loaded(x), module(x))
        held.mul_(0.5), module.out.weight.mul_(0.5)


def test_what_is_damaged_is_named(folder: Path, tmp_path: Path) -> None:
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert {"gnomon.json", "program.pt2", "kernels/0.cpp", "kernels/0.so"} <= {*names}
    for number, name in enumerate(names):
        copy = tmp_path / str(number)
        shutil.copytree(folder, copy)
        content = bytearray((copy / name).read_bytes())
        content[len(content) // 2] ^= 1
        (copy / name).write_bytes(content)
        with pytest.raises(InputError, match="damaged|save the model again|of a saved model|no file of"):
            gnomon.load(copy)
        (copy / name).unlink()
        with pytest.raises(InputError, match="cannot be read"):
            gnomon.load(copy)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"files": {"../../x.so": "0"}}, "names '../../x.so', which is no file of a saved model"),
        ({"files": {}}, "names no program.pt2"),
        ({"files": 3}, "is not of a saved model"),
        ({"format": 2}, "has format 2 and this Gnomon reads 1"),
    ],
)
def test_a_record_that_says_something_else_is_refused(
    folder: Path, tmp_path: Path, change: dict[str, object], said: str
) -> None:
    record = json.loads((folder / saved.RECORD).read_text()) | change
    if "../../x.so" in str(change):
        record["files"] |= {saved.PROGRAM: "0"}
    (tmp_path / saved.RECORD).write_text(json.dumps(record))
    with pytest.raises(InputError, match=said):
        gnomon.load(tmp_path)


def test_another_instruction_set_takes_no_library_of_this_one(
    folder: Path, tmp_path: Path, model: Recommender, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    record = json.loads((copy / saved.RECORD).read_text()) | {"isa": "other"}
    (copy / saved.RECORD).write_text(json.dumps(record))
    monkeypatch.setattr(build, "adopt", None)
    ids, dense = inputs(7)
    torch.testing.assert_close(gnomon.load(copy)(ids, dense=dense)["share"], model(ids, dense=dense)["share"])


def test_what_cannot_be_saved_is_refused_and_nothing_is_left(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    x = torch.randn(4, 3)
    with pytest.raises(InputError, match="exists already"):
        gnomon.save(nn.Identity(), (x,), folder)
    with pytest.raises(CaptureError, match=r"BatchNorm1d writes 'running_mean' .*eval"):
        gnomon.save(nn.BatchNorm1d(3), (x,), tmp_path / "a")
    with pytest.raises(CaptureError, match="torch.export cannot record Branches"):
        gnomon.save(Branches(), (x,), tmp_path / "a")
    with pytest.raises(InputError, match="'weight' is not on the CPU"):
        gnomon.save(nn.Linear(3, 3, device="meta"), (x,), tmp_path / "a")
    monkeypatch.setattr(build, "has_compiler", lambda: False)
    with pytest.raises(InputError, match="needs a C"):
        gnomon.save(nn.Identity(), (x,), tmp_path / "a")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", [".", "gnomon.json", "kernels", "kernels/0.so", "program.pt2"])
def test_what_others_may_write_to_is_not_run(folder: Path, tmp_path: Path, what: str) -> None:
    mine = shutil.copytree(folder, tmp_path / "model")
    (mine / what).chmod(0o777)
    with pytest.raises(InputError, match="a saved model is code, and .* can be written by others .*chmod -R go-w"):
        gnomon.load(mine)


def test_what_another_user_saved_is_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_trusted", lambda: (os.getuid() + 7,))
    with pytest.raises(InputError, match="a saved model is code, and .* belongs to user"):
        gnomon.load(folder)
