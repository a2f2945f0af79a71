"""The index of public job files, and how one is tried: as it stands, on its own devices, with one thing given."""

from __future__ import annotations

from pathlib import Path

import pytest

from evidence.jobfiles import Listed, Outcome, asked_for, index, is_true, nearest_devices, on, report, tried

SCRIPT = (
    "torchrun --nnodes 2 --nproc_per_node 8 pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --bf16 "
)


def test_the_index_names_each_file_once() -> None:
    listed = index()
    assert len(listed) >= 500 and len({(one.repository, one.commit, one.path) for one in listed}) == len(listed)
    assert all(len(one.commit) == 40 and one.format for one in listed)
    assert 0.25 < sum(one.aside for one in listed) / len(listed) < 0.42


@pytest.mark.parametrize(
    ("more", "outcome", "given"),
    [
        ("", "as it stands", "--on 2x8xh100-sxm"),
        ("--tokenizer-type HuggingFaceTokenizer", "with one", "--vocab-size 50304 --on 2x8xh100-sxm"),
        ("--optimizer other", "refused", ""),
    ],
)
def test_a_file_is_tried(more: str, outcome: str, given: str, tmp_path: Path) -> None:
    one = Listed(repository="a/b", path="x.sh", commit="0" * 40, format="megatron")
    one.below(tmp_path).parent.mkdir(parents=True)
    one.below(tmp_path).write_text(SCRIPT + more)
    result = tried(one, tmp_path, whole=False)
    assert (result.outcome, " ".join(result.given)) == (outcome, given) or result.outcome == "refused" == outcome
    assert any("megatron" in line for line in report([result], 5))


def test_arguments_are_those_of_the_scripts_own_usage(tmp_path: Path) -> None:
    path = tmp_path / "x.sh"
    path.write_text("torchrun a.py $1")
    (tmp_path / "README.md").write_text("```\nsh x.sh \\\ndsw \\\n7B 1\n```")
    assert list(asked_for('or all of them, --set args="…"', path)) == [("--set", "args=dsw 7B 1")]


def test_refusals_are_for_true_reasons_or_not() -> None:
    one = Listed(repository="a/b", path="x.sh", commit="0" * 40, format="megatron")
    text = ("the file trains 'x', whose sizes are not known here", "expected an integer")
    actual = [Outcome(listed=one, outcome="refused", given=(), message=message) for message in text]
    assert [is_true(entry) for entry in actual] == [True, False]


def test_what_a_refusal_asks_for(tmp_path: Path) -> None:
    path = tmp_path / "x.sh"
    path.write_text("torchrun a.py")
    asked = list(asked_for("give --vocab-size or --set a.b=…", path))
    assert asked == [("--vocab-size", "50304"), ("--set", "a.b=1")]
    assert list(asked_for("or another: --set c=2,1, or", path)) == [("--set", "c=2,1")]
    assert nearest_devices("; the nearest number of devices is 48", 8) == 48
    batch = "global = 96 is not a multiple of micro x data-parallel ranks = 2 x 8 = 16"
    assert nearest_devices(batch, 16) == 96
    assert (on(8), on(4), on(48)) == ("1x8xh100-sxm", "1x4xh100-sxm", "6x8xh100-sxm")
