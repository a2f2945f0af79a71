"""Tensors: dims, dtypes, named arrays, and the ATen ops of what was captured; what op kinds speak of.

`Dim`, `Dtypes`, `Tensor` and functions that turn dims into numbers. Leaves out ops on them (`ops`).
"""

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
