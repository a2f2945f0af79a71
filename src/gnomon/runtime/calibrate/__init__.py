"""Seconds of this runtime's operations on this machine, by size, and how much slower the machine is now.

Leaves out fits of what was measured, which are pure (`prices`).
"""
