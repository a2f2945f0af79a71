"""Ways to make a job fit: each change of a plan that spares memory, alone and combined, with what it frees and costs.

`options` lists the changes, `ladder` predicts them and their combinations, `largest` finds the largest batch or length
under each. Every number is a prediction. Leaves out the fastest of all plans, which is the exact search's.
"""
