"""Launch scripts: what a shell would make of them, without a shell. Expected words are those that bash gives."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import FormatError, GnomonError
from gnomon.formats.shell import UNKNOWN, launches


def options(script: str, **env: str) -> tuple[str, ...]:
    [launch] = launches(script, env).launches
    return launch.options


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("python a.py --x 1 # 2", ("--x", "1")),
        ("A=3\npython a.py --x $A --y ${A}b", ("--x", "3", "--y", "3b")),
        ("A='1 2'; python a.py $A \"$A\" '$A'", ("1", "2", "1 2", "$A")),
        ("A=(x 'y z')\nA+=(w)\npython a.py ${A[@]}", ("x", "y", "z", "w")),
        ("A=(x 'y z')\npython a.py \"${A[@]}\" ${A[1]}", ("x", "y z", "y", "z")),
        ("A=(\n  --a 1  # one\n  # --b 2\n  --c)\npython a.py ${A[@]}", ("--a", "1", "--c")),
        ("python a.py \\\n  --x 1 \\\n  --y", ("--x", "1", "--y")),
        ("N=4\npython a.py $((N * 2 + 1)) $(( $N/2 ))", ("9", "2")),
        ("python a.py ${X:-d} ${X-e} ${X:+f}", ("d", "e")),
        ("X=\npython a.py ${X:-d} ${X-e}", ("d",)),
        ("E=()\npython a.py ${E[@]} \"${E[@]}\" ''", ("",)),
        ("A=1\nif [ $A -gt 0 ] && [ $A != 2 ]; then B=yes; else B=no; fi\npython a.py $B", ("yes",)),
        ('if [[ "$A" == x ]]; then B=1\nelif [[ -z "$A" ]]; then B=2\nelse B=3\nfi\npython a.py $B', ("2",)),
        ("if [ 1 = 2 ]; then if [ 1 = 1 ]; then B=1; fi; else B=2; fi\npython a.py $B", ("2",)),
        ('C="python a.py --x 1"\neval $C', ("--x", "1")),
        ("srun bash -c 'python a.py --x 1'", ("--x", "1")),
        ("O='--a b'\nO+=' --c'\npython -m torch.distributed.run --nnodes 2 a.py $O", ("--a", "b", "--c")),
    ],
)
def test_words_are_those_that_a_shell_gives(script: str, words: tuple[str, ...]) -> None:
    assert options(script) == words


def test_what_comes_from_outside_is_given_or_named() -> None:
    assert options("python a.py --tp $TP --save $1", TP="4", **{"1": "out"}) == ("--tp", "4", "--save", "out")
    assert options("python a.py --tp $TP") == ("--tp", f"{UNKNOWN}TP{UNKNOWN}")
    assert options("python a.py --at $(date)") == ("--at", f"{UNKNOWN}$(command){UNKNOWN}")


def test_a_count_of_gpus_is_that_of_the_machine() -> None:
    script = "N=$(nvidia-smi -L | wc -l)\nM=$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)\n"
    script += "python a.py $N $((32 / M))"
    found = launches(script, {}, devices=4)
    assert found.launches[0].options == ("4", "8")
    assert found.skipped == ["a command that counts GPUs of a machine: taken as 4"]
    assert launches(script, {}).launches[0].options[0] == f"{UNKNOWN}N{UNKNOWN}"


def test_what_a_command_prints_is_asked_for_by_its_variable() -> None:
    script = "NODES=$(scontrol show hostnames | wc -l)\npython a.py --steps $((16 / NODES))"
    assert launches(script, {}).launches[0].options == ("--steps", f"{UNKNOWN}NODES{UNKNOWN}")
    assert launches(script, {}, {"NODES": "2"}).launches[0].options == ("--steps", "8")


def test_commands_are_never_run(tmp_path: object) -> None:
    script = f"touch {tmp_path}/x\nA=$(touch {tmp_path}/y)\n`touch {tmp_path}/z`\npython a.py\n"
    assert len(launches(script, {}).launches) == 1
    assert list(tmp_path.iterdir()) == []  # type: ignore[attr-defined]


def test_a_test_that_is_not_known_matters_only_if_it_guards_something() -> None:
    assert launches("if [ ! -f a.py ]; then echo no; exit 1; fi\npython a.py", {}).skipped == []
    assert launches("if [ -f x ]; then echo\nelse A=2; fi\npython a.py $A", {}).launches[0].options == ("2",)
    assert len(launches("if [ -d x ]; then python b.py; fi\npython a.py", {}).skipped) == 1


def test_what_is_not_followed_is_listed() -> None:
    script = launches("for ((;;)); do\n  A=1\ndone\nif [ -f x ]; then B=1; fi\npython a.py $A $B", {})
    assert script.skipped == ["for on line 1", "if on line 4: its condition is not known from the script"]
    assert script.launches[0].options == (f"{UNKNOWN}A{UNKNOWN}", f"{UNKNOWN}B{UNKNOWN}")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("for i in 7; do\n A=$i\ndone\npython a.py $A", ("7",)),
        ("for i in 1 2; do\n python a.py --x $i\ndone", ("--x", f"{UNKNOWN}i=1{UNKNOWN}")),
        (
            'for c in 1,2 3,4; do\n IFS=, read -r A B <<< "$c"\n X="--x $A"\n X="$X $B"\n python a.py $X\ndone',
            ("--x", f"{UNKNOWN}c=1,2{UNKNOWN}", f"{UNKNOWN}c=1,2{UNKNOWN}"),
        ),
        (
            'read -r -d "" A <<EOF\na.py --x $B \\\n --y "z"\nEOF\nB=1\npython $A',
            ("--x", f"{UNKNOWN}B{UNKNOWN}", "--y", '"z"'),
        ),
        ("python -m d --f e.py -m f", ("--f", "e.py", "-m", "f")),
        ("shift 1\npython a.py $1", (f"{UNKNOWN}2{UNKNOWN}",)),
        ("A=0\nfor i in 1 2; do A=$((A+1)); done\npython a.py $A", (f"{UNKNOWN}A{UNKNOWN}",)),
        ("while [ $# -gt 0 ]; do A=$1; shift; done\npython a.py ${A:-3}", ("3",)),
        ("S=8B\ncase $S in\n 7B|8B) L=32 ;;\n *) L=80;;\nesac\npython a.py $L", ("32",)),
        ("case $S in\n 7B) L=32 ;;\nesac\npython a.py $L", (f"{UNKNOWN}L{UNKNOWN}",)),
        ("go() {\n python a.py --x $1\n}\ngo 5", ("--x", "5")),
        ("python a.py --x 1 2>&1 | tee log", ("--x", "1")),
        ("python a.py --x 1 > out.txt 2> err.txt", ("--x", "1")),
        ('cat <<EOT > $f\n{ "a": \'b\n}\nEOT\npython a.py 1', ("1",)),
        ('A=`cut -c1 <<< "$B"`\npython a.py --x 1 --name $A', ("--x", "1", "--name", f"{UNKNOWN}`command`{UNKNOWN}")),
        ("python a.py ${10} $1", ("j", "a")),
    ],
)
def test_what_a_script_does_once_is_followed(script: str, words: tuple[str, ...]) -> None:
    env = {"1": "a", "10": "j"} if "${10}" in script else {}
    assert options(script, **env) == words


def test_a_variable_given_beside_the_script_keeps_its_value() -> None:
    [launch] = launches("TP=1\npython a.py --tp $TP", {}, {"TP": "8"}).launches
    assert launch.options == ("--tp", "8")


def test_the_arguments_of_a_script_are_given_as_one() -> None:
    [launch] = launches('A=$1\nshift\npython a.py $A $1 $# "$@"', {}, {"args": "7B 'x y' 3"}).launches
    assert launch.options == ("7B", "x", "y", "2", "x y", "3")


def test_a_script_beside_it_is_sourced(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a.sh").write_text("ARGS=(--num-layers 4)")
    text = 'D="$(dirname "$0")"\nsource "${D}/models/a.sh"\nsource /etc/none\npython a.py ${ARGS[@]}'
    script = launches(text, {}, folder=tmp_path)
    assert script.launches[0].options == ("--num-layers", "4")
    assert script.skipped == ["source of /etc/none on line 3"]


@pytest.mark.parametrize("script", ["echo 'a", 'A="b', "A=(1 2", "echo ${A", "echo $((1"])
def test_what_is_not_closed_is_an_error(script: str) -> None:
    with pytest.raises(FormatError, match="never closed"):
        launches(script, {})


def test_growth_is_bounded() -> None:
    doubling = "A=(x x x x x x x x)\n" + "A+=(${A[@]} ${A[@]} ${A[@]} ${A[@]})\n" * 40
    with pytest.raises(FormatError, match="words|grows"):
        launches(doubling, {})
    assert options("python a.py $((9**9**9**9)) $((9999999999999999999*9999999999999999999))")[0].startswith(UNKNOWN)


@pytest.mark.parametrize("text", ['"$(' * 5000, "${a:-" * 5000 + "}" * 5000, "a " * 300_000, "x" * 2**18, "$((" * 3000])
def test_depth_and_length_are_bounded(text: str) -> None:
    with pytest.raises(FormatError):
        launches(f"python a.py {text}", {})


@given(st.text(alphabet="ab$\"'`(){}[]=+\\;&|#\n -1@", max_size=80))
def test_any_text_is_read_or_refused(text: str) -> None:
    """A comment before it changes nothing."""
    try:
        result = launches(text, {"a": "1"})
    except GnomonError:
        with pytest.raises(GnomonError):
            launches(f"# b\n{text}", {"a": "1"})
    else:
        later = launches(f"# b\n{text}", {"a": "1"})
        assert (later.launches, later.variables) == (result.launches, result.variables)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash to ask")
def test_arithmetic_is_that_of_bash() -> None:
    """Quotients and remainders of either sign, and numbers that a float does not hold."""
    large = 2**53 + 1
    pairs = [(7, 2), (-7, 2), (7, -2), (-7, -2), (-8, 2), (-large, 1), (large * 3, -3), (5, 7), (-5, 7), (2**62, -1)]
    sums = [f"{a} {op} {b}" for a, b in pairs for op in ("/", "%")]
    told = subprocess.run(
        ["bash", "-c", "\n".join(f"echo $(({text}))" for text in sums)], capture_output=True, text=True, check=True
    )
    ours = options("python a.py " + " ".join(f"$(({text}))" for text in sums))
    assert ours == tuple(told.stdout.split())


@pytest.mark.parametrize("text", ["4611686018427387904 * 4", "7 // 2", "1 / 0"])
def test_what_bash_would_wrap_or_refuse_is_not_known(text: str) -> None:
    assert UNKNOWN in options(f"python a.py $(({text}))")[0]
