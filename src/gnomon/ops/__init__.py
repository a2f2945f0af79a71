"""Op kinds: what a model is made of, one family a file of this folder, one `OpKind` value a kind.

A kind says all that the rest of Gnomon asks of it, so a kind is added in one file (and one torch function). `find` and
`every` list them; `Op` is one operation. Leaves out blocks and graphs of them (`graph`).
"""

from gnomon.ops.op import AttrValue as AttrValue
from gnomon.ops.op import Captured as Captured
from gnomon.ops.op import Op as Op
from gnomon.ops.op import OpKind as OpKind
from gnomon.ops.op import Tensors as Tensors
from gnomon.ops.op import attrs as attrs
from gnomon.ops.op import every as every
from gnomon.ops.op import find as find
