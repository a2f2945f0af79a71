"""Kineto: Chrome traces as `torch.profiler` writes them, and memory snapshots of torch's caching allocator.

`read_trace` returns one rank's `Trace`, `read_traces` all of a folder, `read_snapshot` an allocator's peak. Leaves out
what follows from them (`gnomon.profile`) and writing (`formats.perfetto` does).
"""

from gnomon.formats.kineto.read import is_trace as is_trace
from gnomon.formats.kineto.read import read_trace as read_trace
from gnomon.formats.kineto.read import read_traces as read_traces
from gnomon.formats.kineto.snapshot import is_snapshot as is_snapshot
from gnomon.formats.kineto.snapshot import read_snapshot as read_snapshot
