"""Room `graph`: what a model computes.

`Dim`, `Tensor`, `Op`, `Block`, `Call`, `Graph` are frozen values that check themselves; functions next to them give
exact parameter counts, FLOPs, bytes, and the derived backward with what it must keep. Leaves out: how it is split over
devices (`sharding`), how long it takes (`prices`).
"""

from gnomon.graph.backward import Action as Action
from gnomon.graph.backward import BackwardBlock as BackwardBlock
from gnomon.graph.backward import Policy as Policy
from gnomon.graph.backward import SavedSplit as SavedSplit
from gnomon.graph.backward import SavedTensor as SavedTensor
from gnomon.graph.backward import backward as backward
from gnomon.graph.backward import gradients as gradients
from gnomon.graph.backward import saved as saved
from gnomon.graph.backward import storages as storages
from gnomon.graph.build import BlockBuilder as BlockBuilder
from gnomon.graph.graph import Graph as Graph
from gnomon.graph.kernels import lower as lower
from gnomon.graph.token_dispatch import why_whole as why_whole
from gnomon.graph.token_dispatch import with_dispatch as with_dispatch
from gnomon.graph.totals import BlockWork as BlockWork
from gnomon.graph.totals import call_backward as call_backward
from gnomon.graph.totals import graph_saved_bytes as graph_saved_bytes
from gnomon.graph.totals import graph_work as graph_work
from gnomon.graph.totals import no_grad_inputs as no_grad_inputs
from gnomon.graph.types import Block as Block
from gnomon.graph.types import Call as Call
from gnomon.graph.types import Layer as Layer
from gnomon.graph.work import forward_work as forward_work
from gnomon.graph.work import grad_work as grad_work
from gnomon.ops.attention import attention_pairs_x2 as attention_pairs_x2
from gnomon.ops.attention import kv_dim as kv_dim
from gnomon.ops.kernels import EAGER as EAGER
from gnomon.ops.kernels import FUSED as FUSED
from gnomon.ops.kernels import UNFUSED as UNFUSED
from gnomon.ops.kernels import Kernels as Kernels
from gnomon.ops.linear import is_inner_first as is_inner_first
from gnomon.ops.linear import matrix_rows as matrix_rows
from gnomon.ops.op import AttrValue as AttrValue
from gnomon.ops.op import Captured as Captured
from gnomon.ops.op import Op as Op
from gnomon.ops.op import attrs as attrs
from gnomon.ops.opaque import captured_matmuls as captured_matmuls
from gnomon.ops.opaque import costed_flops as costed_flops
from gnomon.ops.work import GradOp as GradOp
from gnomon.ops.work import Setting as Setting
from gnomon.ops.work import Work as Work
from gnomon.ops.work import nbytes as nbytes
from gnomon.tensors.captured import Cost as Cost
from gnomon.tensors.captured import Literal as Literal
from gnomon.tensors.captured import Node as Node
from gnomon.tensors.captured import Size as Size
from gnomon.tensors.captured import Term as Term
from gnomon.tensors.captured import Torch as Torch
from gnomon.tensors.captured import Use as Use
from gnomon.tensors.dims import BF16 as BF16
from gnomon.tensors.dims import DTYPE_BITS as DTYPE_BITS
from gnomon.tensors.dims import Dim as Dim
from gnomon.tensors.dims import Dtypes as Dtypes
from gnomon.tensors.dims import Number as Number
from gnomon.tensors.dims import Sizes as Sizes
from gnomon.tensors.dims import numel as numel
from gnomon.tensors.dims import product as product
from gnomon.tensors.dims import size_of as size_of
from gnomon.tensors.tensor import Tensor as Tensor
