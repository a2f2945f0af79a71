"""A flipped bit of weights is found before they are served, where somebody took their sums."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: the room of the engine needs it")

from gnomon.errors import InputError  # noqa: E402
from gnomon.serve.checksums import check_sums  # noqa: E402


def test_sums_are_held_against_files(tmp_path: Path) -> None:
    files = {f"model-{at}.safetensors": bytes(range(at, 200)) for at in (1, 2)}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert check_sums(tmp_path) == 0
    lines = [f"{hashlib.sha256(content).hexdigest()} *./{name}" for name, content in files.items()]
    (tmp_path / "SHA256SUMS").write_text("\n".join([*lines, f"{'0' * 64}  README.md"]))
    assert check_sums(tmp_path) == 2
    flipped = bytearray(files["model-2.safetensors"])
    flipped[77] ^= 4
    (tmp_path / "model-2.safetensors").write_bytes(flipped)
    with pytest.raises(InputError, match=r"model-2\.safetensors is not what its sum in SHA256SUMS says"):
        check_sums(tmp_path)
    (tmp_path / "SHA256SUMS").unlink()
    (tmp_path / "model-2.safetensors.sha256").write_text(hashlib.sha256(flipped).hexdigest().upper())
    assert check_sums(tmp_path) == 1


@pytest.mark.parametrize(
    ("line", "why"),
    [("abc model.safetensors", "line 1: no sum"), (f"{'a' * 64}  gone.safetensors", "which is not in the folder"),
     (f"{'a' * 64}  ../x.safetensors", "which is not in the folder")],
)  # fmt: skip
def test_sums_that_cannot_be_right_are_refused(line: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "SHA256SUMS").write_text(line)
    (tmp_path.parent / "x.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=re.escape(why)):
        check_sums(tmp_path)


def test_a_link_into_the_hubs_cache_is_held_against_its_name(tmp_path: Path) -> None:
    content = bytes(range(100))
    blob = tmp_path / "blobs" / hashlib.sha256(content).hexdigest()
    folder = tmp_path / "snapshots" / "a"
    for made in (blob.parent, folder):
        made.mkdir(parents=True)
    blob.write_bytes(content)
    (folder / "model.safetensors").symlink_to(blob)
    assert check_sums(folder) == 1
    blob.write_bytes(content[:-1] + b"x")
    with pytest.raises(InputError, match=r"model\.safetensors is not what its sum"):
        check_sums(folder)
