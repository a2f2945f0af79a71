"""The order of the rooms: a module imports only from its own room and from rooms above it.

Read from the source by `ast`, so nothing is imported and an import under `if TYPE_CHECKING` counts too. Also held here:
no cycle between modules, no import of ours inside a function, only numpy (and torch in three rooms) from outside, and a
docstring that opens each module. The checker is itself tried on small bad packages, so that it is known to fail.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import takewhile
from pathlib import Path, PurePosixPath

import pytest

REPOSITORY = Path(__file__).parents[1]
ROOMS = tuple(
    "errors units late trust schema storage tensors ops graph models hardware program orders plans software sharding "
    "timeline profile prices simulate lowering methods control prediction serving search formats request report fleet "
    "frontend compiler runtime serve cli".split()
)
FOLDERS = {
    "compiler": tuple(
        "machine build node tiles rules text tune graph tasks kernels stencil program dispatch backend explain saved "
        "command".split()
    ),
    "runtime": tuple(
        "data processes mesh watch parameters ops optim module step checkpoint calibrate launch checks".split()
    ),
}
"""Room -> its folders, in an order of their own: a file imports only from its own folder and from folders before it."""
TORCH_ROOMS = frozenset({"frontend", "compiler", "runtime", "serve"})
OPTIONAL = {
    **{"yaml": "formats", "tokenizers": "runtime", "jinja2": "runtime", "pyarrow": "runtime", "scipy": "search"},
    **dict.fromkeys(("starlette", "uvicorn", "prometheus_client", "llguidance", "faiss"), "serve"),
    **dict.fromkeys(("transformers", "peft", "trl"), "frontend"),  # of a script that is run, and imports them itself
}
"""Package of an extra -> the room that may import it, inside a function: without the extra all else works."""
COMPUTED = ("import_module", "__import__", "resolve_name")
LOADERS = ("load_late", *COMPUTED)
"""Functions that load a module by its name."""
LATE = "late.py"
"""The one module that imports by a string which it does not know (`gnomon.late.load_late`)."""
FACE = ("__init__", "__main__", "watch")
"""The package's own modules stand below every room: they may import all, and no room imports them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    line: int
    target: str
    """Dotted name of a module; for `from a import b` it is `a.b` where that is a module of ours, else `a`."""
    in_function: bool
    late: bool = False
    """By `load_late`, when it is first used."""


WITH_STATEMENTS = ("body", "orelse", "finalbody", "handlers", "cases")
"""Fields of a node that hold statements, or what holds them."""


class ImportReader(ast.NodeVisitor):
    """Collects every import of one module, wherever it stands, `import_module("...")` and `load_late("...")` too."""

    def __init__(self, package: str, known: Mapping[str, object], source: str) -> None:
        self.package, self.known = package, known
        self.calls = any(name in source for name in LOADERS)
        self.imports: list[Import] = []
        self.depth = 0

    def generic_visit(self, node: ast.AST) -> None:
        """Expressions, which are most of a module, are walked only where one of them may load something."""
        if self.calls:
            super().generic_visit(node)
            return
        for field in WITH_STATEMENTS:
            for inner in getattr(node, field, ()):
                self.visit(inner)

    def add(self, node: ast.stmt | ast.expr, target: str) -> None:
        self.imports.append(Import(line=node.lineno, target=target, in_function=self.depth > 0))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            parents = self.package.split(".")
            kept = parents[: len(parents) - node.level + 1]
            base = ".".join([*kept, *([node.module] if node.module else [])])
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            self.add(node, inner if inner in self.known else base)

    def visit_Call(self, node: ast.Call) -> None:
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name == "load_late":
            match node.args:
                case [ast.Constant(value="gnomon:__version__")]:
                    pass
                case [ast.Constant(value=str(target))] | [ast.JoinedStr(values=[ast.Constant(value=str(target)), *_])]:
                    module = target.partition(":")[0].removesuffix(".")
                    self.imports.append(Import(line=node.lineno, target=module, in_function=False, late=True))
                case _:
                    self.add(node, "<computed>")
        if name in COMPUTED:
            # A name that is computed or relative cannot be judged here: it becomes one that no rule allows.
            match node.args:
                case [ast.Constant(value=str(target)), *_] if not target.startswith("."):
                    self.add(node, target)
                case _:
                    self.add(node, "<computed>")
        self.generic_visit(node)


