"""Whether the weights of a folder are those that somebody took the sums of: `check_sums(folder)`.

A folder's `SHA256SUMS`, or `FILE.sha256` beside a file, has lines as the program sha256sum writes them: the sum in
hexadecimal, and the file's name. In a cache of Hugging Face's hub a file is a link to one that its sum is the name of.
A folder without any of these is served as it is: a file that is cut off is found by its header, and numbers that are
none as they are read. Leaves out signatures: who can change weights can change sums beside them.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from gnomon.errors import InputError

WHOLE, BESIDE = "SHA256SUMS", ".sha256"
SUM = re.compile("[0-9a-f]{64}")
LINE = re.compile(r"([0-9a-fA-F]{64})(?:\s+\*?(\S.*))?")


def check_sums(folder: Path) -> int:
    """How many files of weights have sums that are right. InputError for one that is wrong, a sum of a file that is not
    there, and a line that is no sum."""
    checksums: dict[str, tuple[str, Path]] = {}
    for source in (folder / WHOLE, *sorted(folder.glob(f"*{BESIDE}"))):
        if source.is_file():
            for name, digest in _read(source).items():
                checksums[name] = digest, source
    for file in sorted(folder.glob("*.safetensors")):
        target = file.resolve()
        if file.is_symlink() and target.parent.name == "blobs" and SUM.fullmatch(target.name):
            checksums.setdefault(file.name, (target.name, target))
    checked = 0
    for name, (digest, source) in checksums.items():
        if not name.endswith(".safetensors"):
            continue
        file = folder / name
        if Path(name).name != name or not file.is_file():
            raise InputError(f"{source} has a sum of {name}, which is not in the folder; fetch it again")
        with file.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != digest:
            raise InputError(
                f"{file} is not what its sum in {source.name} says ({found[:12]}…, not {digest[:12]}…): it was changed "
                f"or damaged; fetch it again"
            )
        checked += 1
    return checked


def _read(source: Path) -> dict[str, str]:
    """File -> its sum."""
    digests = {}
    for number, line in enumerate(source.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        if not line.strip():
            continue
        match = LINE.fullmatch(line.strip())
        if match is None:
            raise InputError(f"{source}, line {number}: no sum as sha256sum writes it (64 digits and a file's name)")
        name = (match[2] or source.name.removesuffix(BESIDE)).removeprefix("./")
        digests[name] = match[1].lower()
    return digests
