"""A published simulator run as it is, on one core: the mean JCT that it prints, each job's, and its CPU-seconds."""

from __future__ import annotations

import ast
import os
import re
import resource
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def simulated(python: Path, folder: Path, command: Sequence[str | Path]) -> tuple[float, Mapping[str, float], float]:
    """(mean JCT, JCT by job, CPU-seconds). python: an interpreter that has what it needs. folder: it is run there."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run(
        [python.absolute(), *command],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    mean = float(re.findall(r"^Average JCT: (\S+)$", run.stdout, re.MULTILINE)[-1])
    jobs = ast.literal_eval(re.findall(r"^\{.*\}$", run.stdout, re.MULTILINE)[-1])
    return mean, jobs, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
