"""Stencils against eager: by C++, by loops that are played for a described many-core, and by their tiles."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from compiler.stencils import cases, jacobi, random_case, seen  # noqa: E402

from gnomon.cli import main  # noqa: E402
from gnomon.compiler import backend  # noqa: E402
from gnomon.compiler.explain import explained, lines  # noqa: E402
from gnomon.compiler.stencil import call as stencil_call  # noqa: E402
from gnomon.compiler.stencil import cpp_rows, scratchpad  # noqa: E402
from gnomon.compiler.stencil.box import box_of, pays  # noqa: E402
from gnomon.compiler.stencil.call import StencilCall  # noqa: E402
from gnomon.compiler.stencil.lags import parts, pipeline  # noqa: E402
from gnomon.compiler.stencil.tile import tiled  # noqa: E402
from gnomon.compiler.tiles import device  # noqa: E402
from gnomon.compiler.tiles.body import UnfitError  # noqa: E402
from gnomon.compiler.tiles.device import described  # noqa: E402
from gnomon.errors import InputError  # noqa: E402

pytestmark = pytest.mark.torch
COMPILED = ("two fields", "around the edges", "three dims", "few channels, a bias", "bfloat16")
"""Between them all that the C++ has: each takes g++ half a second. The others are played."""


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stencil_call, "FEWEST", 1)


def near(a: Any, b: Any) -> None:
    loose = {"rtol": 2e-2, "atol": 0.2} if b.dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 2e-5}
    torch.testing.assert_close(a, b, equal_nan=True, **loose)


@pytest.mark.parametrize("name", COMPILED)
def test_kernels_give_what_eager_gives(name: str) -> None:
    [one] = seen(*cases()[name])
    call = StencilCall(one.made, one.plain)
    made = call.run(*one.inputs)
    for a, b in zip(made if call.several else [made], one.outputs, strict=True):
        near(a, b)


def test_results_that_leave_past_the_caches_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that begin lines and of rows that do not, shorter and longer than what waits in the first cache."""

    class NoCache:
        l3_bytes = 0

    def once(u: Any) -> Any:
        new = u.clone()
        new[1:-1, 1:-1] = 0.25 * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:])
        return new

    monkeypatch.setattr(stencil_call, "this_machine", NoCache)
    for function in (once, jacobi):  # memory is read, and (where steps are computed together) a ring
        for shape in ((22, 288), (19, 301), (6, 16)):
            [one] = seen(function, (torch.randn(shape),))
            call = StencilCall(one.made, one.plain)
            assert function is jacobi or "HELD" in call.parts[-1].source
            near(call.run(*one.inputs), one.outputs[0])


def beyond(u: Any, v: Any) -> Any:
    """Reads two fields beyond their edges, at different distances from the two ends of a row."""
    a, b = torch.nn.functional.pad(u, (3, 1)), torch.nn.functional.pad(v, (0, 4, 0, 1), value=float("nan"))
    return a[:, 4:] * 2 + a[:, :-4] + b[1:, 4:].abs() - b[1:, 1:-3]


def around(u: Any, v: Any) -> Any:
    """Two steps, of which the second begins and ends beyond the edges."""
    for _ in range(2):
        u = torch.roll(u, (-1, 5), (0, 1)) * v - torch.roll(u, (0, -3), (0, 1))
    return u


@pytest.mark.parametrize("function", [beyond, around])
def test_inputs_read_beyond_their_edges_where_they_are(function: Any) -> None:
    """Only the ends of rows are copied: of rows shorter than both ends together and longer, in tiles of points too.
    Outside there is a NaN, which shows where it is read and where not."""
    for width in (6, 40, 300):
        inputs = (torch.randn(11, width), torch.randn(11, width))
        [one] = seen(lambda u, v: function(u, v), inputs)
        call = StencilCall(one.made, one.plain)
        assert width < 300 or any(row.ends for part in call.parts for row in part.of.rows)
        [wanted] = one.outputs
        for size in ((11, 1, width), (4, 1, 16), (11, 1, 48)):
            for part in call.parts:
                part.tile = replace(part.tile, size=size)
            near(call.run(*one.inputs), wanted)


@pytest.mark.parametrize("name", cases())
def test_every_stencil_is_found_whole_and_played(name: str) -> None:
    found = seen(*cases()[name])
    assert len(found) == 1, "one region, with nothing left between"
    [one] = found
    try:
        programs = scratchpad.program(one.made, described("sw26010"))
    except UnfitError as error:
        assert name in ("around the edges", "few channels, a bias"), error
        return
    played = scratchpad.play(programs, one.made, one.inputs)
    assert 0 < played.most_bytes <= 64 << 10 and played.seconds > 0
    for a, b in zip(played.outputs, one.outputs, strict=True):
        near(a, b)


