"""`BlockBuilder`: write a block as one writes a forward pass; returns a checked, frozen `Block`.

Each method adds an op and returns the name of the tensor it makes, which is the op's path unless `name` is given.
Leaves out: anything that depends on sizes or kernels.
"""

from __future__ import annotations

from collections.abc import Mapping

from gnomon.errors import GraphError
from gnomon.graph.types import Block
from gnomon.ops.op import AttrValue, Op, attrs
from gnomon.tensors.dims import Dim
from gnomon.tensors.tensor import Lifetime, Tensor


class BlockBuilder:
    """Collects tensors and ops; `build` freezes and checks them.

    GraphError, from any method, for a name that already stands for another tensor.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._inputs: list[str] = []
        self._tensors: dict[str, Tensor] = {}
        self._ops: list[Op] = []

    def input(self, name: str, *dims: Dim, dtype: str = "compute") -> str:
        """Adds an activation that each call of the block supplies."""
        self._inputs.append(name)
        return self._add(Tensor(name=name, dims=dims, dtype=dtype))

    def parameter(self, name: str, *dims: Dim) -> str:
        """Adds a trained array; naming it twice with the same dims is the same parameter."""
        return self._add(Tensor(name=name, dims=dims, dtype="param", kind="parameter"))

    def state(self, name: str, *dims: Dim, dtype: str, lifetime: Lifetime) -> str:
        """Adds an array that is neither trained nor made by an op here (position ids, caches)."""
        return self._add(Tensor(name=name, dims=dims, dtype=dtype, kind="state", lifetime=lifetime))

    def dims(self, tensor: str) -> tuple[Dim, ...]:
        """Dims of a tensor added before."""
        return self._tensors[tensor].dims

    def op(
        self,
        kind: str,
        path: str,
        inputs: tuple[str, ...],
        dims: tuple[Dim, ...] | None = None,
        *,
        name: str = "",
        dtype: str = "compute",
        contracts: tuple[str, ...] = (),
        **values: AttrValue,
    ) -> str:
        """Adds an op with one output of `dims` (None: those of the first input). values: its attributes."""
        out = self._add(Tensor(name=name or path, dims=self.dims(inputs[0]) if dims is None else dims, dtype=dtype))
        op = Op(kind=kind, path=path, inputs=inputs, outputs=(out,), contracts=contracts, attrs=attrs(**values))
        self._ops.append(op)
        return out

    def outputs(
        self, kind: str, path: str, inputs: tuple[str, ...], outputs: tuple[Tensor, ...], **values: AttrValue
    ) -> tuple[str, ...]:
        """Adds an op with several outputs; returns their names."""
        names = tuple(self._add(tensor) for tensor in outputs)
        self._ops.append(Op(kind=kind, path=path, inputs=inputs, outputs=names, attrs=attrs(**values)))
        return names

    def split(self, path: str, x: str, parts: Mapping[str, tuple[Dim, ...]]) -> tuple[str, ...]:
        """Splits `x` into views, named and shaped by `parts`, in order."""
        dtype = self._tensors[x].dtype
        parts_made = tuple(Tensor(name=name, dims=dims, dtype=dtype) for name, dims in parts.items())
        return self.outputs("split", path, (x,), parts_made)

    def linear(
        self,
        path: str,
        x: str,
        *,
        out: tuple[Dim, ...],
        contract: tuple[Dim, ...],
        bias: bool,
        name: str = "",
    ) -> str:
        """`x` times a weight of dims (out …, contract …), over `contract`; parameters `path.weight` and `path.bias`."""
        outer_dims = tuple(d for d in self.dims(x) if d not in contract)
        inputs = [x, self.parameter(f"{path}.weight", *out, *contract)]
        if bias:
            inputs.append(self.parameter(f"{path}.bias", *out))
        # Atoms: a contracted product (heads x head_dim) is contracted factor by factor, so that an axis may divide one
        # of them.
        contracts = tuple(atom.name for d in contract for atom in d.atoms)
        return self.op("linear", path, tuple(inputs), (*outer_dims, *out), name=name, contracts=contracts)

    def conv2d(self, path: str, x: str, out: tuple[Dim, Dim, Dim], kernel: int, *, name: str = "") -> str:
        """2-D convolution of (batch, channels, h, w) to (batch, *out), out = (channels, h, w); a square kernel.

        Parameters `path.weight` (out channels, in channels, kernel, kernel) and `path.bias` (out channels). The stride
        is not given: it follows from the sizes of h and w before and after.
        """
        batch, channels = self.dims(x)[:2]
        # The size is in the name, since a block may have kernels of several sizes and a name stands for one dim.
        window = tuple(Dim(name=f"kernel_{axis}.{kernel}", size=kernel) for axis in "hw")
        weight = self.parameter(f"{path}.weight", out[0], channels, *window)
        inputs = (x, weight, self.parameter(f"{path}.bias", out[0]))
        contracts = (channels.name, *(d.name for d in window))
        return self.op("conv2d", path, inputs, (batch, *out), name=name, contracts=contracts)

    def experts(self, path: str, rows: str, *, experts: Dim, out: Dim, contract: Dim, bias: bool = False) -> str:
        """Each row of `rows` times the weight (experts, out, contract) of its own expert, plus that one's bias;
        parameters `path.weight` and `path.bias`."""
        outer_dims = tuple(d for d in self.dims(rows) if d != contract)
        weight = self.parameter(f"{path}.weight", experts, out, contract)
        inputs = (rows, weight, self.parameter(f"{path}.bias", experts, out)) if bias else (rows, weight)
        return self.op(
            "grouped_linear", path, inputs, (*outer_dims, out), contracts=(contract.name,), groups=experts.name
        )

    def norm(
        self,
        path: str,
        x: str,
        over: Dim,
        *,
        fn: str,
        bias: bool,
        affine: bool = True,
        groups: int = 0,
        name: str = "",
    ) -> str:
        """Normalises `x` over the dim `over`. fn: rms, layer, or group, which divides `over` into `groups` and
        normalises each over the positions too.

        Parameters `path.weight` (over) if affine, `path.bias` (over) if asked.
        """
        inputs = [x]
        if affine:
            inputs.append(self.parameter(f"{path}.weight", over))
        if bias:
            inputs.append(self.parameter(f"{path}.bias", over))
        extra: dict[str, AttrValue] = {"groups": groups} if groups else {}
        out = self._add(Tensor(name=name or path, dims=self.dims(x)))
        values = attrs(fn=fn, over=over.name, **extra)
        self._ops.append(Op(kind="norm", path=path, inputs=tuple(inputs), outputs=(out,), attrs=values))
        return out

    def attention(
        self,
        path: str,
        q: str,
        k: str,
        v: str,
        *,
        causal: bool,
        bias: str = "",
        sinks: str = "",
        window: int = 0,
        scale: float = 0.0,
        softcap: float = 0.0,
        dropout: float = 0.0,
    ) -> str:
        """softmax(scale · q kᵀ) v for q, k, v of dims (…, seq, heads, dim); heads may be a multiple of kv heads.

        bias: a tensor added to the scores. sinks: a score for each head that takes part in the softmax and has no
        value. window: a query sees that many last keys (0: all); scale 0: 1/√dim; softcap: scores become
        softcap · tanh(score / softcap) (0: they do not). GraphError for a bias and sinks together.
        """
        if bias and sinks:
            raise GraphError(f"{path} is given a bias and sinks, and attention takes one of them; leave one out")
        inputs = (q, k, v, bias or sinks) if bias or sinks else (q, k, v)
        dims = (*self.dims(q)[:-1], self.dims(v)[-1])
        options: dict[str, AttrValue] = {"causal": causal, "window": window, "scale": scale}
        options |= {"softcap": softcap, "dropout": dropout, "sinks": bool(sinks)}
        out = self._add(Tensor(name=path, dims=dims))
        set_options = attrs(**{name: value for name, value in options.items() if value or name == "causal"})
        self._ops.append(Op(kind="attention", path=path, inputs=inputs, outputs=(out,), attrs=set_options))
        return out

    def embedding(self, path: str, ids: str, rows: Dim, width: Dim, *, name: str = "") -> str:
        """Rows of the table `path.weight` (rows, width) chosen by integer `ids`."""
        table = self.parameter(f"{path}.weight", rows, width)
        return self.op("embedding", path, (ids, table), (*self.dims(ids), width), name=name)

    def add(self, path: str, a: str, b: str, *, name: str = "") -> str:
        """a + b, where b's dims are among a's."""
        return self.op("add", path, (a, b), name=name)

    def dropout(self, path: str, x: str, p: float) -> str:
        """Dropout with probability p; x itself when p is 0."""
        return self.op("dropout", path, (x,), p=p) if p > 0 else x

    def build(self, *outputs: str) -> Block:
        """Returns the frozen block."""
        return Block(
            name=self._name,
            inputs=tuple(self._inputs),
            outputs=outputs,
            tensors=tuple(self._tensors.values()),
            ops=tuple(self._ops),
        )

    def _add(self, tensor: Tensor) -> str:
        """Adds a tensor and returns its name. GraphError for a name that stands for another, or for an activation."""
        known = self._tensors.setdefault(tensor.name, tensor)
        # A parameter may be named again, as by two ops that share it; an activation has one maker.
        if known is not tensor and (known != tensor or tensor.is_activation):
            raise GraphError(f"block {self._name!r} makes {tensor} but already has {known}: give one another name")
        return tensor.name
