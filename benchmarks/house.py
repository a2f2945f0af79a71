"""What the source says of itself: sizes, quoted op kinds, namesakes, copies, and how many files an addition touches.

    python benchmarks/house.py                          # this tree
    python benchmarks/house.py OLDER/src/gnomon         # another one, in a column before

Only syntax trees are read, nothing is imported. Op kinds are counted by the names of this tree's registry: a quoted one
is a string constant that equals a name, outside `ops/` and the builders of `models/`, and outside docstrings. Files
that an addition touches are those whose constants or imports name an entry that was added so, the median over entries.
Namesakes are classes of one name in three files and more; a docstring of a class or function is a fragment if it begins
with a preposition, or its first sentence has three words at most, which is no proof that it has no verb; duplicate
pairs are functions of five statements and more whose trees are equal but for names. Leaves out seconds of tests (CI
says them).
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

HERE = Path(__file__).parents[1] / "src" / "gnomon"
FRAGMENT = re.compile(
    r"(Of|As|In|With|By|From|To|For|Beside|Without|Where|On|At|Between|Over|After|Before|Under|Within|Among|Like|Until|"
    r"Through|Per|But|And|Or|That|Which|Than)\b"
)
"""How a docstring begins that is taken for a fragment."""
STATEMENTS = 5
"""Of a function that counts as a copy of another."""
NAMESAKES = 3
"""Files that define a class of one name."""
ADDED: Mapping[str, tuple[str, ...]] = {
    "an op kind": ("clip", "nm_linear", "paged_attention"),
    "a device generation": ("hopper", "ada", "cdna3"),
    "a HF model_type": ("olmo2", "phi3", "starcoder2", "gemma2"),
    "a method": ("lina", "skrull", "mario", "disco"),
    "a stack": ("nanotron", "torchtitan", "internevo", "vtrain"),
    "a job format": ("axolotl", "swift", "llm_foundry", "openrlhf"),
}
"""What is added -> entries of this tree that were added so."""


@dataclass(frozen=True, slots=True)
class Module:
    """One file."""

    path: Path
    tree: ast.Module
    lines: int
    comments: int
    """Lines that hold a comment and nothing else, or end in one."""
    constants: tuple[str, ...]
    """String constants, docstrings left out."""
    named: frozenset[str]
    """What it imports, and words of its constants."""

    @property
    def room(self) -> str:
        """The folder below the package."""
        return self.path.parts[0]


def modules(source: Path) -> list[Module]:
    """Every file of a package."""
    found = []
    for path in sorted(source.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        with tokenize.open(path) as file:
            tokens = tokenize.generate_tokens(file.readline)
            comments = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
        lines = sum(1 for line in text.splitlines() if line.strip())
        tree = ast.parse(text)
        values = tuple(constants(tree))
        named = {a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
        named |= {word for value in values for word in value.replace(":", " ").split()}
        found.append(Module(path.relative_to(source), tree, lines, len(comments), values, frozenset(named)))
    return found


def kinds() -> frozenset[str]:
    """Names of the op kinds of this tree's registry."""
    found = set[str]()
    for path in (HERE / "ops").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("OpKind", "replace"):
                found |= {
                    k.value.value
                    for k in node.keywords
                    if k.arg == "name" and isinstance(k.value, ast.Constant) and isinstance(k.value.value, str)
                }
    return frozenset(found)


def constants(tree: ast.AST) -> list[str]:
    """String constants, docstrings left out."""
    return list(_constants(tree))


def _constants(tree: ast.AST) -> Iterator[str]:
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def compared(tree: ast.AST, names: frozenset[str]) -> int:
    """How often `….kind` is compared with quoted names of kinds, or matched by them."""
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and any(_is_kind(side) for side in (node.left, *node.comparators)):
            count += sum(value in names for value in constants(node))
        elif isinstance(node, ast.Match) and _is_kind(node.subject):
            count += sum(value in names for case in node.cases for value in constants(case.pattern))
    return count


