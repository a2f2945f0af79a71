"""Ops that move numbers, or average them: `rename`, `reshape`, `split`, `concat`, `pool`, `patchify`.

Which dims are cut or joined follows from the names of the dims of inputs and outputs; sizes are those of this rank's
part. Leaves out what images need beside patches (`image`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnomon.errors import PlanError
from gnomon.runtime.ops.site import Operand, Site, read


def rename(site: Site, x: Tensor) -> Tensor:
    """The same tensor: only the graph's names of its dims differ."""
    return x


def reshape(site: Site, x: Tensor) -> Tensor:
    """The same elements with dims joined, taken apart or in another order.

    Every dim is a product of atoms (heads x head_dim); x is taken apart to atoms, these are put in the output's order,
    and joined to its dims. PlanError where input and output have other atoms than each other.
    """
    before, after = (site.block.tensor(name).dims for name in (site.op.inputs[0], site.op.outputs[0]))
    names = [atom.name for dim in before for atom in dim.atoms]
    for index, dim in reversed(list(enumerate(before))):  # from the last, so that earlier indices stay as they are
        if len(dim.atoms) > 1:
            x = x.unflatten(index, [site.local(atom) for atom in dim.atoms])
    target_names = [atom.name for dim in after for atom in dim.atoms]
    if sorted(names) != sorted(target_names):
        raise PlanError(f"{site.op.path}: the runtime cannot make dims {target_names} of {names}")
    x = x.permute([names.index(name) for name in target_names])
    for index, dim in enumerate(after):
        x = x.flatten(index, index + len(dim.atoms) - 1)
    return x


def split(site: Site, x: Tensor) -> tuple[Tensor, ...]:
    """Splits x into the op's outputs: one slice each of a dim that outputs lack, or ranges along the dim whose name
    differs, in proportion to the outputs' sizes. PlanError where these are not fixed numbers."""
    names = site.dims(site.op.inputs[0])
    first = site.dims(site.op.outputs[0])
    if len(first) == len(names) - 1:
        gone = next(i for i, name in enumerate(names) if name not in first)
        return tuple(x.unbind(gone))
    where = next(i for i, (whole, part) in enumerate(zip(names, first, strict=True)) if whole != part)
    sizes = [site.block.tensor(out).dims[where].size for out in site.op.outputs]
    if any(size is None for size in sizes):
        raise PlanError(f"{site.op.path}: the runtime splits along dims of known sizes, not {names[where]!r}")
    total = sum(size or 0 for size in sizes)
    return tuple(x.split([(size or 0) * x.shape[where] // total for size in sizes], dim=where))


def concat(site: Site, *parts: Operand) -> Tensor:
    """Puts operands one after the other along the dim whose name differs in the result.

    An operand that lacks other dims is repeated over them; one that lacks the joined dim too is one slice of it. So a
    class token (hidden) goes before patches (batch, patches, hidden) as (batch, 1, hidden). Attribute `reverse`: the
    last operand comes first (ViT's class token).
    """
    out_dims = site.dims(site.op.outputs[0])
    tensors = [read(part) for part in parts]
    names = [site.dims(name) for name in site.op.inputs]
    # An operand with all dims says which one is joined, and the sizes of the others.
    whole = next(own for own in names if len(own) == len(out_dims))
    along = next(i for i, (a, b) in enumerate(zip(whole, out_dims, strict=True)) if a != b)
    shape = list(tensors[names.index(whole)].shape)
    spread = []
    for own, x in zip(names, tensors, strict=True):
        missing = [i for i, name in enumerate(out_dims) if i != along and name not in own]
        if len(own) + len(missing) < len(out_dims):  # it lacks the joined dim too
            missing = sorted([*missing, along])
        for i in missing:
            x = x.unsqueeze(i)
        spread.append(x.expand([x.shape[i] if i == along else n for i, n in enumerate(shape)]))
    return torch.cat(spread[::-1] if site.attr("reverse", False) else spread, dim=along)


def pool(site: Site, x: Tensor) -> Tensor:
    """The first position of each sequence, or the mean of all. PlanError for another `fn`."""
    where = site.token_dim(site.op.inputs[0])
    match site.attr("fn", ""):
        case "first":
            return x.select(where, 0)
        case "mean":
            return x.mean(where)
        case other:
            raise PlanError(f"{site.op.path}: the runtime pools by first and mean, not by {other!r}")


def patchify(site: Site, x: Tensor) -> Tensor:
    """(batch, channels, h, w) -> (batch, patches, channels, patch h, patch w): patches row by row of the image."""
    tall, wide = (dim.size or 0 for dim in site.block.tensor(site.op.outputs[0]).dims[-2:])
    cut = x.unflatten(-1, (-1, wide)).unflatten(-3, (-1, tall))  # (batch, channels, rows, tall, columns, wide)
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
