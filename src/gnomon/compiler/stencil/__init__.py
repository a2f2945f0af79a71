"""Stencils: what each point takes from its neighbours, in one step or many, as loop nests that keep steps in cache.

Read in this order: `stages` (what is computed), `find` (in which graphs), `lags` (which rows are alive when), `tile`
(how many steps and which tiles, by a device's description), the printers `cpp_rows`, `triton_rows` and `scratchpad`,
and `call`. Importing this package imports nothing of it.
"""
