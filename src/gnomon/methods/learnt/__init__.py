"""Methods that change what a model learns, step by step: weights drawn to a pattern, rounded, or fewer; a teacher.

One file each, named as its `METHOD` is in `schedule.passes`; a plan that names none of them loads none.
"""
