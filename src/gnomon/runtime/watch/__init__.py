"""What is seen of a step while it runs: spans and why they waited, bytes, progress, what drifts, which rank waits
where.

`Recorder` gives the measured Timeline; `watch` serves any training loop. Leaves out what a step is (`runtime.step`).
"""
