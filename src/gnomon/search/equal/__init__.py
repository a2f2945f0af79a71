"""Plans over equal devices, searched best first, until no bound is below the best plan.

What it returns is what predicting every point would have found. Left out: uneven stages (`stages`), other choices
(`refinement`).
"""
