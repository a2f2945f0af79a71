"""`clip` by torch: elements kept between two numbers.

`clip(site, x)` returns a tensor like x. Leaves out bounds that are tensors.
"""

from __future__ import annotations

from torch import Tensor

from gnomon.runtime.ops.site import Site


def clip(site: Site, x: Tensor) -> Tensor:
    """x between attributes `min` and `max`."""
    return x.clamp(site.attr("min", None), site.attr("max", None))
