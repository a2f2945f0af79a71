"""Room `prices`: how long things take on one device, from peaks and efficiency curves.

Pure functions of sizes, a `Device` and its `Curves`; sizes may be arrays. Each price says what it leaves out. Host time
and device time are apart all the way.
"""

from gnomon.prices.attention import attention_seconds as attention_seconds
from gnomon.prices.curves import AttentionCurve as AttentionCurve
from gnomon.prices.curves import AttentionKernel as AttentionKernel
from gnomon.prices.curves import Curves as Curves
from gnomon.prices.curves import GemmCurve as GemmCurve
from gnomon.prices.curves import Provenance as Provenance
from gnomon.prices.curves import StreamCurve as StreamCurve
from gnomon.prices.curves import Time as Time
from gnomon.prices.curves import curves_for as curves_for
from gnomon.prices.gemm import gemm_seconds as gemm_seconds
from gnomon.prices.host import HostCost as HostCost
from gnomon.prices.host import SustainedSpeed as SustainedSpeed
from gnomon.prices.host import host_cost as host_cost
from gnomon.prices.host import sustained as sustained
from gnomon.prices.kernels import FREE as FREE
from gnomon.prices.kernels import OpPrice as OpPrice
from gnomon.prices.kernels import cast_weight_seconds as cast_weight_seconds
from gnomon.prices.kernels import grad_seconds as grad_seconds
from gnomon.prices.kernels import op_seconds as op_seconds
from gnomon.prices.optimizer import accumulate_seconds as accumulate_seconds
from gnomon.prices.optimizer import optimizer_seconds as optimizer_seconds
from gnomon.prices.stream import stream_seconds as stream_seconds
