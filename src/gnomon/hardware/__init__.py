"""The machines: types, where ranks stand and what lies between them, and the catalogue of what exists.

Returns frozen values with peaks and their sources. Leaves out what a kernel or a collective reaches of those peaks
(prices) and measuring anything (runtime).
"""

from gnomon.hardware.topology import Hop as Hop
from gnomon.hardware.topology import Place as Place
from gnomon.hardware.topology import link_behind as link_behind
from gnomon.hardware.topology import link_between as link_between
from gnomon.hardware.topology import place as place
from gnomon.hardware.types import Cluster as Cluster
from gnomon.hardware.types import Device as Device
from gnomon.hardware.types import Link as Link
from gnomon.hardware.types import Node as Node
from gnomon.hardware.types import NodeGroup as NodeGroup
from gnomon.hardware.types import PeakFlops as PeakFlops
from gnomon.hardware.types import Price as Price
