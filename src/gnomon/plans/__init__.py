"""Plans: every decision about how a job runs, and the questions around it.

`Plan` and its parts, `Mesh` with its rank groups, `Workload` and `Unit`, `Goal`; `PlanFile` is a plan with what it is
for. `resolve` writes a plan's stages out, `check` compares it with graph, cluster and workload. Leaves
out how tensors lie on the axes (`sharding`) and how long it takes.
"""

from gnomon.orders.order import Vocabulary as Vocabulary
from gnomon.plans.check import Problem as Problem
from gnomon.plans.check import batch as batch
from gnomon.plans.check import check as check
from gnomon.plans.check import problems as problems
from gnomon.plans.file import PlanFile as PlanFile
from gnomon.plans.file import Predicted as Predicted
from gnomon.plans.file import Ran as Ran
from gnomon.plans.file import is_plan_file as is_plan_file
from gnomon.plans.file import load_plan as load_plan
from gnomon.plans.file import load_plan_file as load_plan_file
from gnomon.plans.file import save_plan_file as save_plan_file
from gnomon.plans.goal import Goal as Goal
from gnomon.plans.mesh import DENSE_AXES as DENSE_AXES
from gnomon.plans.mesh import Mesh as Mesh
from gnomon.plans.mesh import View as View
from gnomon.plans.parts import INPUTS_AWAY as INPUTS_AWAY
from gnomon.plans.parts import Dispatch as Dispatch
from gnomon.plans.parts import DType as DType
from gnomon.plans.parts import Experts as Experts
from gnomon.plans.parts import Fp8 as Fp8
from gnomon.plans.parts import Layout as Layout
from gnomon.plans.parts import LayoutRule as LayoutRule
from gnomon.plans.parts import LowRank as LowRank
from gnomon.plans.parts import Offload as Offload
from gnomon.plans.parts import Optimizer as Optimizer
from gnomon.plans.parts import Overlap as Overlap
from gnomon.plans.parts import Pass as Pass
from gnomon.plans.parts import Precision as Precision
from gnomon.plans.parts import Saved as Saved
from gnomon.plans.parts import SavedRule as SavedRule
from gnomon.plans.parts import Schedule as Schedule
from gnomon.plans.parts import Split as Split
from gnomon.plans.parts import Stage as Stage
from gnomon.plans.plan import Plan as Plan
from gnomon.plans.plan import pipeline_rank as pipeline_rank
from gnomon.plans.saving import LayerSaving as LayerSaving
from gnomon.plans.saving import layer_presets as layer_presets
from gnomon.plans.saving import savings as savings
from gnomon.plans.select import format_ranks as format_ranks
from gnomon.plans.select import parse_ranks as parse_ranks
from gnomon.plans.select import select as select
from gnomon.plans.stages import Transfer as Transfer
from gnomon.plans.stages import layers_per_stage as layers_per_stage
from gnomon.plans.stages import resolve as resolve
from gnomon.plans.stages import shared_parameters as shared_parameters
from gnomon.plans.stages import stage_layers as stage_layers
from gnomon.plans.stages import transfers as transfers
from gnomon.plans.vocabulary import divided_layers as divided_layers
from gnomon.plans.workload import Lengths as Lengths
from gnomon.plans.workload import RouterLoad as RouterLoad
from gnomon.plans.workload import Workload as Workload
from gnomon.program.units import Piece as Piece
from gnomon.program.units import Unit as Unit
from gnomon.program.units import normalised as normalised
