"""A plan applied to a model: blocks as torch modules with the collectives that sharding says between their ops.

`apply` makes the stages of one rank, `one_process` the plain model. Leaves out when they are run (`runtime.step`).
"""