def _is_kind(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "kind"


def touched(tree: Sequence[Module], entry: str, data: Sequence[tuple[Path, str]]) -> int:
    """Files that name an entry, in constants or imports, or are its own; data files too."""
    spelled = {entry, entry.replace("_", "-")}
    found = 0
    for module in tree:
        own = module.path.stem in spelled or module.path.parent.name in spelled
        found += bool(own or spelled & module.named)
    for path, text in data:
        found += path.stem in spelled or any(f'"{name}"' in text for name in spelled)
    return found


def parameters(tree: Sequence[Module]) -> list[int]:
    """Parameters of every function, self and cls left out."""
    found = []
    for module in tree:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef):
                names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                found.append(sum(name not in ("self", "cls") for name in names))
    return sorted(found)


def namesakes(tree: Sequence[Module]) -> Counter[str]:
    """Class -> files that define one of that name, of NAMESAKES and more."""
    files = defaultdict[str, set[Path]](set)
    for module in tree:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                files[node.name].add(module.path)
    return Counter({name: len(paths) for name, paths in files.items() if len(paths) >= NAMESAKES})


def fragments(tree: Sequence[Module]) -> tuple[int, int]:
    """(docstrings of classes and functions that are taken for fragments, all of them)."""
    found = every = 0
    for module in tree:
        for node in ast.walk(module.tree):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                first = re.split(r"(?<=[.:;])\s", text)[0]
                every += 1
                found += bool(FRAGMENT.match(text)) or len(first.split()) <= 3
    return found, every


def duplicates(tree: Sequence[Module]) -> int:
    """Pairs of functions that are the same but for names."""
    same = Counter[str]()
    for module in tree:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef) and sum(isinstance(n, ast.stmt) for n in ast.walk(node)) > STATEMENTS:
                same[_shape(node)] += 1
    return sum(len(list(combinations(range(count), 2))) for count in same.values())


def _shape(node: ast.FunctionDef) -> str:
    """The text of a function's body, without its docstring and with one name for all variables."""
    body = node.body[1:] if isinstance(node.body[0], ast.Expr) else node.body
    copy = ast.parse(ast.unparse(ast.Module(body=body, type_ignores=[])))
    for inner in ast.walk(copy):
        if isinstance(inner, ast.Name):
            inner.id = "_"
    return ast.dump(copy)


def table(source: Path) -> dict[str, str]:
    """Row -> value."""
    tree, names = modules(source), kinds()
    lines, comments = sum(m.lines for m in tree), sum(m.comments for m in tree)
    outside = [m for m in tree if m.room not in ("ops", "models")]
    quoted = Counter(m.room for m in outside for value in m.constants if value in names)
    asked = Counter[str]()
    for module in outside:
        asked[module.room] += compared(module.tree, names)
    counts, shared, (begun, documented) = parameters(tree), namesakes(tree), fragments(tree)
    rooms = ("prediction", "runtime", "graph", "prices", "sharding")
    rows = {
        "files of src": f"{len(tree):,}",
        "lines of src (not blank)": f"{lines:,}",
        "comment lines": f"{comments / lines:.1%}",
        "docstrings that are fragments": f"{begun:,} of {documented:,}",
        "op kinds quoted outside ops/ and models/": f"{quoted.total():,}",
        f"… in {', '.join(rooms)}": ", ".join(f"{quoted[room]}" for room in rooms),
        "op kinds that code compares `.kind` with": f"{asked.total():,}",
        "parameters, 95th percentile": f"{counts[int(0.95 * len(counts))]}",
        f"class names in {NAMESAKES} files and more": f"{len(shared)} ({max(shared.values(), default=0)} at most)",
        "duplicate pairs of functions": f"{duplicates(tree)}",
    }
    data = [(path, path.read_text(encoding="utf-8")) for path in source.rglob("*.toml")]
    for what, entries in ADDED.items():
        each = [count for entry in entries if (count := touched(tree, entry, data))]
        rows[f"files that name {what} (median)"] = f"{statistics.median(each):g}" if each else "none there"
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("before", nargs="?", type=Path, help="src/gnomon of another tree")
    options = parser.parse_args(argv)
    sources = ([options.before] if options.before else []) + [HERE]
    tables = [table(source) for source in sources]
    print("|  | " + " | ".join((["before"] if options.before else []) + ["now"]) + " |")
    print("|---|" + "---|" * len(tables))
    for row in tables[-1]:
        print(f"| {row} | " + " | ".join(values.get(row, "-") for values in tables) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
