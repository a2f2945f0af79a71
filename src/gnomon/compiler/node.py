"""`Node`: a node of torch.fx for rewrites that look at what a node is given.

Its arguments may be anything, and are looked at before they are taken for something, so for the type checker it is
anything.
"""

from __future__ import annotations

from typing import Any

Node = Any
"""`torch.fx.Node`."""
