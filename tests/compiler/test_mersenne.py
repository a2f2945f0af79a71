"""Random numbers by the kernel are PyTorch's, bit by bit, and so is the generator afterwards."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the compiler's tests need it")

from hypothesis import example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from gnomon.compiler import backend, build, machine, saved  # noqa: E402
from gnomon.compiler.kernels import mersenne  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not build.has_compiler(), reason="needs a C++ compiler"),
    pytest.mark.usefixtures("fresh"),
]
F = torch.nn.functional
SETS = [isa for isa in machine.SETS if isa.needs <= machine._cpuinfo()[0]]
ATEN = pytest.mark.usefixtures("masks")


@pytest.fixture
def masks() -> None:
    """Of tests that need ATen's bernoulli to be this generator's."""
    if not mersenne._agrees(0.5, torch.float32):
        pytest.skip("on this processor ATen's bernoulli is another generator's")


def state() -> torch.Tensor:
    return torch.get_rng_state()


def begin(seed: int, before: int, normal: bool) -> None:
    """A generator that has drawn so many words since it was seeded, and perhaps keeps half a pair of normals."""
    torch.manual_seed(seed)
    torch.rand(before)
    if normal:
        torch.randn(1)


def alike(draw: mersenne.Draw, *args: torch.Tensor, seed: int = 0, before: int = 0, normal: bool = False) -> None:
    left = []
    for call in (draw.aten, draw.run):
        begin(seed, before, normal)
        out = call(*args)
        left.append((out, state(), torch.randn(3), torch.randn(20)))
    [wanted, made] = left
    assert made[0].dtype == wanted[0].dtype and made[0].stride() == wanted[0].stride()
    for a, b in zip(wanted, made, strict=True):
        assert torch.equal(a, b)


PROBABLE = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0, 0.1, 1 - 0.1, 0.5, 2**-53, 5e-324, 1 - 2**-53]))
BEFORE = st.one_of(st.integers(0, 4000), st.sampled_from([1, 622, 623, 624, 625, 1247, 1248]))
COUNT = st.one_of(st.integers(0, 9000), st.sampled_from([0, 1, 311, 312, 313, 1872, 1873, 2184]))
MASKS = [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.bool]


@ATEN
@settings(max_examples=80)
@given(
    count=COUNT, p=PROBABLE, seed=st.integers(0, 2**64 - 1), before=BEFORE, normal=st.booleans(),
    dtype=st.sampled_from(MASKS),
)  # fmt: skip
@example(count=0, p=0.5, seed=1, before=0, normal=False, dtype=torch.float32)
def test_masks_are_those_of_bernoulli(
    count: int, p: float, seed: int, before: int, normal: bool, dtype: torch.dtype
) -> None:
    alike(mersenne.Draw(p, torch.empty(count, dtype=dtype)), seed=seed, before=before, normal=normal)


@settings(max_examples=40)
@given(
    count=COUNT, seed=st.integers(0, 2**64 - 1), before=BEFORE, dtype=st.sampled_from([*mersenne.FRACTIONS]),
)  # fmt: skip
def test_fractions_are_those_of_uniform(count: int, seed: int, before: int, dtype: torch.dtype) -> None:
    alike(mersenne.Draw(None, torch.empty(count, dtype=dtype)), seed=seed, before=before)


@pytest.mark.parametrize("isa", SETS, ids=lambda isa: isa.name)
def test_every_instruction_set_gives_the_same(
    isa: machine.InstructionSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.subprocess.run(build.command(mersenne.FORMULA, tmp_path / "kernel.so", isa), check=True)
    function = build.function_of(tmp_path / "kernel.so")
    calls = []

    def counted(call: ctypes.Structure) -> int:
        calls.append(call)
        return function(ctypes.byref(call))

    monkeypatch.setattr(mersenne, "kernel", lambda: counted)
    for count, before in ((0, 5), (1, 624), (5000, 0), (4999, 623), (70_001, 1)):
        for dtype in mersenne.FRACTIONS:
            alike(mersenne.Draw(None, torch.empty(count, dtype=dtype)), seed=count, before=before)
        if mersenne._agrees(0.5, torch.float32):
            alike(mersenne.Draw(0.3, torch.empty(count)), seed=count, before=before)
    assert len(calls) >= 10


@ATEN
def test_a_tie_in_the_first_word_is_decided_by_the_second() -> None:
    """p is chosen so that one number's upper bits are its own: one in two million is by chance."""
    torch.manual_seed(3)
    exact = torch.rand(4000, dtype=torch.float64)  # numbers of 53 bits, from the same words
    for at in (0, 17, 3999):
        p = exact[at].item()
        for given_ in (p, p + 2**-53, p - 2**-53):
            torch.manual_seed(3)
            assert torch.equal(mersenne.Draw(given_, torch.empty(4000)).run(), exact < given_)


