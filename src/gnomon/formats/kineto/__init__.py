"""Recordings: Chrome traces as `torch.profiler` writes them, exports of Nsight Systems, snapshots of torch's allocator.

`read_trace` returns one rank's `Trace`, `read_traces` all of a folder, `read_nsight` all of an export, `read_snapshot`
an allocator's peak. Leaves out what follows from them (`gnomon.profile`) and writing (`formats.perfetto` does).
"""

from gnomon.formats.kineto.nsight import is_nsight as is_nsight
from gnomon.formats.kineto.nsight import read_nsight as read_nsight
from gnomon.formats.kineto.read import is_trace as is_trace
from gnomon.formats.kineto.read import read_trace as read_trace
from gnomon.formats.kineto.read import read_traces as read_traces
from gnomon.formats.kineto.snapshot import is_snapshot as is_snapshot
from gnomon.formats.kineto.snapshot import read_snapshot as read_snapshot
