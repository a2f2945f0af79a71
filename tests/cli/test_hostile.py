"""Files cut off, in other encodings or of other kinds, numbers that are none, places that are full, and ^C."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gnomon.cli import main
from gnomon.errors import InputError
from gnomon.schema import save_text

SOURCE = str(Path(__file__).parents[2] / "src")
PLAN_FILE = """schema = "gnomon.planfile/1"
model = "llama-tiny"
on = "1x2xa100-sxm-80gb"
[workload]
global_batch_size = 4
seq_len = 64
[plan]
mesh = {dp_shard = 2}
"""
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 256,
}
H100 = "--on 1x2xh100-sxm"


def write(folder: Path) -> None:
    """What the requests below name."""
    whole = PLAN_FILE.encode()
    (folder / "p.toml").write_bytes(whole)
    (folder / "cut.toml").write_bytes(whole[:-2])
    (folder / "utf16.toml").write_bytes(PLAN_FILE.encode("utf-16"))
    (folder / "marked.toml").write_bytes(b"\xef\xbb\xbf" + whole)
    (folder / "windows.toml").write_bytes(whole.replace(b"\n", b"\r\n"))
    (folder / "twice.toml").write_bytes(whole + whole)
    for name, changes in (
        ("inf", {"hidden_size": float("inf")}),
        ("nan", {"hidden_size": float("nan")}),
        ("negative", {"num_attention_heads": -4}),
        ("wide", {"hidden_size": 2**31}),
        ("deep", {"num_hidden_layers": 10**9}),
        ("other", {"model_type": "mamba"}),
        ("mödel 😀", {}),
    ):
        (folder / f"{name}.json").write_text(json.dumps(LLAMA | changes), encoding="utf-8")
    for name, text in (
        ("list.json", "[]"),
        ("nan-counts.json", "[1, NaN]"),
        ("text.json", "tokens"),
        ("nested.json", "[" * 100_000),
        ("huge-counts.json", f"[1{'0' * 400}]"),
        ("ranks.toml", PLAN_FILE.replace("dp_shard = 2", "pp = 100_000_000")),
        ("stages.toml", PLAN_FILE.replace("dp_shard = 2", "pp = 4_000_000")),
        ("units.toml", PLAN_FILE.replace("size = 4", "size = 8_000_000")),
        ("wide.yaml", f"model: {{num_layers: {2**63}}}"),
        ("long.toml", PLAN_FILE.replace("seq_len = 64", f"seq_len = {2**63 - 1}")),
        (
            "names.yaml",
            f"{{model_name_or_path: meta-llama/Llama-3.2-1B, stage: sft, bf16: true, deepspeed: {'z' * 9999}}}",
        ),
        ("cut.sh", "model.tensor_model_parallel_size=2 \\"),
        ("quote.sh", "model.tensor_model_parallel_size='2"),
        ("ragged.csv", "id,family\n1,2,3\n"),
        ("semicolons.csv", "id;family\n1;2\n"),
    ):
        (folder / name).write_text(text)


REFUSED = [
    ("predict --plan cut.toml", "Not TOML: "),
    ("predict --plan cut.toml", "; the file may have been cut off - at `cut.toml:8:"),
    ("explain s.timeline", "is no model and no job file that is recognised"),
    ("predict --plan utf16.toml", "Not UTF-8: byte 0xff; save it as text in UTF-8 - at `utf16.toml:1`"),
    ("predict --plan twice.toml", "Duplicate key"),
    (f"predict inf.json {H100}", "expected an integer of at least 1, got inf"),
    (f"predict nan.json {H100}", "numbers must be finite"),
    (f"predict negative.json {H100}", "expected an integer of at least 1, got -4 - at `$.num_attention_heads`"),
    (f"predict deep.json {H100}", "num_layers is 1000000000: at most 10000"),
    (f"predict wide.json {H100} --seq-len 4096", "if it is part of a step, a size of the model or the batch"),
    (f"predict other.json {H100}", "model_type 'mamba' has no reader"),
    (f"predict list.json {H100}", "holds a list; expected an object"),
    ("predict gpt2 --on 0x8xh100-sxm", "has a count of 0; counts are 1 or more"),
    ("predct gpt2", "'predct' is none of predict, plan, "),
    ("predct gpt2", "(did you mean 'predict', "),
    (f"predict gpt2 {H100} --global-bach 3", "unrecognized arguments: --global-bach 3 (did you mean '--global-batch'"),
    ("catalogue devcies", "(did you mean 'devices'?)"),
    ("catalogue devices h10", "`gnomon catalogue devices` lists all"),
    (
        f"predict nowhere/model {H100}",
        "unknown model 'nowhere/model'; `gnomon catalogue models` lists all, and there is no",
    ),
    (
        f"predict nowhere/model {H100}",
        "hf download nowhere/model config.json --local-dir model, then give model as the",
    ),
    (f"predict nowhere/at/all {H100}", "cannot read 'nowhere/at/all': there is no such file or folder"),
    (f"predict gpt2 {H100} --global-batch 5", "no whole number of microbatches of 2 sequences (1 x 2 data ranks)"),
    ("predict gpt2 --on 999999999999x8xh100-sxm", "7999999999992 devices; the limit is 4000000"),
    ("predict gpt2 --on 1e3x8xh100-sxm", "write NODESxDEVICESxDEVICE"),
    (f"predict gpt2 {H100} --seq-len 4097", "the longest legal seq_len is 1024"),
    (f"predict llama-3.1-8b {H100} --seq-len 999999999", "if it is part of a step, a size of the model or the batch"),
    (f"predict qwen3-30b-a3b {H100} --router zipf:nan", "s = nan; the exponent of zipf is a finite number"),
    (f"predict qwen3-30b-a3b {H100} --router zipf:inf", "s = inf; the exponent of zipf is a finite number"),
    (f"predict qwen3-30b-a3b {H100} --router zipf:-1", "s = -1.0; the exponent of zipf is a finite number"),
    (f"predict qwen3-30b-a3b {H100} --router zipf:1e9", "use a flatter load"),
    (f"predict qwen3-30b-a3b {H100} --router nan-counts.json", "finite counts of at least 0"),
    (f"predict qwen3-30b-a3b {H100} --router text.json", "is not JSON"),
    (f"predict qwen3-30b-a3b {H100} --router nested.json", "is nested too deeply"),
    (f"predict qwen3-30b-a3b {H100} --router huge-counts.json", "holds a number that is too large"),
    ("predict --plan ranks.toml", "a mesh of 100,000,000 ranks is over the limit of 4,000,000"),
    ("predict --plan stages.toml", "4000000 stages (pp = 4000000 x virtual_stages = 1) need as many layers"),
    ("predict --plan units.toml", "4,000,000 microbatches on 1 stages: a Program holds up to 262,142 microbatches"),
    (f"predict gpt2 {H100} --from nanotron wide.yaml", "'9223372036854775808' is over the limit of whole numbers"),
    (f"predict {H100} --from llama-factory names.yaml", "cannot read 'zzzz"),  # of a name that no file can have
    ("predict --plan long.toml", "is over the limit of 1,000,000,000; give the tokens of one sequence"),
    (f"predict gpt2 {H100} --from megatron-bridge cut.sh", "has a \\ at its very end"),
    (f"predict gpt2 {H100} --from megatron-bridge quote.sh", "has a quote that is not closed"),
    (f"plan gpt2 {H100} --global-batch 8 --fix fp8=maybe", "fp8 is one of none, tensorwise"),
    (f"plan gpt2 {H100} --global-batch 8 --fix tp=2 --tp 1", "--fix tp=2 and --tp 1 contradict each other"),
    (f"predict meta-llama/Llama-3.1-9B {H100}", "(did you mean 'meta-llama/Llama-3.1-8B'"),
    (f"predict qwen3-30b-a3b {H100} --capacity nan", "router capacity = nan must be at least 1"),
    (f"predict gpt2 {H100} --html nowhere/x/y.html", "there is no folder 'nowhere/x'"),
    ("compare s.timeline cut.timeline", "it may have been cut off"),
    (f"plan gpt2 {H100} --global-batch 8 --longest 1024 --seq-len 512", "--longest looks for the sequence length"),
    (f"plan gpt2 {H100} --global-batch 8 --price nan", "--price 'nan' must be above 0"),
    (f"plan gpt2 {H100} --global-batch 8 --vary nodes=9..1", "a range goes up, from 1 on"),
    (f"plan gpt2 {H100} --global-batch 8 --forbid pp>>1", "pp is a whole number, not '>1'"),
    (f"plan gpt2 {H100} --global-batch 8 --deadline 7 --tokens 1T", "got bare '7'"),
    (f"plan gpt2 {H100} --tokens-per-batch 1", "are not whole sequences of 1024"),
    ("validate ragged.csv", "has a column 'family' that is not known"),
    ("validate semicolons.csv", "that is not known"),
    ("export list.json --to megatron", "Not TOML"),
    ("", "usage: gnomon"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with what is wrong in other ways than `test_refused` has; nothing may be added to it."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    yield tmp_path
    assert {path.name for path in tmp_path.iterdir()} - before <= {"s.timeline", "cut.timeline"}


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_one_clear_answer(words: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "timeline" in words:
        assert main(["predict", "--plan", "p.toml", "--timeline", "s.timeline"]) == 0
        (folder / "cut.timeline").write_bytes((folder / "s.timeline").read_bytes()[:400])
        capsys.readouterr()
    status = main(words.split())
    out, err = capsys.readouterr()
    assert (status, out) == (2, "") and message in err and "mistake in Gnomon itself" not in err


@pytest.mark.parametrize("words", ["predict --plan marked.toml", "predict --plan windows.toml"])
def test_marks_and_line_ends_of_other_systems_are_read(words: str, folder: Path) -> None:
    assert main(words.split()) == 0


def test_names_in_any_letters(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "mödel 😀.json", *H100.split(), "--seq-len", "64"]) == 0
    assert capsys.readouterr().out.startswith("mödel 😀 on 1x2xh100-sxm\n")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("words", ["--help", "predict --help", f"predict mödel.json {H100} --seq-len 64 --json"])
def test_terminals_of_other_encodings(words: str, encoding: str, folder: Path) -> None:
    (folder / "mödel 😀.json").rename(folder / "mödel.json")
    program = f"import sys; from gnomon.cli import main; sys.exit(main({words.split()!r}))"
    environment = {**os.environ, "PYTHONPATH": SOURCE, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment, timeout=600)
    (folder / "mödel.json").rename(folder / "mödel 😀.json")
    assert (done.returncode, done.stderr) == (0, b"")
    if "--json" in words:
        assert json.loads(done.stdout)["model"] == "mödel"


def started(words: str, first: str = "", **options: object) -> subprocess.Popen[str]:
    """A command in a process group of its own, which writes a line to stderr when it starts. Whoever runs the tests in
    the background has ^C ignored, and children inherit that. first: Python that runs before."""
    program = f"{first}import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    program += "from gnomon.cli import main; print('starts', file=sys.stderr, flush=True); "
    program += f"sys.exit(main({words.split()!r}))"
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        [sys.executable, "-c", program], text=True, env=environment, start_new_session=True, **options
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_output_that_is_full_is_no_mistake_of_ours() -> None:
    with open("/dev/full", "w") as full:
        process = started("catalogue devices", stdout=full, stderr=subprocess.PIPE)
        _, err = process.communicate(timeout=600)
    assert (process.returncode, err) == (2, "starts\ngnomon: cannot write the output: No space left on device\n")


def test_a_plan_that_is_interrupted_before_it_searches_says_so_and_writes_nothing(tmp_path: Path) -> None:
    """The signal comes when the command reads its cluster, however fast the machine is."""
    target = tmp_path / "plan.toml"
    words = f"plan gpt3-175b --on 64x8xa100-sxm-80gb --global-batch 512 --seq-len 2048 -o {target}"
    first = "import os, signal; from gnomon import hardware; read = hardware.parse_cluster; "
    first += "hardware.parse_cluster = lambda *words: (os.kill(os.getpid(), signal.SIGINT), read(*words))[1]; "
    process = started(words, first, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out, err) == (130, "", "starts\ngnomon: interrupted\n")
    assert not list(tmp_path.iterdir())


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_text("text", tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_written_again_keeps_its_mode(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("old")
    script.chmod(0o755)
    save_text("new", script)
    assert script.read_text() == "new" and script.stat().st_mode & 0o777 == 0o755
    script.chmod(0o444)
    with pytest.raises(InputError, match="read-only; give another name"):
        save_text("newer", script)
    assert script.read_text() == "new" and [one.name for one in tmp_path.iterdir()] == ["job.sh"]


def test_what_a_link_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    save_text("new", tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"


def test_closed_output() -> None:
    for closed in ("stdout", "stderr", "both"):
        shut = {"stdout": ">&-", "stderr": "2>&-", "both": ">&- 2>&-"}[closed]
        words = f'"{sys.executable}" -m gnomon catalogue stacks {shut}'
        done = subprocess.run(
            ["sh", "-c", words], capture_output=True, text=True, timeout=600, env=os.environ | {"PYTHONPATH": SOURCE}
        )
        assert done.returncode == (0 if closed == "stderr" else 2), done
        if closed == "stdout":
            assert done.stderr.startswith("gnomon: cannot write the output: standard output is closed")


def test_interrupted_while_loading() -> None:
    """^C while modules are loaded or options read: no traceback."""
    early = "import signal, sys, os, runpy; sys.argv = ['gnomon', 'catalogue']\n"
    hooks = (
        "class H:\n def find_spec(self, name, *_):\n  if name == 'gnomon.cli': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, H())\n",
        "import gnomon.cli\ndef stop(_): raise KeyboardInterrupt\ngnomon.cli.parse = stop\n",
    )
    for hook in hooks:
        code = f"{early}{hook}runpy.run_module('gnomon', run_name='__main__')"
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=600,
            env=os.environ | {"PYTHONPATH": SOURCE},
        )
        assert (done.returncode, done.stderr) == (130, "gnomon: interrupted\n"), done


def test_columns_says_the_width(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wide = []
    for columns in ("80", "110"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["predict", "llama-3.1-8b", "--on", "8xh100-sxm"]) in (0, 1)
        wide.append(max(map(len, capsys.readouterr().out.splitlines())))
    assert wide[0] <= 80 < wide[1] <= 110


EMPTY = {
    "run nothing.toml --data text": "`gnomon plan -o FILE` writes a plan",
    "predict --plan nothing.toml": "`gnomon plan -o FILE` writes a plan",
    "explain --plan nothing.toml": "",
    "predict gpt2 --on nothing.toml": "",
    "compare nothing.timeline nothing.timeline": "`gnomon predict --timeline FILE`",
    "report nothing.timeline": "`gnomon predict --timeline FILE`",
    "checkpoint verify folder": "there is no checkpoint in it",
}


@pytest.mark.parametrize("command", EMPTY)
def test_what_is_empty_is_not_said_to_be_damaged(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor is its first line, which it has not, or its last."""
    monkeypatch.chdir(tmp_path)
    for name in ("nothing.toml", "nothing.timeline"):
        (tmp_path / name).write_text("")
    (tmp_path / "folder").mkdir()
    assert main(command.split()) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and EMPTY[command] in said
    assert not any(word in said.lower() for word in ("newline", "missing header", "half-written"))
