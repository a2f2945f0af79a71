"""A graph's call as one function of C++: its steps, their order on workers, the memory between them, and loops.

Leaves out what each step computes.
"""
