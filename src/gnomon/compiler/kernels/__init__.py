"""Operations that are no loop nest: matmuls, convolutions, attention, recurrences, lookups, weights in few bits.

Each file finds its operations in a graph and says by which kernel in `cpp/` they run. Leaves out stencils (`stencil`).
"""
