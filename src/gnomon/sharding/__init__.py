"""Sharding: how tensors lie on the mesh axes, and which collectives follow.

`Sharding` of a tensor and `redistribute` between two; `strategies` of an op; `shard_block` for a whole block, with
local sizes and its collectives in order; `parameters` for gradients and ZeRO; `context` for causal masks; `reshard`
between stages. No times.
"""

from gnomon.ops.strategy import Division as Division
from gnomon.ops.strategy import Strategy as Strategy
from gnomon.sharding.block import ShardedBlock as ShardedBlock
from gnomon.sharding.block import ShardedOp as ShardedOp
from gnomon.sharding.block import shard_block as shard_block
from gnomon.sharding.block import shard_graph as shard_graph
from gnomon.sharding.context import causal_shares as causal_shares
from gnomon.sharding.context import ring_step_pairs as ring_step_pairs
from gnomon.sharding.homes import homes as homes
from gnomon.sharding.parameters import ParameterCollective as ParameterCollective
from gnomon.sharding.parameters import parameter_collectives as parameter_collectives
from gnomon.sharding.reshard import Message as Message
from gnomon.sharding.reshard import deal as deal
from gnomon.sharding.reshard import reshard as reshard
from gnomon.sharding.strategies import setting_of as setting_of
from gnomon.sharding.strategies import strategies as strategies
from gnomon.tensors.layout import Collective as Collective
from gnomon.tensors.layout import Scene as Scene
from gnomon.tensors.layout import Sharding as Sharding
from gnomon.tensors.layout import local_bytes as local_bytes
from gnomon.tensors.layout import local_size as local_size
from gnomon.tensors.layout import redistribute as redistribute
