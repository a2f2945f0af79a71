"""Training: a loop over steps, by processes that stay, that come and go, or that may be lost.

`train.run` starts a job, `job.prepare` gives the caller the loop. Who trains when is decided in `control`.
"""
