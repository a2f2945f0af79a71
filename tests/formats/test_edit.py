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
        (("overlap-grad-reduce", REMOVED), " \\\n    --overlap-grad-reduce\n", "\n"),
        (("sequence-parallel", True), "    --tp $TP\n", "    --tp $TP\n    --sequence-parallel\n"),
        (("absent", REMOVED), "", ""),
    ],
)
def test_flags_of_a_script(setting: tuple[str, object], before: str, after: str) -> None:
    assert edited(SCRIPT, ".sh", [setting], near=("tp",)) == SCRIPT.replace(before, after, 1)


def test_a_flag_keeps_its_variable_where_that_is_asked() -> None:
    text = edited(SCRIPT, ".sh", [("tp", 4)], variables=False)
    assert "TP=8" in text and "--tp 4" in text and "--tp 9" in text


def test_new_flags_follow_each_other_and_continue_their_command() -> None:
    command = "torchrun train.py --tp 8 \\\n    --lr 1 \\\n    --pp 2\n"
    text = edited(command, ".sh", [("cp", 2), ("sp", True)], near=("pp",))
    assert words(text) == [*words(command), "--cp", "2", "--sp"]
    one_line = "torchrun train.py --tp 8 --lr 1 > log.txt 2>&1"
    assert words(edited(one_line, ".sh", [("lr", 2), ("cp", 2)], near=("lr",))) == words(
        "torchrun train.py --tp 8 --lr 2 --cp 2 > log.txt 2>&1"
    )
    with pytest.raises(InputError, match="no flag near which --cp 2 could be put"):
        edited("python train.py", ".sh", [("cp", 2)], near=("lr",))


# What the shell makes of a script, of which the parts that are no setting stay: (before, setting, after).
SCRIPTS = [
    ("run x.py --mb 1; echo done", ("mb", 2), "run x.py --mb 2; echo done"),
    ("run x.py --mb 1 2>&1 | tee log", ("mb", 2), "run x.py --mb 2 2>&1 | tee log"),
    ("run x.py --mb 1 &> log", ("sp", True), "run x.py --mb 1 --sp &> log"),
    ("run x.py --mb $((2 * (1 + 1))) --z 1", ("mb", 2), "run x.py --mb 2 --z 1"),
    ("run x.py --mb 1 `# size` \\\n  --z 1", ("mb", 2), "run x.py --mb 2 `# size` \\\n  --z 1"),
    ("run x.py --mb \\\n  1 --z 1", ("mb", 2), "run x.py --mb \\\n  2 --z 1"),
    ("run x.py --name 'a # b' --mb 1", ("mb", 2), "run x.py --name 'a # b' --mb 2"),
    ("run x.py --mb 1 $MORE --z 1", ("mb", 2), "run x.py --mb 2 $MORE --z 1"),
    ("run x.py --mb 1 ${ARGS[@]}", ("mb", 2), "run x.py --mb 2 ${ARGS[@]}"),
    ("run x.py --bf16 $EXTRA_ARGS --mb 1", ("bf16", REMOVED), "run x.py $EXTRA_ARGS --mb 1"),
    ("run x.py --bf16 $DATA --mb 1", ("bf16", True), "run x.py --bf16 $DATA --mb 1"),
    ("run x.py \\\n  --mb 1 \\\n  --bf16\necho done", ("bf16", REMOVED), "run x.py \\\n  --mb 1\necho done"),
    ("run x.py \\\r\n  --bf16 \\\r\n  --mb 1\r\n", ("bf16", REMOVED), "run x.py \\\r\n  --mb 1\r\n"),
    ("run x.py \\\r\n  --mb 1\r\n", ("sp", True), "run x.py \\\r\n  --mb 1 \\\r\n  --sp\r\n"),
    ("run x.py --m=1", ("m", (1, 2)), "run x.py --m 1 2"),
    ("run x.py --tp 1 --mb 1 --tp 2", ("tp", 4), "run x.py --tp 1 --mb 1 --tp 4"),
    ("run prep.py --mb 1\nrun x.py --mb 1", ("sp", True), "run prep.py --mb 1\nrun x.py --mb 1 --sp"),
    ("cat <<EOF\ndon't --mb 3\nEOF\nrun x.py --mb 1", ("mb", 2), "cat <<EOF\ndon't --mb 3\nEOF\nrun x.py --mb 2"),
    ('A="--mb 1" B="3"', ("mb", 2), 'A="--mb 2" B="3"'),
    ("N=4\nrun --nproc $N x.py --mb $N", ("mb", 2), "N=4\nrun --nproc $N x.py --mb 2"),
    ("N=4 # a\nrun x.py --mb $N --mb_ $M > out_$N", ("mb", 2), "N=2 # a\nrun x.py --mb $N --mb_ $M > out_$N"),
]


@pytest.mark.parametrize(("before", "setting", "after"), SCRIPTS)
def test_what_is_no_setting_of_a_script_stays(before: str, setting: tuple[str, object], after: str) -> None:
    assert edited(before, ".sh", [setting], near=("mb",)) == after


