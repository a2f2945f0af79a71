"""Lowering: a graph and a plan to a Program, which says what each rank does in which order.

An order of `gnomon.orders` gives `Rows` of compute actions; `with_messages`, `with_loads` and the passes on gradients
and optimizer add theirs; `Rows.program` makes a Program. `lower` does all of it. Left out: published methods that
rewrite a Program (`gnomon.methods`), times and prices.
"""

from gnomon.lowering.async_tensor_parallel import async_tensor_parallel as async_tensor_parallel
from gnomon.lowering.blocks import with_blocks as with_blocks
from gnomon.lowering.chunked import chunkflow as chunkflow
from gnomon.lowering.chunked import chunks as chunks
from gnomon.lowering.context_parallel import ring_attention as ring_attention
from gnomon.lowering.data_parallel import shard_state as shard_state
from gnomon.lowering.delayed_update import delay_update as delay_update
from gnomon.lowering.exchanges import side_by_side as side_by_side
from gnomon.lowering.exchanges import with_exchanges as with_exchanges
from gnomon.lowering.fsdp import fully_shard as fully_shard
from gnomon.lowering.generate import GenerationRequest as GenerationRequest
from gnomon.lowering.generate import generate as generate
from gnomon.lowering.gradient_buckets import with_gradient_buckets as with_gradient_buckets
from gnomon.lowering.gradients import with_all_reduce as with_all_reduce
from gnomon.lowering.gradients import with_optimizer as with_optimizer
from gnomon.lowering.gradients import with_tied_all_reduce as with_tied_all_reduce
from gnomon.lowering.lower import compute_rows as compute_rows
from gnomon.lowering.lower import lower as lower
from gnomon.lowering.lower import tied_stages as tied_stages
from gnomon.lowering.messages import blocking_kinds as blocking_kinds
from gnomon.lowering.messages import with_loads as with_loads
from gnomon.lowering.messages import with_messages as with_messages
from gnomon.lowering.offload import offload_optimizer as offload_optimizer
from gnomon.lowering.packed import dacp as dacp
from gnomon.lowering.packed import gds as gds
from gnomon.lowering.sequence_parallel import tensor_parallel_regions as tensor_parallel_regions
from gnomon.lowering.splits import split as split
from gnomon.lowering.streaming import stream_gradients as stream_gradients
from gnomon.lowering.units import worker_units as worker_units
from gnomon.lowering.zero import shard_optimizer as shard_optimizer
from gnomon.orders.dualpipe_v import dualpipe_v as dualpipe_v
from gnomon.orders.gpipe import gpipe as gpipe
from gnomon.orders.interleaved_one_f_one_b import interleaved_one_f_one_b as interleaved_one_f_one_b
from gnomon.orders.interleaved_zero_bubble import interleaved_zero_bubble as interleaved_zero_bubble
from gnomon.orders.looped_bfs import looped_bfs as looped_bfs
from gnomon.orders.one_f_one_b import dapple_warm_up as dapple_warm_up
from gnomon.orders.one_f_one_b import one_f_one_b as one_f_one_b
from gnomon.orders.patterns.alternate import alternate as alternate
from gnomon.orders.v_half import v_half as v_half
from gnomon.orders.v_min import v_min as v_min
from gnomon.orders.zero_bubble_h1 import zero_bubble_h1 as zero_bubble_h1
from gnomon.orders.zero_bubble_h2 import zero_bubble_h2 as zero_bubble_h2
from gnomon.orders.zero_bubble_v import zero_bubble_v as zero_bubble_v
from gnomon.program.rows import KIND as KIND
from gnomon.program.rows import Inserted as Inserted
from gnomon.program.rows import Rows as Rows
from gnomon.program.rows import by_time as by_time
from gnomon.program.rows import insert as insert
from gnomon.program.rows import of_lists as of_lists
from gnomon.program.rows import of_table as of_table
