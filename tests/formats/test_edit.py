"""Settings put into somebody's file: parsers of YAML, TOML, JSON and the shell find them, nothing else changed."""

from __future__ import annotations

import json
import shlex
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import InputError
from gnomon.formats.edit import edited, has
from gnomon.search.fit.terms import REMOVED

yaml = pytest.importorskip("yaml", reason="PyYAML, the oracle, comes with the test extra")

NAMES = ("alpha", "beta", "gamma", "delta")
SCALARS = st.one_of(
    st.integers(-9, 10**6), st.booleans(), st.sampled_from(["full", "a b", "yes", "1e5x", "x: y", "#x", "it's"])
)
TABLES = st.dictionaries(st.sampled_from(NAMES), SCALARS, min_size=1)
FILES = st.dictionaries(
    st.sampled_from(NAMES), st.one_of(SCALARS, TABLES, st.lists(SCALARS, min_size=1, max_size=2)), min_size=1
)


def as_toml(values: dict[str, Any]) -> str:
    plain = [f"{k} = {json.dumps(v)}  # of {k}" for k, v in values.items() if not isinstance(v, dict)]
    tables = [
        "\n".join(["", f"[{k}]", *(f"{inner} = {json.dumps(v)}" for inner, v in table.items())])
        for k, table in values.items()
        if isinstance(table, dict)
    ]
    return "\n".join([*plain, *tables, ""])


def as_yaml(values: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(values, sort_keys=False)
    return "# a job\n" + text.replace(":\n", ":  # a table\n", 1)


def as_json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=4) + "\n"


def filled(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None and value != {}}


WRITERS = {".toml": (as_toml, tomllib.loads), ".yaml": (as_yaml, yaml.safe_load), ".json": (as_json, json.loads)}


@given(
    values=FILES,
    suffix=st.sampled_from(sorted(WRITERS)),
    key=st.lists(st.sampled_from(NAMES), min_size=1, max_size=2),
    value=st.one_of(SCALARS, st.just(REMOVED)),
)
def test_a_parser_finds_the_value_and_everything_else_as_it_was(
    values: dict[str, Any], suffix: str, key: list[str], value: object
) -> None:
    write, read = WRITERS[suffix]
    text, path = write(values), ".".join(key)
    wanted = json.loads(json.dumps(values))
    table: dict[str, Any] = wanted
    for part in key[:-1]:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            table = {}  # a value stands where a table is asked for
            break
        table = inner
    else:
        if isinstance(table.get(key[-1]), dict) and value is not REMOVED:
            table = {}
        elif value is REMOVED:
            table.pop(key[-1], None)
        else:
            table[key[-1]] = value
    try:
        found = read(edited(text, suffix, [(path, value)]))
    except InputError as error:
        assert "by hand" in str(error) and path.split(".")[0] in str(error)
        return
    if value is REMOVED or table:
        # A table whose last key is taken out is an empty one, which YAML reads as nothing.
        assert filled(found or {}) == filled(wanted)
    if value is not REMOVED:
        assert has(edited(text, suffix, [(path, value)]), suffix, path)


SCRIPT = """#!/bin/bash
# run with --tp 9 only on the old cluster
TP=8
MBS=${MBS:-1}
MODEL_ARGS=(
    --tp $TP
    --micro-batch-size "${MBS}"  # a GPU
    --bf16
    --modules core_attn moe
)
torchrun --nproc-per-node 8 train.py "${MODEL_ARGS[@]}" \\
    --lr=3e-4 --seq_length 4096 \\
    --overlap-grad-reduce
"""


def words(script: str) -> list[str]:
    return shlex.split(script.replace("\\\n", " "), comments=True)


@pytest.mark.parametrize(
    ("setting", "before", "after"),
    [
        (("tp", 4), "TP=8", "TP=4"),
        (("micro-batch-size", 2), "MBS=${MBS:-1}", "MBS=${MBS:-2}"),
        (("lr", "1e-4"), "--lr=3e-4", "--lr=1e-4"),
        (("seq-length", 8192), "--seq_length 4096", "--seq_length 8192"),
        (("modules", "core_attn"), "--modules core_attn moe", "--modules core_attn"),
        (("bf16", REMOVED), "    --bf16\n", ""),
        (("bf16", False), "    --bf16\n", ""),
        (("modules", REMOVED), "    --modules core_attn moe\n", ""),
        (("overlap-grad-reduce", REMOVED), "    --overlap-grad-reduce\n", ""),
        (("sequence-parallel", True), "    --tp $TP\n", "    --tp $TP\n    --sequence-parallel\n"),
        (("absent", REMOVED), "", ""),
    ],
)
def test_flags_of_a_script(setting: tuple[str, object], before: str, after: str) -> None:
    assert edited(SCRIPT, ".sh", [setting], beside=("tp",)) == SCRIPT.replace(before, after, 1)


def test_a_flag_keeps_its_variable_where_that_is_asked() -> None:
    text = edited(SCRIPT, ".sh", [("tp", 4)], variables=False)
    assert "TP=8" in text and "--tp 4" in text and "--tp 9" in text


def test_new_flags_follow_each_other_and_continue_their_command() -> None:
    command = "torchrun train.py --tp 8 \\\n    --lr 1 \\\n    --pp 2\n"
    text = edited(command, ".sh", [("cp", 2), ("sp", True)], beside=("pp",))
    assert words(text) == [*words(command), "--cp", "2", "--sp"]
    one_line = "torchrun train.py --tp 8 --lr 1 > log.txt 2>&1"
    assert words(edited(one_line, ".sh", [("lr", 2), ("cp", 2)], beside=("lr",))) == words(
        "torchrun train.py --tp 8 --lr 2 --cp 2 > log.txt 2>&1"
    )
    with pytest.raises(InputError, match="no flag near which --cp 2 could be put"):
        edited("python train.py", ".sh", [("cp", 2)], beside=("lr",))
