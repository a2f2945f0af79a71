"""Bounds: what a plan takes at least, in time and in memory, each with its proof.

They order and prune; none decides. Left out: the order in which a search asks for them (`exact`, `mixed`).
"""