def module_name(path: str) -> str:
    """`graph/types.py` is `gnomon.graph.types`, `graph/__init__.py` is `gnomon.graph`."""
    parts = ["gnomon", *PurePosixPath(path).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    return [*module.split("."), "__init__"][1]


def depth_of(room: str) -> int:
    return len(ROOMS) if room in FACE else ROOMS.index(room)


def folder_depth(room: str, module: str) -> int:
    """Where a module stands in the order of its room's folders; the room's own `__init__.py` is below them all."""
    folders = FOLDERS[room]
    parts = module.split(".")
    return len(folders) if len(parts) == 2 else folders.index(parts[2])


def folder_problems(where: str, room: str, module: str, target: str) -> Iterator[str]:
    """What the order of a room's folders says against one import within the room."""
    if room in FOLDERS and room_of(target) == room and folder_depth(room, target) > folder_depth(room, module):
        yield f"{where} imports {target}: it is below {module.rpartition('.')[0]!r}"


def import_problems(path: str, room: str, result: Import) -> Iterator[str]:
    """What is wrong with one import of the module at `path`."""
    where, top = f"{path}:{result.line}", result.target.split(".")[0]
    if top != "gnomon":
        allowed = top in sys.stdlib_module_names or top == "numpy" or (top == "torch" and room in TORCH_ROOMS)
        allowed = allowed or (OPTIONAL.get(top) == room and result.in_function)
        allowed = allowed or (top == "torch" and room == "cli" and result.late)
        allowed = allowed or path == LATE
        if not allowed:
            yield f"{where} imports {top!r}: {room} may use the standard library and numpy only"
        return
    if result.in_function and room not in FACE:  # the package's face loads its verbs when they are first used
        yield f"{where} imports {result.target} inside a function: move it to the top, or the code to another room"
    to = room_of(result.target)
    if to not in ROOMS and to not in FACE:
        yield f"{where} imports {result.target}: {to!r} is not a room"
    elif depth_of(to) > depth_of(room):
        yield f"{where} imports {result.target}: {to!r} is below {room!r}"


def problems(files: Mapping[str, str]) -> list[str]:
    """Everything wrong with a package given as path below `gnomon/` → source, one sentence each."""
    known = {module_name(path): path for path in files}
    edges: dict[str, set[str]] = {}
    out = []
    for path, source in sorted(files.items()):
        module = module_name(path)
        room = room_of(module)
        if known[module] != path:
            out.append(f"{path} and {known[module]} are the same module")
        if room not in ROOMS and room not in FACE:
            out.append(f"{path}: {room!r} is not a room; put it in its place in ROOMS and in docs/design.md")
            continue
        tree = ast.parse(source, filename=path)
        if len([line for line in (ast.get_docstring(tree) or "").splitlines() if line.strip()]) < 2:
            out.append(f"{path} must open with two lines or more: what it is, what it returns, what it leaves out")
        package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
        reader = ImportReader(package, known, source)
        reader.visit(tree)
        if room in FOLDERS and len(parts := module.split(".")) > 2 and parts[2] not in FOLDERS[room]:
            out.append(f"{path}: {parts[2]!r} is not a folder of {room}; put it in its place in FOLDERS")
            continue
        edges[module] = {entry.target for entry in reader.imports if entry.target in known and not entry.late}
        out += [problem for entry in reader.imports for problem in import_problems(path, room, entry)]
        for entry in reader.imports:
            if entry.target in known and not entry.late:
                out += folder_problems(f"{path}:{entry.line}", room, module, entry.target)
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        out.append(f"modules import each other in a cycle: {' <- '.join(error.args[1])}")
    return out


def test_the_package_keeps_the_order() -> None:
    source = REPOSITORY / "src/gnomon"
    files = {path.relative_to(source).as_posix(): path.read_text(encoding="utf-8") for path in source.rglob("*.py")}
    assert "errors.py" in files
    assert problems(files) == []


ALONE = ("compiler", "fleet", "formats")
"""Rooms with a page of their own, which can be read without the rest of the house."""


@pytest.mark.parametrize("room", ALONE)
def test_the_page_of_a_room_names_the_rooms_it_takes_from(room: str) -> None:
    source = REPOSITORY / "src/gnomon"
    files = {path.relative_to(source).as_posix(): path.read_text("utf-8") for path in source.rglob("*.py")}
    known, taken = {module_name(path): path for path in files}, set[str]()
    for path, text in files.items():
        if path.startswith(f"{room}/"):
            reader = ImportReader(module_name(path).rpartition(".")[0], known, text)
            reader.visit(ast.parse(text))
            taken |= {room_of(entry.target) for entry in reader.imports if entry.target.startswith("gnomon")}
    page = (source / room / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| ([\w, ]+) \|", page.partition("| room | for |")[2], re.M)
    listed = [name for row in rows for name in row.split(", ")]
    assert sorted(listed) == sorted(taken & set(ROOMS) - {room}), "change the table at the end of the room's page"
    for name in re.findall(r"`([\w/]+(?:\.py|/))`", page):
        assert (source / room / name).exists() or (REPOSITORY / name).exists(), (
            f"the page names {name}, which is not there"
        )


def test_what_is_loaded_late_is_there() -> None:
    """Each `module:object` that a caller of `load_late` writes out; registries have their own tests."""
    source, named = REPOSITORY / "src/gnomon", set[str]()
    for path in source.rglob("*.py"):
        named |= set(re.findall(r'load_late\(f?"([\w.]+:\w+)"\)', path.read_text(encoding="utf-8")))
    ours = {name for name in named if name.startswith("gnomon.")}
    assert len(ours) > 3
    for module, _, item in (name.partition(":") for name in ours):
        path = source.joinpath(*module.split(".")[1:])
        text = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
        tree = ast.parse(text.read_text(encoding="utf-8"))
        defined = {getattr(node, "name", "") for node in tree.body}
        assert item in defined, f"{module} has no {item}"


def families() -> set[str]:
    """Names of published tables: files of rules and what fits left out, but for those that bear a program's name."""
    sources = {path.stem for path in (REPOSITORY / "evidence/sources").glob("*.toml")}
    text = (REPOSITORY / "evidence/folds.toml").read_text(encoding="utf-8")
    left_out = set(re.findall(r'^left_out = "([a-z].*)"$', text, re.MULTILINE))
    stacks = {path.stem for path in (REPOSITORY / "src/gnomon/software/stacks").glob("*.toml")}
    return (sources | left_out) - stacks


FROM_RUNS = ("data", "date", "error", "range", "source")
"""Keys of a provenance, which says what a number was fitted to."""


SPOKEN = {"mosaicml", "dgx cloud", "bloom's", "nemo's", "korthikanti's", "maxtext's runs"}
"""What people call published tables; code may name their programs, not their runs."""


def named(text: str, names: set[str]) -> list[str]:
    """Which of them a text names. A text in which none stands at all is told by `in`, which is much faster."""
    low = text.lower()
    close = [name for name in names if name.lower() in low]
    return sorted(name for name in close if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text, re.IGNORECASE))


def _own_words(path: Path) -> str:
    """A file's text without what says where fitted numbers come from."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if path.suffix == ".toml":
        lines = [line for line in lines if line.partition(" = ")[0].strip() not in FROM_RUNS]
    return "\n".join(lines)


def test_the_package_names_no_published_table() -> None:
    """Code knows programs and hardware; only `evidence/` knows sources."""
    known = families()
    assert len(known) > 15 and "nanotron-ultrascale" in known and "nanotron" not in known
    assert named("if row.family == 'Korthikanti-2022':", known) == ["korthikanti-2022"]
    package = REPOSITORY / "src/gnomon"
    problems = [
        f"{path.relative_to(package)}: {name}"
        for path in sorted(package.rglob("*"))
        if path.suffix in (".py", ".toml") and "formats" not in path.relative_to(package).parts
        for name in named(_own_words(path), known | SPOKEN if path.suffix == ".py" else known)
    ]
    assert not problems
    imports = [
        path for path in package.rglob("*.py") if re.search(r"^(from|import) evidence\b", path.read_text("utf-8"), re.M)
    ]
    assert not imports


def test_the_design_lists_the_rooms_in_this_order() -> None:
    """One line of the design may name several rooms (`errors · units`); their order within the line is not judged."""
    text = (REPOSITORY / "docs/design.md").read_text(encoding="utf-8")
    after_heading = text.split("## Rooms, in import order")[1].splitlines()[1:]
    block = takewhile(lambda line: line.startswith("    "), after_heading)
    named = [re.findall(r"\w+", line.strip().split("  ")[0]) for line in block if not line.startswith("     ")]
    listed = [room for rooms in named for room in sorted(rooms, key=ROOMS.index)]
    assert {"errors", "program", "cli"} <= set(listed)
    assert listed == sorted(listed, key=ROOMS.index)


DOC = '"""What it is and what it returns.\n\nWhat it leaves out.\n"""\n'


def package(**sources: str) -> dict[str, str]:
    """`graph__types="import os"` → the file `graph/types.py`, opened by a docstring."""
    return {f"{name.replace('__', '/', 1)}.py": DOC + source for name, source in sources.items()}


def test_every_pair_of_folders_is_judged_by_their_order() -> None:
    for i, folder in enumerate(FOLDERS["runtime"]):
        for j, other in enumerate(FOLDERS["runtime"]):
            files = {
                f"runtime/{folder}/a.py": DOC + f"from gnomon.runtime.{other}.b import x",
                f"runtime/{other}/b.py": DOC,
            }
            assert bool(problems(files)) == (j > i), (folder, other)
    face = {"runtime/__init__.py": DOC + "from gnomon.runtime.launch.train import run", "runtime/launch/train.py": DOC}
    assert problems(face) == []
    [problem] = problems({"runtime/launch/train.py": DOC + "import gnomon.runtime", "runtime/__init__.py": DOC})
    assert "it is below 'gnomon.runtime.launch'" in problem
    [problem] = problems({"runtime/quarry/stone.py": DOC})
    assert "'quarry' is not a folder of runtime" in problem


def test_every_pair_of_rooms_is_judged_by_the_order() -> None:
    for i, room in enumerate(ROOMS):
        for j, other in enumerate(ROOMS):
            if room in FOLDERS or other in FOLDERS:  # their files lie in folders, which have an order of their own
                files = package(**{f"{room}": f"from gnomon.{other} import x", f"{other}": ""})
            else:
                files = package(**{f"{room}__a": f"from gnomon.{other}.b import x", f"{other}__b": ""})
            assert bool(problems(files)) == (j > i), (room, other)


@pytest.mark.parametrize(
    "files",
    [
        package(graph__types="from gnomon.errors import GraphError\nfrom ..units import seconds", errors="", units=""),
        package(errors="import os.path, numpy as np\nfrom collections import abc"),
        package(cli="x = load_late('torch.cuda:device_count')"),
        package(cli="def f(n):\n    return load_late(f'gnomon.orders.{n}:run')", orders=""),
        {"runtime/mesh/a.py": DOC + "def f():\n    import torch\n    import torch.distributed"},
        {"__init__.py": DOC + "from gnomon.cli import main\nfrom .graph import Dim", **package(cli="", graph="")},
        {"graph/__init__.py": DOC + "from gnomon.graph.types import Dim\nfrom . import ops", **package(graph__ops="")},
        {"__main__.py": DOC + "from gnomon.cli import main", **package(cli="")},
    ],
)
def test_what_is_allowed_passes(files: dict[str, str]) -> None:
    assert problems(files) == []


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (package(graph="import gnomon.plans.plan"), "graph.py:5 imports gnomon.plans.plan: 'plans' is below 'graph'"),
        (package(graph="from gnomon import plans", plans=""), "'plans' is below 'graph'"),
        (package(graph__types="from ..plans import Plan"), "'plans' is below 'graph'"),
        (package(graph="if TYPE_CHECKING:\n    from gnomon.plans import Plan"), "'plans' is below 'graph'"),
        (package(graph="import importlib\nx = importlib.import_module('gnomon.plans')"), "'plans' is below 'graph'"),
        (package(cli="from gnomon import __version__"), "'__init__' is below 'cli'"),
        (package(cli="import gnomon"), "'__init__' is below 'cli'"),
        (package(cli="from gnomon.quarry import Stone"), "'quarry' is not a room"),
        (package(quarry__types=""), "quarry/types.py: 'quarry' is not a room"),
        (package(plans="def f():\n    from gnomon.graph import Dim"), "gnomon.graph inside a function"),
        (package(plans="class A:\n    async def f(self):\n        from .graph import Dim"), "inside a function"),
        (package(plans="import torch"), "imports 'torch'"),
        (package(cli="def f():\n    import torch.nn"), "imports 'torch'"),
        (package(runtime="import pandas"), "imports 'pandas'"),
        (package(runtime="x = __import__(name)"), "imports '<computed>'"),
        (package(plans="x = resolve_name(name)"), "imports '<computed>'"),
        (package(plans="x = load_late(name)"), "imports '<computed>'"),
        (package(plans="x = load_late('gnomon.cli:run')", cli=""), "'cli' is below 'plans'"),
        (package(plans="x = load_late(f'gnomon.cli.{name}:run')", cli=""), "'cli' is below 'plans'"),
        (package(plans="x = load_late('torch.cuda:device_count')"), "imports 'torch'"),
        (package(graph__a="from gnomon.graph import b", graph__b="from . import a"), "in a cycle"),
        (
            package(graph__a="from gnomon.graph.b import x", graph__b="from .c import x", graph__c="from .a import x"),
            "<-",
        ),
        (
            {"graph/__init__.py": DOC + "from .a import x", **package(graph__a="from gnomon.graph import x")},
            "in a cycle",
        ),
        ({"graph.py": DOC, "graph/__init__.py": DOC}, "are the same module"),
        ({"errors.py": '"""One line."""\n'}, "errors.py must open with two lines"),
        ({"errors.py": "# no docstring\nx = 1\n"}, "errors.py must open with two lines"),
    ],
)
def test_what_is_not_allowed_is_named(files: dict[str, str], message: str) -> None:
    [problem] = problems(files)
    assert message in problem
