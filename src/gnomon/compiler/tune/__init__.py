"""What is measured on this machine: whether a kernel is used, which of several forms, and how it is tiled.

Leaves out what a tiling costs by the model (`gnomon.compiler.tiles.tiling.tile_cost`).
"""
