"""Fits of the numbers that `gnomon` has on record, and what each term of a prediction is worth, from published data.

Each module is a command: `python -m evidence.fits.fit_stacks RUNS.csv`. What they print is kept in benchmarks/results.
"""