SHAPES = {
    "transposed": torch.empty(6, 50).mT,
    "channels last": torch.empty(2, 5, 7, 3).to(memory_format=torch.channels_last),
    "expanded": torch.empty(7, 1).expand(7, 9),
    "every second": torch.empty(40, 10)[::2, ::2],
    "one": torch.empty(()),
    "none": torch.empty(0, 4),
}


@ATEN
@pytest.mark.parametrize("name", SHAPES)
def test_numbers_lie_where_atens_lie(name: str) -> None:
    x = SHAPES[name]
    like = torch.empty_like(x)
    alike(mersenne.Draw(0.4, like), before=1)
    moving = mersenne.Draw(0.4, like)
    moving.place = None  # as for sizes that change
    alike(moving, x, before=1)


def attention(a: torch.Tensor) -> torch.Tensor:
    q = a.view(1, 4, -1, 8)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.25)


def by_hand(a: torch.Tensor) -> torch.Tensor:
    return a * (torch.rand_like(a) < 0.4) * torch.rand(8) + torch.empty_like(a).uniform_()


def in_place(a: torch.Tensor) -> torch.Tensor:
    return F.dropout(a * 2, 0.3, inplace=True) + F.dropout1d(a[None], 0.5)[0]


def in_steps(a: torch.Tensor) -> torch.Tensor:
    def part(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.gelu(x @ x.mT / 8) @ x / 8, 0.5)

    return checkpoint(part, checkpoint(part, a, use_reentrant=False), use_reentrant=False)


def mixed(a: torch.Tensor) -> torch.Tensor:
    """ATen's draws between the kernel's."""
    return F.dropout(a, 0.5) + torch.randn_like(a) + F.dropout(F.gelu(a), 0.2) + torch.randint(0, 9, a.shape)


