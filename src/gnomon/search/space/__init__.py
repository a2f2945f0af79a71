"""Space: what a search covers: points, limits on them, and choices that only refinement varies.

Left out: what a point costs (`bounds`) and which of them are predicted (`exact`).
"""
