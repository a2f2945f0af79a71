"""Checkpoints: written under one plan, read under any other of the same model, whole or not there, never unpickled.

`save(folder, executor, step)` writes `folder/step-000120`; `Saver` does it while training goes on; `load` puts the
newest good one back and returns its step; `problems_of(path)` says what is damaged. A checkpoint is a safetensors file
a rank and `gnomon.json`, which names them all with their checksums.
"""

from gnomon.runtime.checkpoint.files import problems_of as problems_of
from gnomon.runtime.checkpoint.load import load as load
from gnomon.runtime.checkpoint.lock import FolderLock as FolderLock
from gnomon.runtime.checkpoint.pieces import boxes as boxes
from gnomon.runtime.checkpoint.record import RECORD as RECORD
from gnomon.runtime.checkpoint.record import checkpoints as checkpoints
from gnomon.runtime.checkpoint.record import newest as newest
from gnomon.runtime.checkpoint.record import read_record as read_record
from gnomon.runtime.checkpoint.save import Saver as Saver
from gnomon.runtime.checkpoint.save import save as save