@pytest.mark.parametrize(
    ("function", "dynamic"),
    [(attention, False), (by_hand, True), (in_place, True), (in_steps, False), (mixed, True)],
)
def test_compiled_functions_draw_as_eager(function: Callable[[Any], Any], dynamic: bool) -> None:
    compiled = torch.compile(function, backend=backend.gnomon, dynamic=dynamic)
    backend.reports.clear()  # bounded: its length marks no place
    for rows in (32, 48) if dynamic else (32,):
        a = torch.randn(rows, 8, requires_grad=True)
        for seed in range(3):  # the first is the trial
            made = []
            for call in (function, compiled):
                torch.manual_seed(seed)
                out = call(a)
                after = state()
                (grad,) = torch.autograd.grad(out.square().sum(), a)
                made.append((after, state(), out, grad))
            [eager, ours] = made
            assert torch.equal(eager[0], ours[0]) and torch.equal(eager[1], ours[1])
            for one, other in zip(eager[2:], ours[2:], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    if mersenne._agrees(0.5, torch.float32):
        assert [draw for one in backend.reports for draw in one.draws]


@ATEN
def test_what_is_dropped_joins_the_group_before() -> None:
    compiled = torch.compile(lambda a: F.dropout(F.gelu(a), 0.5) + 1, backend=backend.gnomon)
    a = torch.randn(8, 8)
    with torch.no_grad():
        compiled(a)
    assert len(backend.reports[-1].program.groups) == 1
    assert "random numbers: 1" in "\n".join(_explained())


def _explained() -> list[str]:
    from gnomon.compiler.explain import explained, lines

    return lines(explained(backend.reports[-1]), "graph")


def test_checkpoint_around_a_compiled_function() -> None:
    compiled = torch.compile(lambda x: F.dropout(x @ x.mT, 0.5) @ x, backend=backend.gnomon)
    a = torch.randn(16, 16, requires_grad=True)
    for _ in range(2):
        made = []
        for kept in (False, True):
            torch.manual_seed(5)
            out = checkpoint(compiled, a, use_reentrant=False) if kept else compiled(a)
            made.append((out, *torch.autograd.grad(out.sum(), a), state()))
        for one, other in zip(*made, strict=True):
            torch.testing.assert_close(one, other)


# ---- where ATen draws
Kernel = Callable[[Any], int]


def damaged(function: Kernel, what: str) -> Kernel:
    def kernel(call: Any) -> int:
        failed = function(call)
        if what == "numbers" and call.count > 5:
            ctypes.memset(call.out + 5, 7, 1)
        if what == "state":
            ctypes.memset(call.after + 24, 1, 1)
        return 1 if what == "refuses" else failed

    return kernel


@pytest.mark.parametrize("what", ["numbers", "state", "refuses"])
def test_a_draw_that_is_not_atens_stays_atens(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function = mersenne.kernel()
    assert function is not None
    monkeypatch.setattr(mersenne, "kernel", lambda: damaged(function, what))
    mersenne._agrees.cache_clear()
    try:
        compiled = torch.compile(lambda a: F.dropout(a, 0.3) + torch.rand_like(a), backend=backend.gnomon)
        a = torch.randn(9, 9)
        for seed in range(2):
            made = []
            for call in (compiled, lambda a: F.dropout(a, 0.3) + torch.rand_like(a)):
                torch.manual_seed(seed)
                with torch.no_grad():
                    made.append((call(a), state()))
            torch.testing.assert_close(made[0], made[1])
        assert not backend.reports[-1].draws
        called = {str(node.target) for node in backend.reports[-1].program.graph.nodes}
        assert {"aten.bernoulli.p", "aten.rand_like.default"} <= called
    finally:
        mersenne._agrees.cache_clear()


@ATEN
def test_a_trial_that_finds_a_difference_gives_atens_numbers_and_state(monkeypatch: pytest.MonkeyPatch) -> None:
    function = mersenne.kernel()
    assert function is not None
    draw = mersenne.Draw(0.123, torch.empty(50, 3))
    monkeypatch.setattr(mersenne, "kernel", lambda: damaged(function, "numbers"))
    torch.manual_seed(1)
    made = [(draw(), draw(), state())]
    monkeypatch.undo()
    assert not draw.kept and draw.verdict["wrong"]
    torch.manual_seed(1)
    made.append((draw.aten(), draw.aten(), state()))
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


@ATEN
@pytest.mark.parametrize("times", [1, 99])
def test_what_another_thread_draws_meanwhile_is_not_drawn_again(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw in the middle of the kernel's: the kernel draws again behind it, and after a few times ATen does."""
    function = mersenne.kernel()
    assert function is not None
    other: list[torch.Tensor] = []

    def disturbed(call: Any) -> int:
        if len(other) < times:
            other.append(torch.rand(3))
        return function(call)

    monkeypatch.setattr(mersenne, "kernel", lambda: disturbed)
    torch.manual_seed(1)
    made = mersenne.Draw(0.5, torch.empty(100)).run()
    after = state()
    torch.manual_seed(1)
    for one in other:
        assert torch.equal(one, torch.rand(3))
    assert len(other) == min(times, mersenne.LOOKS)
    assert torch.equal(made, torch.empty(100).bernoulli_(0.5) != 0) and torch.equal(after, state())


@ATEN
def test_draws_of_threads_are_parts_of_one_stream() -> None:
    draw, each = mersenne.Draw(0.5, torch.empty(3001)), 40
    torch.manual_seed(2)
    wanted = [draw.aten() for _ in range(2 * each)]
    after = state()
    torch.manual_seed(2)
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda _: draw.run(), range(2 * each)))
    assert sorted(map(bytes_of, made)) == sorted(map(bytes_of, wanted)) and torch.equal(after, state())


def bytes_of(mask: torch.Tensor) -> bytes:
    return mask.numpy().tobytes()


class Noisy(torch.nn.Module):
    def forward(self, a: Any) -> Any:
        return F.dropout(a, 0.5) * torch.rand_like(a)


def test_a_saved_model_draws_as_it_did_and_brings_the_kernel(tmp_path: Path) -> None:
    module, a = Noisy(), torch.randn(8, 8)
    folder = saved.save(module, (a,), tmp_path / "noisy")
    assert mersenne.source() in [path.read_text(encoding="utf-8") for path in (folder / "kernels").glob("*.cpp")]
    loaded = saved.load(folder)
    for seed in range(2):
        made = []
        for call in (module, loaded):
            torch.manual_seed(seed)
            made.append((call(a), state()))
        torch.testing.assert_close(made[0], made[1])


def test_a_dtype_that_aten_does_not_draw_stays_atens_error() -> None:
    assert not mersenne._agrees(0.5, torch.complex64)


def test_a_state_that_aten_does_not_leave_is_refused() -> None:
    torch.manual_seed(0)
    torch.rand(10)
    odd = state()
    odd[16] += 1  # the next word's place, and as many left as before
    generator = torch.Generator()
    generator.set_state(odd)
    assert not mersenne.fill_random(torch.empty(4), 1, 0, generator)
    assert torch.equal(generator.get_state(), odd)
