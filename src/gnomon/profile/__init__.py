"""Profiles: what a profiler recorded of a job, where the step went by it, and what held it up.

A `Trace` is one rank's recording. `find_steps` finds its steps, `account` says where one of them went, to the bit,
`findings` names what held it up, `match_ranks` puts the ranks of one job next to each other, and `Snapshot` is what an
allocator held at its peak. Leaves out files (`formats.kineto`) and how a prediction lies to it (`report.profile`).
"""

from gnomon.profile.account import PARTS as PARTS
from gnomon.profile.account import Account as Account
from gnomon.profile.account import Collective as Collective
from gnomon.profile.account import KindTime as KindTime
from gnomon.profile.account import account as account
from gnomon.profile.findings import Finding as Finding
from gnomon.profile.findings import findings as findings
from gnomon.profile.ranks import Lateness as Lateness
from gnomon.profile.ranks import match_ranks as match_ranks
from gnomon.profile.snapshot import HeldClass as HeldClass
from gnomon.profile.snapshot import Snapshot as Snapshot
from gnomon.profile.snapshot import peak_of as peak_of
from gnomon.profile.steps import StepWindow as StepWindow
from gnomon.profile.steps import find_steps as find_steps
from gnomon.profile.trace import CATEGORIES as CATEGORIES
from gnomon.profile.trace import Lane as Lane
from gnomon.profile.trace import Trace as Trace
