"""What is known of runs that others published: their tables as models, plans and seconds; scores; fits; folds.

Not part of the wheel, and nothing in it is imported by `gnomon`. `python -m evidence validate RUNS.csv` scores a table,
`python -m evidence constants` lists every number that was fitted to runs, `python -m evidence.snapshot RUNS.csv -o
rows.jsonl` writes every row's prediction to the bit, `evidence.fits` finds the numbers of `gnomon.prices` and the bands
of `gnomon.prediction`. One published row is read by `evidence.published`.
"""
