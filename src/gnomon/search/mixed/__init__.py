"""Mixed: the search over plans whose devices are of several kinds.

Left out: clusters of one kind (`exact`).
"""
