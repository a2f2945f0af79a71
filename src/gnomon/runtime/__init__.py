"""Runtime: a plan carried out on `torch.distributed`, by interpreting the same Program that the simulator plays.

`Executor(graph, plan, workload)` is one rank; `.step(batch)` trains one step and `.measured_step(batch)` returns its
Timeline too. `pretrained` reads and writes folders of weights, `generate` writes a few words. Needs torch. Left out:
prediction.
"""

from gnomon.runtime.apply import apply as apply
from gnomon.runtime.data import Corpus as Corpus
from gnomon.runtime.data import Source as Source
from gnomon.runtime.evaluate import evaluate as evaluate
from gnomon.runtime.execute import Executor as Executor
from gnomon.runtime.execute import StepResult as StepResult
from gnomon.runtime.launch import launch as launch
from gnomon.runtime.measure import Recorder as Recorder
from gnomon.runtime.mesh import Groups as Groups
from gnomon.runtime.optim import AdamWSettings as AdamWSettings
from gnomon.runtime.optim import Update as Update
from gnomon.runtime.parameters import Parameters as Parameters
from gnomon.runtime.stage import Stage as Stage
from gnomon.runtime.train import Job as Job
from gnomon.runtime.train import Outcome as Outcome
from gnomon.runtime.train import Record as Record
from gnomon.runtime.train import run as run
from gnomon.runtime.train import train as train
