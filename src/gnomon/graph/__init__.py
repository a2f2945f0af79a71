"""Room `graph`: what a model computes.

`Dim`, `Tensor`, `Op`, `Block`, `Call`, `Graph` are frozen values that check themselves; functions beside them give
exact parameter counts, FLOPs, bytes, and the derived backward with what it must keep. Leaves out: how it is split over
devices (`sharding`), how long it takes (`prices`).
"""

from gnomon.graph.dims import BF16 as BF16
from gnomon.graph.dims import DTYPE_BITS as DTYPE_BITS
from gnomon.graph.dims import Dim as Dim
from gnomon.graph.dims import Dtypes as Dtypes
from gnomon.graph.dims import Number as Number
from gnomon.graph.dims import Sizes as Sizes
from gnomon.graph.dims import numel as numel
from gnomon.graph.dims import product as product
from gnomon.graph.dims import size_of as size_of
from gnomon.graph.graph import Graph as Graph
from gnomon.graph.types import CONTRACTIONS as CONTRACTIONS
from gnomon.graph.types import OP_KINDS as OP_KINDS
from gnomon.graph.types import VIEWS as VIEWS
from gnomon.graph.types import AttrValue as AttrValue
from gnomon.graph.types import Block as Block
from gnomon.graph.types import Call as Call
from gnomon.graph.types import Layer as Layer
from gnomon.graph.types import Op as Op
from gnomon.graph.types import Tensor as Tensor
from gnomon.graph.types import attrs as attrs
