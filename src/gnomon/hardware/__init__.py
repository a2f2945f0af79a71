"""The machines: types, the catalogue of what exists, specs of clusters, what was measured on one.

Returns frozen values with peaks and their sources. Leaves out what a kernel or a collective reaches of those peaks
(prices) and measuring anything (runtime).
"""

from gnomon.hardware.catalogue import device as device
from gnomon.hardware.catalogue import device_names as device_names
from gnomon.hardware.catalogue import link as link
from gnomon.hardware.catalogue import link_names as link_names
from gnomon.hardware.catalogue import node as node
from gnomon.hardware.catalogue import node_names as node_names
from gnomon.hardware.catalogue import prices as prices
from gnomon.hardware.local import local_file as local_file
from gnomon.hardware.local import measured_cluster as measured_cluster
from gnomon.hardware.measured import NOISY_SPREAD as NOISY_SPREAD
from gnomon.hardware.measured import Axis as Axis
from gnomon.hardware.measured import Measured as Measured
from gnomon.hardware.measured import Table as Table
from gnomon.hardware.measured import merged as merged
from gnomon.hardware.rent import Rent as Rent
from gnomon.hardware.rent import parse_prices as parse_prices
from gnomon.hardware.rent import rent as rent
from gnomon.hardware.scaled import scaled as scaled
from gnomon.hardware.specs import load_cluster as load_cluster
from gnomon.hardware.specs import load_cluster_file as load_cluster_file
from gnomon.hardware.specs import local_cluster as local_cluster
from gnomon.hardware.specs import parse_cluster as parse_cluster
from gnomon.hardware.types import Cluster as Cluster
from gnomon.hardware.types import Device as Device
from gnomon.hardware.types import Link as Link
from gnomon.hardware.types import Node as Node
from gnomon.hardware.types import NodeGroup as NodeGroup
from gnomon.hardware.types import PeakFlops as PeakFlops
from gnomon.hardware.types import Price as Price
from gnomon.hardware.types import with_host_memory as with_host_memory