def test_one_of_several_commands_is_changed() -> None:
    text = "run prep.py --mb 1\nrun x.py --mb 1\n"
    assert edited(text, ".sh", [("mb", 2), ("sp", True)], places="first") == text.replace("1", "2 --sp", 1)
    assert edited(text, ".sh", [("mb", 2)], places="all") == text.replace("1", "2")


@pytest.mark.parametrize("quote", ["'", '"'])
def test_no_quotes_are_put_into_quotes(quote: str) -> None:
    with pytest.raises(InputError, match="needs quotes, and the script's flags are in a quoted string"):
        edited(f"ARGS={quote}--mb 1{quote}\n", ".sh", [("fsdp", "full_shard auto_wrap")], near=("mb",))


ODD = {
    ".yaml": [
        ("a: 1\r\nb: 2 # c\r\n", "b", "a: 1\r\nb: 9 # c\r\n"),
        ("a: 1\nb: 2\na: 7\n", "a", "a: 1\nb: 2\na: 9\n"),
        ("t: |\n  a: 1\n  # b\na: 2\n", "a", "t: |\n  a: 1\n  # b\na: 9\n"),
        ("x:\n  t: >-\n    a: 1\n  a: 5\n", "x.a", "x:\n  t: >-\n    a: 1\n  a: 9\n"),
        ("a:   # none\nb: 1\n", "a", "a: 9   # none\nb: 1\n"),
        ("a: \"x \\\" # y\" # z\nb: 'it''s # q'\n", "a", "a: 9 # z\nb: 'it''s # q'\n"),
        ("a: \"x \\\" # y\"\nb: 'it''s # q'\n", "b", 'a: "x \\" # y"\nb: 9\n'),
        ("a: [[1, 2], 3] # c\n", "a", "a: 9 # c\n"),
        ("base: &b\n  x: 1\njob:\n  <<: *b\n  y: 2\n", "job.x", "base: &b\n  x: 1\njob:\n  <<: *b\n  y: 2\n  x: 9\n"),
        ("größe: 1\na: ünï  # é\n", "a", "größe: 1\na: 9  # é\n"),
        ('a: "foo\n  bar"\nb: 1\n', "a", None),
        ("a: [1,\n  2]\nb: 1\n", "a", None),
        ("a: word\n  and more\n", "a", None),
        ("a: &n 5\nb: *n\n", "a", None),
        ("{a: 1, b: 2}\n", "a", None),
        ("t: {a: 1, b: 2}\n", "t.a", None),
        ('t: {"a": 1, "b": [2]} # c\nu: 1\n', "t.a", 't: {"a": 9, "b": [2]} # c\nu: 1\n'),
    ],
    ".toml": [
        ("a.b = 1\n[x]\ny = 1\n", "a.b", "a.b = 9\n[x]\ny = 1\n"),
        ("a.b = 1\n", "a.c", "a.b = 1\na.c = 9\n"),
        ("[x]\ny = 1\n[[z]]\ny = 2\n", "x.y", "[x]\ny = 9\n[[z]]\ny = 2\n"),
        ('t = """\na = 1\n"""\na = 2\n', "a", 't = """\na = 1\n"""\na = 9\n'),
        ("[x]\n  y = 2\n# end\n[z]\n", "x.w", "[x]\n  y = 2\n  w = 9\n# end\n[z]\n"),
        ("l = [\n  1,\n]\n", "m", "l = [\n  1,\n]\nm = 9\n"),
        ("l = [[1, 2], [3]] # c\n", "l", "l = 9 # c\n"),
        ("[a]\r\nb = 1\r\n", "a.b", "[a]\r\nb = 9\r\n"),
        ("l = [\n  1,\n]\n", "l", None),
        ("[[a]]\nb = 1\n", "a.b", None),
    ],
    ".json": [
        ('{"b": 1e-5, "a": [1, 2], "c": 1.0}', "a", '{"b": 1e-5, "a": 9, "c": 1.0}'),
        ('{\r\n\t"a": {"x": 1}\r\n}\r\n', "a.x", '{\r\n\t"a": {"x": 9}\r\n}\r\n'),
        ('{\n  "a": {\n    "x": 1\n  }\n}', "a.y", '{\n  "a": {\n    "x": 1,\n    "y": 9\n  }\n}'),
        ('{"a": 1, "a": 2}', "a", '{"a": 1, "a": 9}'),
        ("{}", "a.b", '{"a": {"b": 9}}'),
        ('{"a": "}\\"", "é": 1}', "é", '{"a": "}\\"", "é": 9}'),
    ],
}


@pytest.mark.parametrize(
    ("suffix", "before", "key", "after"), [(suffix, *case) for suffix, cases in ODD.items() for case in cases]
)
def test_odd_files_keep_their_looks(suffix: str, before: str, key: str, after: str | None) -> None:
    if after is None:
        with pytest.raises(InputError, match="by hand"):
            edited(before, suffix, [(key, 9)])
        return
    assert edited(before, suffix, [(key, 9)]) == after
    found = WRITERS[suffix][1](after)
    for part in key.split("."):
        found = found[part]
    assert found == 9
