"""Room `models`: functions returning a Graph from a typed config, one file for each family.

`presets.model("llama-3.1-8b")` returns a published model by name. Import families as modules, so that a program that
needs one loads one. Leaves out: weights, and reading of other tools' configs (room `formats`).
"""