@pytest.mark.parametrize("seed", range(4))
def test_random_stencils_are_played_as_eager(seed: int) -> None:
    for one in seen(*random_case(seed)):
        try:
            played = scratchpad.play(scratchpad.program(one.made, described("sw26010")), one.made, one.inputs)
        except UnfitError:
            continue
        for a, b in zip(played.outputs, one.outputs, strict=True):
            near(a, b)


def test_torch_compile_takes_a_stencil_and_explain_says_its_tiles(fresh: None) -> None:
    u = torch.randn(70, 90)
    with torch.no_grad():
        fast = torch.compile(jacobi, backend="gnomon")
        for _ in range(2):
            near(fast(u), jacobi(u))
        one = backend.reports[-1].stencils[0]
        assert one.kept and one.made.steps == 3
        near(fast(u + 1), jacobi(u + 1))
    text = "\n".join(lines(explained(backend.reports[-1]), "graph"))
    assert "stencil of 3 stages over 70 x 90 (kept)" in text and "stages together" in text


def test_a_play_holds_the_program_to_the_device() -> None:
    """Three mistakes a generator could make: each is an error, so the play can fail."""
    [one] = seen(jacobi, (torch.randn(40, 48),))
    [*programs] = scratchpad.program(one.made, described("sw26010"))
    first = programs[0]
    core = first.cores[0]
    hasty = replace(core, code=tuple(i for i in core.code if not isinstance(i, scratchpad.Wait)))
    small = replace(first.device, levels=(replace(first.device.levels[0], size=256),))
    short = [
        replace(i, region=tuple((a + 1, b) for a, b in i.region)) if isinstance(i, scratchpad.Get) else i
        for i in core.code
    ]
    for bad, why in (
        (replace(first, cores=(hasty, *first.cores[1:])), "before it has come"),
        (replace(first, device=small), "in a scratchpad of 256 B"),
        (replace(first, cores=(replace(core, code=tuple(short)),)), "reads"),
    ):
        with pytest.raises(scratchpad.PlayError, match=why):
            scratchpad.play([bad, *programs[1:]], one.made, one.inputs)


RUNTIME = """
#include <string.h>
char scratchpad[1 << 16];
static void move(char* buffer, char* array, int item, int rank, const int* sizes, const int* first, const int* count,
                 const int* held_first, const int* held_count, int put, double outside) {
    int points = 1;
    for (int d = 0; d < rank; d++) points *= count[d];
    for (int n = 0; n < points; n++) {
        int from = 0, to = 0, inside = 1;
        for (int d = 0, rest = n, below = points; d < rank; d++) {
            below /= count[d];
            const int at = first[d] + rest / below;
            rest %= below;
            inside = inside && at >= 0 && at < sizes[d];
            from = from * sizes[d] + at;
            to = to * held_count[d] + at - held_first[d];
        }
        const float narrow = outside;
        const char* edge = item == 4 ? (char*)&narrow : (char*)&outside;
        if (put && inside) memcpy(array + item * from, buffer + item * to, item);
        else if (!put) memcpy(buffer + item * to, inside ? array + item * from : edge, item);
    }
}
void dma_get(void* to, const void* from, int item, int rank, const int* sizes, const int* first, const int* count,
             double outside, int copy) {
    move(to, (char*)from, item, rank, sizes, first, count, first, count, 0, outside);
}
void dma_wait(int copy) {}
void dma_put(const void* from, void* to, int item, int rank, const int* sizes, const int* first, const int* count,
             const int* held_first, const int* held_count) {
    move((char*)from, to, item, rank, sizes, first, count, held_first, held_count, 1, 0);
}
"""


def of_a_part(u: Any) -> Any:
    """Writes into a copy of a part of a field, so that what stays is read at a shift."""
    new = u[1:, 2:].clone()
    new[1:-1, 1:-1] = torch.maximum(u[:-3, 1:-3].sigmoid(), u[2:-1, 4:].abs())
    return new


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("name", ["channels of their own", "two fields", "a part, in double"])
def test_the_text_of_a_core_gives_what_eager_gives(name: str, tmp_path: Path) -> None:
    """The C itself, with DMA by memcpy: weights of each channel, edges, shifted bases and doubles are in it."""
    [one] = seen(*{**cases(), "a part, in double": (of_a_part, (torch.randn(23, 31).double(),))}[name])
    programs = scratchpad.program(one.made, described("sw26010"))
    (tmp_path / "core.c").write_text(scratchpad.text(programs) + RUNTIME, encoding="utf-8")
    made = ["cc", "-shared", "-fPIC", "-w", "core.c", "-o", "core.so", "-lm"]
    subprocess.run(made, cwd=tmp_path, check=True)
    library = ctypes.CDLL(str(tmp_path / "core.so"))
    arrays = {node: x.contiguous() for node, x in zip(one.made.inputs, one.inputs, strict=True)}
    for number, part in enumerate(programs):
        of = part.of.stencil
        for node in of.outputs:
            value = node.meta["val"]
            arrays[node] = torch.full(value.shape, float("nan"), dtype=value.dtype)
        places = [ctypes.c_void_p(arrays[node].data_ptr()) for node in (*of.inputs, *of.outputs)]
        for core in range(part.device.workers):
            getattr(library, f"part{number}")(core, *places)
    for node, wanted in zip(one.made.outputs, one.outputs, strict=True):
        near(arrays[node], wanted)


