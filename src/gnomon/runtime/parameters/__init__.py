"""Parameters of one rank: where they are in memory or on a disk, what they begin as, and how they lie in a file.

`Parameters` is a stage's flat buffer with its shard and its gradient. Leaves out their update (`runtime.optim`).
"""
