"""Folders and files whose content is run: whose they are, who may write to them, and what signs them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gnomon import trust


def test_a_private_folder_is_made_with_all_above_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert trust.private_folder(tmp_path / "a" / "b") is None
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "a", tmp_path / "a" / "b")] == [0o700, 0o700]


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 7)
    said = trust.private_folder(tmp_path)
    assert said is not None and said.startswith(f"{tmp_path} belongs to user {owner} and you are {owner + 7}")


@pytest.mark.parametrize(("mode", "refused"), [(0o777, True), (0o1777, False), (0o755, False), (0o775, False)])
def test_a_folder_above_must_not_let_others_put_another_in_its_place(tmp_path: Path, mode: int, refused: bool) -> None:
    """Sticky as /tmp is well; so is a group that is the user's own."""
    above = tmp_path / "above"
    assert trust.private_folder(above / "kernels") is None
    above.chmod(mode)
    said = trust.private_folder(above / "kernels")
    assert (said is not None) == refused
    assert said is None or f"chmod go-w {above}" in said


def test_a_link_counts_as_what_it_leads_to(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    (tmp_path / "mine").symlink_to(open_to_all)
    said = trust.private_folder(tmp_path / "mine")
    assert said is not None and "can be written by others (mode 777)" in said


def test_a_key_is_made_once_and_read_by_its_user_only(tmp_path: Path) -> None:
    first = trust.seal_in(tmp_path / "home")
    trust.seal_in.cache_clear()
    again = trust.seal_in(tmp_path / "home")
    assert isinstance(first, trust.Seal) and isinstance(again, trust.Seal)
    [key] = (tmp_path / "home").iterdir()
    assert key.stat().st_mode & 0o777 == 0o600 and len(key.read_bytes()) == trust.KEY_BYTES
    assert again.fits(b"bytes", first.of(b"bytes")) and not again.fits(b"other", first.of(b"bytes"))
    assert not trust.new_seal().fits(b"bytes", first.of(b"bytes")) and not again.fits(b"bytes", "ü")


@pytest.mark.parametrize("harm", ["link", "short", "readable"])
def test_a_key_that_is_not_the_user_s_alone_is_refused(tmp_path: Path, harm: str) -> None:
    key = tmp_path / "seal.key"
    if harm == "link":
        (tmp_path / "other").write_bytes(bytes(trust.KEY_BYTES))
        (tmp_path / "other").chmod(0o600)
        key.symlink_to(tmp_path / "other")
    else:
        key.write_bytes(bytes(trust.KEY_BYTES - (harm == "short")))
        key.chmod(0o644 if harm == "readable" else 0o600)
    said = trust.seal_in(tmp_path)
    assert isinstance(said, str) and said.endswith("remove it")


def test_a_link_out_of_a_folder_is_told_from_one_within(tmp_path: Path) -> None:
    """In the cache of Hugging Face every file is a link to a blob beside the snapshots."""
    folder = tmp_path / "models--team--small" / "snapshots" / "0123abcd"
    folder.mkdir(parents=True)
    (blobs := folder.parents[1] / "blobs").mkdir()
    for where in (folder / "real.json", blobs / "4567", tmp_path / "secret"):
        where.write_text("{}")
    (folder / "config.json").symlink_to("../../blobs/4567")
    (folder / "same.json").symlink_to("real.json")
    (folder / "notes.txt").symlink_to(tmp_path / "secret")
    (folder / "up.json").symlink_to("../../../secret")
    leads = {file.name: trust.leads_out(file, folder, hub=True) for file in folder.iterdir()}
    secret = tmp_path / "secret"
    assert leads == {"real.json": None, "config.json": None, "same.json": None, "notes.txt": secret, "up.json": secret}
    assert trust.leads_out(folder / "config.json", folder) == blobs / "4567"
