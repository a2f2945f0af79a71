"""The examples in README.md and docs/ are run: what they print is what the page says."""

from __future__ import annotations

import ast
import doctest
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from quoted import Quote, differences, printed_by, quotes
from test_rooms import ROOMS

from gnomon.cli import main
from gnomon.plans import Layout, Mesh, Optimizer, Overlap, Plan, Schedule, Workload
from gnomon.prediction import predict
from gnomon.program import STANDARD_KINDS
from gnomon.report.planning import PLAN_WORDS
from gnomon.report.prediction import WORDS
from gnomon.software import stack
from gnomon.units import show_seconds

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [str(page.relative_to(ROOT)) for page in FILES if ">>> " in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", PAGES)
def test_examples(page: str) -> None:
    result = doctest.testfile(str(ROOT / page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0


def test_there_are_pages_with_examples() -> None:
    assert {"README.md", "docs/types.md", "docs/schedules.md"} <= set(PAGES)


def test_the_command_on_the_first_page_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """Up to its ellipsis, which stands for what was assumed."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith("    $ gnomon predict"))
    command = lines[start].removeprefix("    $ gnomon").rstrip("\\") + lines[start + 1]
    shown = [line.removeprefix("    ") for line in lines[start + 2 : lines.index("    …")]]
    assert main(shlex.split(command)) == 0
    printed = capsys.readouterr().out.split("\n")
    assert printed[: len(shown)] == shown
    assert {line.split(":")[0].split("  ")[0] for line in shown} >= {"step", "peak memory", "fits"}
    assert printed[len(shown) : len(shown) + 2] == ["", "assumed"]


def test_the_plan_on_the_first_page_takes_as_long_as_it_says() -> None:
    """Searching takes seconds more than a test may; that nothing is faster is for tests/search."""
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    plan = Plan(
        mesh=Mesh(dp_shard=16, tp=2),
        schedule=Schedule(micro_batch_size=2),
        layout=Layout(sequence_parallel=True),
        optimizer=Optimizer(zero=1),
    )
    work = Workload(global_batch_size=128, seq_len=8192)
    prediction = predict("llama-3.1-8b", "4x8xh100-sxm", plan, work, stack("megatron-lm"))
    bucketed = replace(plan, overlap=Overlap(bucket_bytes=160_000_000))
    same = predict("llama-3.1-8b", "4x8xh100-sxm", bucketed, work, stack("megatron-lm"))
    assert show_seconds(same.step_s) == show_seconds(prediction.step_s)
    assert f"step {show_seconds(prediction.step_s)}" in text and "finds none faster than this one" in text


def test_the_table_of_methods_is_the_registry(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["catalogue", "methods"]) == 0
    table = capsys.readouterr().out.partition("\n\n")[0].rstrip()
    assert "\n".join(f"    {line}" for line in table.splitlines()) in (ROOT / "docs/methods.md").read_text("utf-8")


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def test_links_lead_somewhere() -> None:
    """Pages and headings that other pages of the repository link to."""
    pages = [*FILES, *sorted((ROOT / "evidence").glob("*.md")), *sorted((ROOT / "benchmarks/results").glob("*.md"))]
    broken = []
    for page in pages:
        for link in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
            name, _, heading = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists() or (heading and heading not in anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def test_the_tree_of_the_readme_is_that_of_the_package() -> None:
    package = ROOT / "src/gnomon"
    rooms = [room for room in ROOMS if (package / room).is_dir() or (package / f"{room}.py").is_file()]
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("    src/gnomon/")[1].split("    tests/")[0]
    assert re.findall(r"^      (\w+)/?  ", text, re.MULTILINE) == rooms


def printed_labels() -> set[str]:
    """Columns that `report` and `cli` write out, parts of a step, kinds of action, words of a plan in short."""
    found: set[str] = set()
    for path in [*(ROOT / "src/gnomon/report").rglob("*.py"), *(ROOT / "src/gnomon/cli").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.GeneratorExp | ast.ListComp) and _is_column(node.elt):
                loop = node.generators[0].iter
                words = loop.elts if isinstance(loop, ast.Tuple | ast.List) else []
                found |= {str(word.value) for word in words if isinstance(word, ast.Constant)}
            elif isinstance(node, ast.Call) and _is_column(node):
                found |= {
                    str(k.value.value) for k in node.keywords if k.arg == "name" and isinstance(k.value, ast.Constant)
                }
    kinds = {kind.name for kind in STANDARD_KINDS}
    short = set(re.findall(r"(?<=[:;,] )(\w+)(?=:|,)", PLAN_WORDS.replace("Plans in short", "")))
    return {label.strip() for label in (*found, *WORDS, *WORDS.values(), *kinds, *short)} - {""}


def _is_column(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Column"


def test_the_glossary_has_every_word_that_output_prints() -> None:
    terms = set(re.findall(r"`([^`]+)`", (ROOT / "docs/glossary.md").read_text(encoding="utf-8")))
    labels = printed_labels()
    assert {"tp", "sp", "kept", "loses %", "F", "OPT", "bubble"} <= labels and len(labels) > 120
    assert sorted(labels - terms) == []
    assert {"UNSHARD", "etp", "z2", "rank 0, backward of unit 0"} <= terms


def test_the_gallery_prints_what_it_shows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command up to its ellipsis, which stands for the rest."""
    monkeypatch.chdir(ROOT)
    _, *shown = (ROOT / "docs/gallery.md").read_text(encoding="utf-8").split("    $ gnomon ")
    assert len(shown) >= 3
    for part in shown:
        command, *lines = part[: part.index("\n    …")].split("\n")
        assert main(shlex.split(command)) in (0, 1)
        assert capsys.readouterr().out.split("\n")[: len(lines)] == [line.removeprefix("    ") for line in lines]


QUICK = [
    quote for page in FILES for quote in quotes(page) if quote.runs and quote.page not in ("README.md", "gallery.md")
]
"""Quotes of output beside those above; `tests/quoted.py` runs the ones that take longer too."""


@pytest.mark.parametrize(
    "quote", [one for one in QUICK if one.command.startswith("predict ")], ids=lambda one: f"{one.page}:{one.line}"
)
def test_a_quoted_prediction_is_what_is_printed(quote: Quote) -> None:
    assert differences(quote.shown, printed_by(quote.command)) == []


def test_parts_of_a_quote_are_looked_for_in_their_order() -> None:
    printed = ["a", "b", "", "c", "d"]
    assert differences(["a", "b"], printed) == differences(["…", "b", "", "c", "…"], printed) == []
    assert differences(["c", "…", "a"], printed) == ["a (other lines stand between those of this part)"]
    assert differences(["a", "x"], printed) == ["x"]


TUTORIALS = sorted((ROOT / "docs").glob("tutorial_*.md"))


def test_the_index_opens_with_the_tutorials() -> None:
    opening = (ROOT / "docs/index.md").read_text(encoding="utf-8").partition("\n## ")[0]
    assert sorted(re.findall(r"\]\((tutorial_\w+\.md)\)", opening)) == [page.name for page in TUTORIALS]
    assert len(TUTORIALS) == 5


def steps_of(page: Path) -> Iterator[tuple[str, str]]:
    """(command, "") or (name, text) of a file that is written, of the lines that begin with `$`."""
    lines = iter(page.read_text(encoding="utf-8").split("\n"))
    for line in lines:
        if written := re.fullmatch(r"    \$ cat > (\S+) <<'END'", line):
            body = list(iter(lambda: next(lines).removeprefix("    "), "END"))
            yield written[1], "\n".join([*body, ""])
        elif line.startswith("    $ gnomon "):
            yield line.removeprefix("    $ gnomon "), ""


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_can_be_walked(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command that stands behind a `$`, in its order, in one folder."""
    if re.search(r"^ +import .*\btorch\b", page.read_text(encoding="utf-8"), re.MULTILINE):
        pytest.importorskip("torch", reason="the tutorial runs torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GNOMON_HOME", str(tmp_path / "home"))
    for what, text in steps_of(page):
        if text:
            (tmp_path / what).write_text(text, encoding="utf-8")
        else:
            status = main(shlex.split(what))
            assert status in (0, 1), (what, capsys.readouterr().err)


def test_functions_that_the_tutorial_names_are_in_its_file() -> None:
    text = (ROOT / "docs" / "tutorial_module.md").read_text()
    named = set(re.findall(r"\bmine:(\w+)", text))
    assert {"build", "batch"} <= named
    assert named <= set(re.findall(r"^    def (\w+)", text, re.MULTILINE))
