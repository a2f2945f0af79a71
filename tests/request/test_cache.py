"""Captured graphs on disk: kept until a source changes, and a file that somebody else wrote runs nothing."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from gnomon.graph import Graph
from gnomon.models.presets import model
from gnomon.request import cache

NOTES = ("one op has no rule",)


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Graph:
    monkeypatch.setenv("GNOMON_CACHE", str(tmp_path / "cache"))
    return model("gpt2")


def file_of(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "cache" / "graphs").iterdir()
    return path


def test_it_is_kept_until_its_source_changes(graph: Graph, tmp_path: Path) -> None:
    source = tmp_path / "net.py"
    source.write_text("a = 1\n")
    assert cache.load("net:build") is None
    cache.store("net:build", (graph, NOTES), [str(source)])
    assert cache.load("net:build") == (graph, NOTES)
    assert cache.load("net:other") is None
    source.write_text("a = 2\n")
    assert cache.load("net:build") is None


class _Bomb:
    """Unpickled, it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


def test_a_pickle_in_its_place_is_refused_and_replaced(graph: Graph, tmp_path: Path) -> None:
    cache.store("net:build", (graph, NOTES), [])
    path, trace = file_of(tmp_path), tmp_path / "it ran"
    path.write_bytes(pickle.dumps({"format": cache.FORMAT, "graph": _Bomb(trace)}))
    assert cache.load("net:build") is None and not trace.exists()
    cache.store("net:build", (graph, NOTES), [])
    assert cache.load("net:build") == (graph, NOTES)
    pickle.loads(pickle.dumps(_Bomb(trace)))
    assert trace.exists()  # the bomb is one


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("graph", {"rows": [["Path", "/"]]}),
        ("graph", None),
        ("notes", [1]),
        ("notes", None),
        ("files", []),
        ("format", "gnomon.captured/1"),
        ("versions", {}),
        ("here", "/elsewhere"),
    ],
)
def test_a_changed_file_is_refused(graph: Graph, tmp_path: Path, key: str, value: object) -> None:
    cache.store("net:build", (graph, NOTES), [])
    path = file_of(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    assert cache.load("net:build") is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, "\x00\xff"])
def test_what_is_no_file_of_ours_is_refused(graph: Graph, tmp_path: Path, text: str) -> None:
    cache.store("net:build", (graph, NOTES), [])
    file_of(tmp_path).write_text(text)
    assert cache.load("net:build") is None


def test_no_folder_keeps_nothing(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GNOMON_CACHE", "")
    cache.store("net:build", (graph, NOTES), [])
    assert cache.load("net:build") is None
