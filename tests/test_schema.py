"""The strict reader and writer: what is written reads back equal, and what does not fit is named with its path."""

from __future__ import annotations

import json
import math
import sys
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon import schema
from gnomon.errors import FormatError, InputError, PlanError, UnitError
from gnomon.schema.packaged import plain_values
from gnomon.units import MAX_INTEGER, Bytes, BytesPerS, Seconds

HEAD = 'schema = "gnomon.job/1"\n'


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    kind: Literal["ring"] = "ring"
    width: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    kind: Literal["tree"] = "tree"
    children: tuple[Ring | Tree, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    devices: int
    share: float = 1.0
    names: tuple[str, ...] = ()
    shape: Ring | Tree = Ring()

    def __post_init__(self) -> None:
        if self.devices < 0:
            raise PlanError(f"devices must not be negative, got {self.devices}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    SCHEMA: ClassVar[str] = "gnomon.job/1"

    name: str
    stages: tuple[Stage, ...] = ()
    link: BytesPerS | None = None
    memory: Bytes = 2**30
    wait: Seconds | Literal["off"] = "off"
    color: Color = Color.RED
    mode: Literal["train", "serve"] = "train"
    number: int | float | bool = 0
    table: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    grid: tuple[tuple[int, int], ...] = ()
    first: Stage | None = None


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
INTS = st.integers(-(2**63), 2**63 - 1)
SHAPES = st.recursive(
    st.builds(Ring, width=INTS),
    lambda inner: st.builds(Tree, children=st.lists(inner, max_size=3).map(tuple)),
    max_leaves=5,
)
STAGES = st.builds(
    Stage,
    devices=st.integers(0, 2**40),
    share=FLOATS,
    names=st.lists(TEXT, max_size=30).map(tuple),
    shape=SHAPES,
)
JOBS = st.builds(
    Job,
    name=TEXT,
    stages=st.lists(STAGES, max_size=4).map(tuple),
    link=st.none() | st.floats(0, 1e300),
    memory=st.integers(0, MAX_INTEGER),
    wait=st.just("off") | st.floats(0, 1e300),
    color=st.sampled_from(Color),
    mode=st.sampled_from(["train", "serve"]),
    number=INTS | FLOATS | st.booleans(),
    table=st.dictionaries(TEXT, st.lists(INTS, max_size=40).map(tuple), max_size=4),
    grid=st.lists(st.tuples(INTS, INTS), max_size=4).map(tuple),
    first=st.none() | STAGES,
)


@given(JOBS)
def test_what_is_written_reads_back_equal(job: Job) -> None:
    text = schema.dump(job)
    assert schema.load(Job, text) == job
    assert schema.load(Job, text.encode()) == job
    assert schema.dump(schema.load(Job, text)) == text


@given(JOBS)
def test_json_reads_back_equal(job: Job) -> None:
    assert schema.from_mapping(Job, json.loads(json.dumps(schema.to_mapping(job)))) == job


@given(JOBS)
def test_another_reader_sees_the_same_values(job: Job) -> None:
    assert tomllib.loads(schema.dump(job)) == schema.to_mapping(job)


def test_text_is_what_a_person_would_write() -> None:
    job = Job(
        name='a "small" job',
        stages=(Stage(devices=8), Stage(devices=4, share=0.5)),
        link=900e9,
        memory=80 * 2**30,
        first=Stage(devices=2, names=("x", "y")),
    )
    assert schema.dump(job) == (
        'schema = "gnomon.job/1"\n'
        'name = "a \\"small\\" job"\n'
        "stages = [\n"
        "    {devices = 8},\n"
        "    {devices = 4, share = 0.5},\n"
        "]\n"
        'link = "900 GB/s"\n'
        'memory = "80 GiB"\n'
        "\n"
        "[first]\n"
        "devices = 2\n"
        'names = ["x", "y"]\n'
    )


def test_defaults_are_left_out_and_an_integer_is_a_number() -> None:
    assert schema.dump(Job(name="x")) == HEAD + 'name = "x"\n'
    read = schema.load(Job, HEAD + 'name = "x"\nstages = [{devices = 1, share = 2}]')
    assert read.stages[0].share == 2.0
    assert type(read.stages[0].share) is float


@pytest.mark.parametrize(
    ("body", "kind", "path", "says"),
    [
        ("", InputError, "$", 'Missing key "name"'),
        ("name = 3", InputError, "$.name", "Expected string, got integer 3"),
        ('name = "x"\nstagse = []', InputError, "$", 'Unknown key "stagse" (did you mean \'stages\''),
        ('name = "x"\nzzz = 1', InputError, "$", "the keys here are name, stages"),
        ('name = "x"\nstages = {}', InputError, "$.stages", "Expected array of table, got table"),
        ('name = "x"\nstages = [{devices = 1}, {}]', InputError, "$.stages[1]", 'Missing key "devices"'),
        (
            'name = "x"\nstages = [{devices = "eight"}]',
            InputError,
            "$.stages[0].devices",
            'Expected integer, got string "eight" - at `$.stages[0].devices`',
        ),
        ('name = "x"\nstages = [{devices = true}]', InputError, "$.stages[0].devices", "got boolean true"),
        ('name = "x"\nstages = [{devices = 1.0}]', InputError, "$.stages[0].devices", "got number 1.0"),
        ('name = "x"\nstages = [{devices = -1}]', InputError, "$.stages[0]", "must not be negative"),
        ('name = "x"\nfirst = {devices = 1, share = nan}', InputError, "$.first.share", "finite"),
        ('name = "x"\nfirst = {devices = 1, share = -inf}', InputError, "$.first.share", "finite"),
        ('name = "x"\nfirst = {devices = 1, share = true}', InputError, "$.first.share", "Expected number"),
        ('name = "x"\nfirst = {devices = 99999999999999999999}', InputError, "$.first.devices", "64 bits"),
        ('name = "x"\nfirst = {devices = 1, share = 9007199254740993}', InputError, "$.first.share", "not exact"),
        ('name = "x"\nlink = 900', UnitError, "$.link", "with a unit"),
        ('name = "x"\nlink = "900"', UnitError, "$.link", "bare '900'"),
        ('name = "x"\nlink = "900 GB"', UnitError, "$.link", "unit of bytes"),
        ('name = "x"\nlink = "nan GB/s"', UnitError, "$.link", "no finite number"),
        ('name = "x"\nlink = ["900 GB/s"]', InputError, "$.link", "array of 1"),
        ('name = "x"\nmemory = "80 Gb"', UnitError, "$.memory", "bits"),
        ('name = "x"\nwait = "on"', InputError, "$.wait", "no finite number"),
        ('name = "x"\ncolor = "green"', InputError, "$.color", 'Expected "red" or "blue"'),
        ('name = "x"\nmode = "tran"', InputError, "$.mode", "did you mean 'train'"),
        ('name = "x"\ngrid = [[1, 2], [3]]', InputError, "$.grid[1]", "array of 2"),
        ('name = "x"\ntable = {"a b" = ["c"]}', InputError, '$.table["a b"][0]', "Expected integer"),
        ('name = "x"\nname2 = 2020-01-01', InputError, "$", "Unknown key"),
        ('name = 2020-01-01', InputError, "$.name", "date 2020-01-01"),
        ('name = "x"\nfirst = {devices = 1, shape = {kind = "star"}}', InputError, "$.first.shape", "'ring', 'tree'"),
        ('name = "x"\nfirst = {devices = 1, shape = {}}', InputError, "$.first.shape", "it is missing"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_with_its_path(body: str, kind: type, path: str, says: str) -> None:
    with pytest.raises(kind) as caught:
        schema.load(Job, HEAD + body, source="job.toml")
    assert caught.value.path == path
    assert says in str(caught.value)
    assert str(caught.value).startswith("job.toml: ")
    assert str(caught.value).endswith(f" - at `{path}`")


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ("", 'schema = "gnomon.job/1"'),
        ('schema = "gnomon.job/2"', "newer Gnomon"),
        ('schema = "gnomon.job/0"', "old format"),
        ('schema = "gnomon.plan/1"', "Expected a gnomon.job file, got a gnomon.plan file"),
        ('schema = "1"', 'Expected schema "gnomon.job/1"'),
        ("schema = 1", "got integer 1"),
    ],
)
def test_the_header_is_wanted_and_checked(header: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        schema.load(Job, header + '\nname = "x"')
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "path", "says"),
    [
        (HEAD + 'name = "x"\nname = "y"', "job.toml:3:11", "Duplicate key 'name'"),
        (HEAD + '[first]\ndevices = 1\n[first]\ndevices = 2', "job.toml:4:7", "Duplicate key '[first]'"),
        (HEAD + 'first = {devices = 1, devices = 2}', "job.toml:2:34", "Duplicate"),
        (HEAD + "name = ", "job.toml:2:8", "Invalid value"),
        (HEAD + 'name = "x', "job.toml:2:10", "Illegal character"),
        (HEAD + "n = " + "9" * 5000, "job.toml", "digits"),
        ((HEAD + 'name = "x"').encode() + b"\nb = '\xff'", "job.toml:3", "UTF-8"),
    ],
)  # fmt: skip
def test_what_is_no_toml_is_named_with_line_and_column(text: Any, path: str, says: str) -> None:
    with pytest.raises(FormatError) as caught:
        schema.load(Job, text, source="job.toml")
    assert caught.value.path == path
    assert says in str(caught.value)


@pytest.mark.parametrize("depth", [40, 100, 100_000])
@pytest.mark.parametrize("shape", ["a = {}", "a{} = 1", "[a{}]\nb = 1", "a = {}"])
def test_deep_nesting_is_an_error_not_a_crash(depth: int, shape: str) -> None:
    nest = ".a" * depth if "a{}" in shape else "[" * depth + "]" * depth
    with pytest.raises(InputError, match="Nested deeper than 32 levels"):
        schema.load(Job, HEAD + shape.format(nest))


def test_deep_inline_tables_and_deep_json_are_errors_too() -> None:
    with pytest.raises(InputError, match="Nested deeper than 32 levels"):
        schema.load(Job, HEAD + "a = " + "{a = " * 100 + "1" + "}" * 100)
    nested: dict[str, Any] = {"kind": "ring"}
    for _ in range(5000):
        nested = {"kind": "tree", "children": [nested]}
    with pytest.raises(InputError, match="Nested deeper than 32 levels"):
        schema.from_mapping(Tree, nested)


def test_brackets_and_dots_in_strings_and_comments_are_not_nesting() -> None:
    name = "[" * 99 + "." * 99
    text = HEAD + f"name = '''{name}'''  # {name} \"\n" + f'table = {{"{name}" = [1]}}\n'
    read = schema.load(Job, text)
    assert read.name == name
    assert read.table == {name: (1,)}


def test_a_large_file_is_refused_before_parsing(tmp_path: Path) -> None:
    text = HEAD + 'name = "' + "x" * 10_000_000 + '"'
    (tmp_path / "job.toml").write_text(text)
    start = time.process_time()
    with pytest.raises(InputError, match="8 MB"):
        schema.load(Job, text)
    with pytest.raises(InputError, match="8 MB"):
        schema.load_file(Job, tmp_path / "job.toml")
    assert time.process_time() - start < 0.5


def test_hostile_text_takes_linear_time() -> None:
    # Each would take minutes if a pattern backtracked or the parser met it: see the comments in gnomon.schema.toml.
    start = time.process_time()
    for text in ['\\"""' * 100_000, "a." * 200_000 + "a = 1", '"' * 300_001, "'" * 300_001, '"""' + '"\\' * 200_000]:
        with pytest.raises(InputError):
            schema.load(Job, text)
    assert time.process_time() - start < 5


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        schema.load_file(Job, tmp_path / "no.toml")
    (tmp_path / "yes.toml").write_text(HEAD + 'name = "x"')
    assert schema.load_file(Job, tmp_path / "yes.toml") == Job(name="x")


@pytest.mark.parametrize(
    ("job", "path"),
    [
        (Job(name=3), "$.name"),  # type: ignore[arg-type]
        (Job(name="\ud800"), "$.name"),
        (Job(name="x", link=math.inf), "$.link"),
        (Job(name="x", memory=1.5), "$.memory"),  # type: ignore[arg-type]
        (Job(name="x", stages=[Stage(devices=1)]), "$.stages"),  # type: ignore[arg-type]
        (Job(name="x", stages=(Stage(devices=2**70),)), "$.stages[0].devices"),
        (Job(name="x", number=math.nan), "$.number"),
        (Job(name="x", first=Ring()), "$.first"),  # type: ignore[arg-type]
        (Job(name="x", mode="rest"), "$.mode"),  # type: ignore[arg-type]
    ],
)
def test_a_value_that_could_not_be_read_is_not_written(job: Job, path: str) -> None:
    with pytest.raises(InputError) as caught:
        schema.dump(job)
    assert caught.value.path == path


@dataclass(frozen=True)
class NoneWithoutDefault:
    value: int | None


@dataclass(frozen=True)
class TextOrQuantity:
    value: str | Bytes = "x"


@dataclass(frozen=True)
class FloatBytes:
    value: set[int]


@pytest.mark.parametrize("cls", [NoneWithoutDefault, TextOrQuantity, FloatBytes])
def test_annotations_that_no_file_could_express_are_our_mistake(cls: type) -> None:
    with pytest.raises(TypeError):
        schema.from_mapping(cls, {"value": "3 GB"})


def test_what_is_kept_of_a_packaged_file_is_never_taken_for_another_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    path = tmp_path / "rows.toml"
    path.write_text("a = 1\n")
    assert plain_values(path) == {"a": 1}
    (kept,) = (tmp_path / "__pycache__").iterdir()
    kept.write_bytes(kept.read_bytes().replace(b'"a":1', b'"a":7'))
    assert plain_values(path) == {"a": 7}  # it is read from there
    path.write_text("a = 2\n")  # of the same size, in the same second
    assert plain_values(path) == {"a": 2}
    kept.write_bytes(kept.read_bytes()[:-2])  # cut short
    assert plain_values(path) == {"a": 2}
