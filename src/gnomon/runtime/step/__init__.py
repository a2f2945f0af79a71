"""One step of one rank: its rows of the Program, carried out in issue order on real tensors.

`Executor` is the interpreter; the other files are what its rows do. Leaves out loops over steps (`runtime.launch`).
"""
