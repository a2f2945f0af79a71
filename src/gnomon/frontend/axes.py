"""What the axes of tensors are: batch, seq, hidden, heads, ffn, vocab … by how values are made of each other.

Axes of values are put into classes: an op that keeps an axis, adds two tensors or multiplies along one says that two
axes are the same. `Axes` holds the classes; a class that a view takes apart is the product of others. Roles come from
the ops that know what they do: an embedding's rows are `vocab`, attention's are `heads`. Names follow from role and
size, so the layers of a model have the same ones. Leaves out which ops there are (`convert`).
"""

from __future__ import annotations

from collections.abc import Sequence

from gnomon.frontend.sizes import Extent
from gnomon.graph import Dim, Size

Axis = int
"""A class member; `find` gives its class."""


class Axes:
    """Classes of axes, with sizes, products and roles."""

    def __init__(self) -> None:
        self.parent: list[int] = []
        self.extents: list[Extent] = []
        self.factors: dict[int, tuple[int, ...]] = {}
        self.roles: dict[int, str] = {}
        self.names: dict[tuple[object, ...], str] = {}
        self.dims_used: dict[str, Dim] = {}
        self.known: dict[int, Dim] = {}
        self.called: dict[str, str] = {}

    def new(self, extent: Extent) -> Axis:
        """An axis of its own."""
        self.parent.append(len(self.parent))
        self.extents.append(extent)
        return len(self.parent) - 1

    def find(self, axis: Axis) -> Axis:
        """The representative of an axis' class."""
        while self.parent[axis] != axis:
            # Union-find with halved paths: a trace has tens of thousands of axes and as many joins.
            self.parent[axis] = self.parent[self.parent[axis]]
            axis = self.parent[axis]
        return axis

    def same(self, a: Axis, b: Axis) -> None:
        """Two axes are one, if their sizes agree."""
        a, b = self.find(a), self.find(b)
        # Rules join by place alone, so a wrong guess shows in the sizes and is dropped.
        if a == b or self.extents[a] != self.extents[b]:
            return
        self.parent[b] = a
        # What was known of either holds for both.
        if b in self.factors:
            self.factors.setdefault(a, self.factors[b])
        if b in self.roles:
            self.roles.setdefault(a, self.roles[b])

    def role(self, axis: Axis, role: str) -> None:
        """What an axis is; the first word for it stands."""
        self.roles.setdefault(self.find(axis), role)

    def product(self, axis: Axis, factors: Sequence[Axis]) -> None:
        """An axis is several others, outermost first."""
        whole = self.find(axis)
        # An axis that is a factor of itself (a view by 1) would never end.
        if whole not in self.factors and all(self.find(f) != whole for f in factors):
            self.factors[whole] = tuple(factors)

    def dim(self, axis: Axis) -> Dim:
        """The Dim of an axis."""
        root = self.find(axis)
        dim = self.known.get(root)
        if dim is None:
            dim = self.known[root] = self._dim(root, frozenset())
        return dim

    def _dim(self, root: int, within: frozenset[int]) -> Dim:
        extent = self.extents[root]
        if self.roles.get(root) == "batch" and not isinstance(extent, Size):  # the only one that the graph holds for
            return self._plain("batch", extent)
        # A cycle through several views ends in the axis by itself.
        if root in self.factors and root not in within:
            parts = [self.find(f) for f in self.factors[root]]
            dims = [self._dim(part, within | {root}) for part in parts]
            atoms = [atom.name for dim in dims for atom in dim.atoms]
            # No dim holds the same atom twice; such a product stays one plain dim.
            if len(set(atoms)) == len(atoms):
                return self._product_dim(dims)
        if isinstance(extent, Size):
            return self._symbolic(extent)
        return self._plain(self.roles.get(root, "d"), extent)

    def _product_dim(self, dims: Sequence[Dim]) -> Dim:
        """The product of the dims' atoms; it is the same one however its factors were put together."""
        factors = tuple(atom for dim in dims for atom in dim.atoms)
        return Dim(name="_x_".join(atom.name.replace(".", "_") for atom in factors), factors=factors)

    def _symbolic(self, extent: Size) -> Dim:
        if extent.plus:  # a length that is one longer or shorter: of that length, as far as a price goes
            name = "_".join(dict.fromkeys(extent.names))
            about = f"{name}_{'plus' if extent.plus > 0 else 'minus'}_{abs(extent.plus)}"
            if extent.factor == 1 and len(extent.names) == 1:
                return Dim(name=about, same_as=extent.names[0])
        parts, seen = [], dict[str, int]()
        for name in extent.names:
            seen[name] = seen.get(name, 0) + 1
            times = seen[name]
            # seq x seq of scores: the second is the keys' side, which context parallelism divides otherwise.
            parts.append(Dim(name=name) if times == 1 else Dim(name=f"kv_{name}" + "_" * (times - 2), same_as=name))
        if extent.factor != 1:
            parts.append(self._plain("d", extent.factor))
        return parts[0] if len(parts) == 1 else self._product_dim(parts)

    def _plain(self, role: str, size: int) -> Dim:
        size = max(size, 1)  # an empty tensor is counted as one element
        # One role has several sizes (kv_heads of another tower): each gets a number behind its name.
        key = (role, size)
        if key not in self.names:
            name = f"{role}{size}" if role == "d" else role
            count = 2
            while name in self.dims_used:
                name, count = f"{role}.{count}" if role != "d" else f"{role}{size}.{count}", count + 1
            self.names[key] = name
            self.dims_used[name] = Dim(name=name, size=size)
        return self.dims_used[self.names[key]]

    def dims(self, axes: Sequence[Axis]) -> tuple[Dim, ...]:
        """Dims of a tensor: one that comes twice has another name the second time."""
        dims, atoms = list[Dim](), set[str]()
        for axis in axes:
            dim = self.dim(axis)
            if {atom.name for atom in dim.atoms} & atoms:
                dim = _again(dim, atoms)
            atoms |= {atom.name for atom in dim.atoms}
            dims.append(dim)
        return tuple(dims)


def _again(dim: Dim, atoms: set[str]) -> Dim:
    """The same extent under names that are not yet taken."""
    if dim.factors:
        factors = tuple(_again(f, atoms) if {a.name for a in f.atoms} & atoms else f for f in dim.factors)
        return Dim(name="_x_".join(f.name.replace(".", "_") for f in factors), factors=factors)
    count = 1
    while (name := f"{dim.name}.again" if count == 1 else f"{dim.name}.again{count}") in atoms:
        count += 1
    if dim.size is not None:
        return Dim(name=name, size=dim.size)
    return Dim(name=name, same_as=dim.same_as or dim.name)
