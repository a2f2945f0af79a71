"""What is read as code: only from files that nobody but the user (or root) may have written.

`private_folder` makes a folder of mode 700, or says why one that is there cannot be trusted; `others_may_write` is the
same of any file; `leads_out` says of a link where it leads out of its folder; `Seal` signs bytes with a key of the
user's own. Each problem is one line that says what to do. Leaves out access control lists beyond what the mode's group
bits show of them, and what root does.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path

from gnomon.late import load_late  # hmac, secrets and tempfile load OpenSSL: most commands sign nothing

KEY_BYTES = 32
SEAL_DIGITS = 32
"""Hexadecimal: 128 bits."""


def private_folder(folder: Path) -> str | None:
    """Makes a folder, and those above it, with mode 700. What is wrong with it, or None.

    It belongs to the user and nobody else may write to it, or put another one in its place: folders above it are the
    user's or root's, and writable by others where they are sticky (/tmp) only. OSError where it cannot be made.
    """
    make_private(folder)
    real = folder.resolve()
    if (wrong := others_may_write(real, owners=(os.getuid(),))) is not None:
        return wrong
    return next((wrong for one in real.parents if (wrong := _may_be_replaced(one)) is not None), None)


def make_private(folder: Path) -> None:
    """Makes a folder, and those above it that are missing, with mode 700; those that are there stay as they are."""
    for one in reversed([one for one in (folder, *folder.parents) if not one.exists()]):
        one.mkdir(mode=0o700, exist_ok=True)


def others_may_write(path: Path, *, owners: tuple[int, ...] | None = None) -> str | None:
    """What is wrong with a file or folder that is to be read as code, or None. Links are followed.

    owners: who may own it; by default the user, root, and whoever owns `/` (root, where ids are mapped).
    """
    found = path.stat()
    allowed = _trusted() if owners is None else owners
    if found.st_uid not in allowed:
        return (
            f"{path} belongs to user {found.st_uid} and you are {os.getuid()}; "
            f"look at it, and make a copy of your own if you trust it (cp -r)"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return (
            f"{path} can be written by others (mode {stat.S_IMODE(found.st_mode):o}); "
            f"see that all in it is yours, then: chmod -R go-w {path}"
        )
    return None


def leads_out(file: Path, folder: Path, *, hub: bool = False) -> Path | None:
    """Finds where a link of a folder leads, if that is not in the folder; None for what lies in it.

    hub: a folder of the Hugging Face cache, `models--…/snapshots/REVISION`, has all its files as links into the
    `blobs` beside `snapshots`; those lie in it too.
    """
    real, home = file.resolve(), folder.resolve()
    blobs = home.parent.parent / "blobs"
    inside = real.is_relative_to(home) or (hub and home.parent.name == "snapshots" and real.is_relative_to(blobs))
    return None if inside else real


def _may_be_replaced(folder: Path) -> str | None:
    """Says why others may rename what is in a folder above a private one; None where they may not."""
    found = folder.stat()
    if found.st_uid not in _trusted():
        return (
            f"{folder} belongs to user {found.st_uid}, who may put another folder below it; choose a folder elsewhere"
        )
    if found.st_mode & stat.S_ISVTX:
        return None
    if found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and found.st_gid not in (0, os.getgid())):
        return (
            f"{folder} can be written by others (mode {stat.S_IMODE(found.st_mode):o}), who may put another folder "
            f"below it; chmod go-w {folder}, or choose a folder elsewhere"
        )
    return None


def _trusted() -> tuple[int, ...]:
    return 0, os.getuid(), os.stat("/").st_uid


class Seal:
    """Signs bytes (HMAC-SHA256) with a key that only the user can read."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def of(self, data: bytes) -> str:
        """The signature as hexadecimal digits, fit for a name."""
        digits: str = load_late("hmac:new")(self._key, data, "sha256").hexdigest()
        return digits[:SEAL_DIGITS]

    def fits(self, data: bytes, digits: str) -> bool:
        same: bool = load_late("hmac:compare_digest")(self.of(data).encode(), digits.encode())
        return same


def _new_key() -> bytes:
    key: bytes = load_late("secrets:token_bytes")(KEY_BYTES)
    return key


def new_seal() -> Seal:
    """Makes a seal with a key of this process alone."""
    return Seal(_new_key())


def user_folder() -> Path:
    """What Gnomon keeps for its user: $GNOMON_HOME, or ~/.config/gnomon."""
    home = os.environ.get("GNOMON_HOME")
    return Path(home) if home else Path.home() / ".config" / "gnomon"


@cache
def seal_in(folder: Path) -> Seal | str:
    """The seal of the key in a folder, made where there is none (mode 600); or what is wrong with it.

    Whoever else may write to the folder can take the key away, and cannot make one that belongs to the user.
    OSError where it cannot be read or made.
    """
    path = folder / "seal.key"
    if not path.exists():
        make_private(folder)
        handle, part = load_late("tempfile:mkstemp")(dir=folder)  # of mode 600
        with os.fdopen(handle, "wb") as file:
            file.write(_new_key())
        with suppress(FileExistsError):  # another process was faster, and its key counts
            os.link(part, path)
        os.unlink(part)
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        return f"{path}, the key that signs compiled kernels, is not a file that only you can read; remove it"
    key = path.read_bytes()
    return (
        Seal(key) if len(key) == KEY_BYTES else f"{path}, the key that signs compiled kernels, is cut short; remove it"
    )
