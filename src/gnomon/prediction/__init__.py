"""Prediction: how a job will run, from a model, a cluster and a plan, before it runs.

`predict` returns a frozen `Prediction`: the steady-state step and where it goes, memory by rank and class with its
moment, and what was assumed. `layer_price` and `Pricing` are the
parts that a search reuses. Leaves out measuring and searching.
"""

from gnomon.prediction.band import Band as Band
from gnomon.prediction.batch import layer_prices as layer_prices
from gnomon.prediction.host_memory import HostMemory as HostMemory
from gnomon.prediction.host_memory import fits_within as fits_within
from gnomon.prediction.host_memory import host_memory as host_memory
from gnomon.prediction.host_memory import together as together
from gnomon.prediction.layer import layer_price as layer_price
from gnomon.prediction.layer_types import KernelFacts as KernelFacts
from gnomon.prediction.layer_types import LayerPrice as LayerPrice
from gnomon.prediction.layer_types import LocalContext as LocalContext
from gnomon.prediction.layer_types import Phase as Phase
from gnomon.prediction.memory import RankMemory as RankMemory
from gnomon.prediction.memory_copies import MemoryCopies as MemoryCopies
from gnomon.prediction.memory_copies import memory_copies as memory_copies
from gnomon.prediction.predict import Prediction as Prediction
from gnomon.prediction.predict import TimedPlan as TimedPlan
from gnomon.prediction.predict import predict as predict
from gnomon.prediction.stage import StagePrice as StagePrice
from gnomon.prediction.stage import stage_prices as stage_prices
from gnomon.prediction.step import Pricing as Pricing
from gnomon.prediction.traffic import Traffic as Traffic
from gnomon.prediction.traffic import traffic as traffic
