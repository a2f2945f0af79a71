"""What several orders are made of: turns of forwards and backwards, the V, repeated building blocks.

Each module returns rows, or cells from which rows are made; an order says which and for which numbers. Leaves out the
facts about an order, which stand in its own file.
"""
