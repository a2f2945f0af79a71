"""One run at a time writes to a folder of checkpoints: `FolderLock`.

It ends with the process that holds it, however that ends. Leaves out folders on file systems without locks.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from gnomon.errors import InputError


class FolderLock:
    """Held from `take` until `free`, or until the process ends, however it ends. The folder itself is locked, so that
    nothing lies in it that is no checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file: int | None = None

    def take(self) -> None:
        """InputError while another run has the folder. It must be there; a second call does nothing."""
        if self.file is not None:
            return
        file = os.open(self.folder, os.O_RDONLY)
        try:
            # The kernel lets go when the process ends, so a killed run leaves no stale lock.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            raise InputError(
                f"another run writes checkpoints to {str(self.folder)!r}; wait for it, or give another --checkpoints"
            ) from error
        self.file = file

    def free(self) -> None:
        """Lets others have it."""
        if self.file is not None:
            os.close(self.file)
            self.file = None
