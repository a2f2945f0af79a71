"""Bodies and loop nests: what is computed for each point of a domain, in which pass over a row, and by which tiles.

What a tiling costs on a device is predicted here, before any text is written. Leaves out that text (`text`).
"""
