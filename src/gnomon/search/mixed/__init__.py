"""Plans over devices of several kinds, with shares, layers and axes that differ by kind.

Left out: clusters of one kind (`equal`).
"""