def test_a_text_of_another_type_is_refused() -> None:
    [one] = seen(*cases()["bfloat16"])
    with pytest.raises(UnfitError, match=r"torch.bfloat16 in the text for a scratchpad, which has float and double"):
        scratchpad.text(scratchpad.program(one.made, described("sw26010")))


def test_lags_and_rings_of_three_steps_by_hand() -> None:
    """A step reads one row before and one after: it comes one row later, and three rows are kept."""
    [one] = seen(jacobi, (torch.randn(40, 48),))
    rows = pipeline(one.made).rows
    assert [(row.lag, row.ring) for row in rows] == [(0, 3), (1, 3), (2, 0)]
    assert [row.ring for row in pipeline(one.made, 2).rows] == [4, 4, 0]
    cut = parts(one.made, 2)
    assert [len(part.stages) for part in cut] == [2, 1] and cut[1].inputs == cut[0].outputs


def test_tiles_follow_the_device() -> None:
    """More memory bandwidth: fewer steps together. A smaller cache: narrower tiles, or fewer steps."""
    [one] = seen(lambda u: jacobi(jacobi(u)), (torch.randn(2048, 4096),))
    slow = described("avx512")
    fast = replace(slow, memory_bandwidth=1e13)
    assert tiled(one.made, slow)[0].depth > 1 >= tiled(one.made, fast)[0].depth
    small = replace(slow, levels=(replace(slow.levels[0], size=8 << 10),))
    wide, narrow = tiled(one.made, slow)[0], tiled(one.made, small)[0]
    assert narrow.ring_bytes < wide.ring_bytes


def test_a_wide_box_is_a_product_where_matrices_are_faster() -> None:
    seven = (torch.randn(1, 1, 30, 40).bfloat16(), torch.randn(1, 1, 7, 7).bfloat16())
    [one] = seen(torch.nn.functional.conv2d, seven)
    stage = one.made.stages[0]
    box = box_of(stage)
    assert box is not None and (box.down, box.across) == (7, 7) and 0.15 < box.useful < 0.3
    assert pays(box, stage, described("h200")) and not pays(box, stage, described("avx2"))
    [other] = seen(jacobi, (torch.randn(20, 20),))
    assert box_of(other.made.stages[0]) is None


def test_devices_are_data(tmp_path: Path) -> None:
    for name in device.names():
        assert described(name).name == name
    with pytest.raises(InputError, match=r"known are avx2, avx512, h200, neon, sw26010"):
        described("avx51")
    text = (device.FOLDER / "sw26010.toml").read_text(encoding="utf-8").replace("explicit = true", "")
    (tmp_path / "own.toml").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match="needs dma and an explicit first level"):
        described(str(tmp_path / "own.toml"))


def test_one_text_serves_every_vector_width() -> None:
    """What differs is the header with the vectors; NEON's says everything that the text calls."""
    [one] = seen(*cases()["few channels, a bias"])
    text, _ = cpp_rows.text(pipeline(one.made, 2))
    assert "fused(" in text and "VW" in text and "__builtin_ia32" not in text
    folder = Path(cpp_rows.__file__).parents[1] / "cpp"
    asked = "#define VW 4|ALWAYS F fused(|ALWAYS F vsqrt(|ALWAYS void st_past(|ALWAYS F larger(|ALWAYS F smaller("
    neon = (folder / str(described("neon").header)).read_text(encoding="utf-8")
    assert all(one in neon for one in asked.split("|"))


HEAT = """\
import torch
def build():
    def heat(u):
        for _ in range(2):
            u = u + 0.1 * (torch.nn.functional.pad(u, (1, 1))[:, 2:] - u)
        return u
    return heat, (torch.randn(20, 64),)
"""


def test_compile_writes_texts_for_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "heat.py"
    model.write_text(HEAT, encoding="utf-8")
    where = f"{model}:build"
    assert main(["compile", where, "--device", "sw26010", "-o", str(tmp_path / "texts")]) == 0
    out = capsys.readouterr().out
    assert "played on" in out and "0 from ATen" in out
    assert "dma_get" in (tmp_path / "texts" / "stencil0.c").read_text(encoding="utf-8")
    assert main(["compile", where, "--device", "h200"]) == 0
    assert "@triton.jit" in capsys.readouterr().out
    assert main(["compile", where, "--device", "neon"]) == 0
    assert "isa_neon.h" in capsys.readouterr().out
    assert main(["compile", where, "--device", "neon", "--tune", "3s"]) == 2
    assert "leave out --tune" in capsys.readouterr().err
    assert main(["compile", where, "-o", "x"]) == 2
    assert "name a device" in capsys.readouterr().err
