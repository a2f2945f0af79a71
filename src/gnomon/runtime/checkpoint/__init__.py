"""Checkpoints: written under one plan, read under any other of the same model, whole or not there, never unpickled.

`save(folder, executor, step)` writes `folder/step-000120`; `Saver` does it while training goes on; `load` puts the
newest good one back and returns its step; `problems_of(path)` says what is damaged. A checkpoint is a safetensors file
a rank and `gnomon.json`, which names them all with their checksums.
"""
