"""Timelines: what every worker did when, predicted or measured, and what follows from it.

The type, the breakdown of a step without remainder, memory over time. `timeline.text` prints and parses one,
`timeline.difference` compares two, `timeline.lanes` draws one: imported from there by what needs them. Leaves out how a
Timeline comes about: the simulator plays one, the runtime measures one.
"""

from gnomon.timeline.breakdown import PARTS as PARTS
from gnomon.timeline.breakdown import Breakdown as Breakdown
from gnomon.timeline.breakdown import Idle as Idle
from gnomon.timeline.breakdown import Part as Part
from gnomon.timeline.breakdown import Share as Share
from gnomon.timeline.breakdown import breakdown as breakdown
from gnomon.timeline.breakdown import exposed_communication as exposed_communication
from gnomon.timeline.breakdown import idle_intervals as idle_intervals
from gnomon.timeline.memory import Curve as Curve
from gnomon.timeline.memory import Peak as Peak
from gnomon.timeline.memory import memory_curve as memory_curve
from gnomon.timeline.memory import of_buffers as of_buffers
from gnomon.timeline.memory import peaks as peaks
from gnomon.timeline.memory import seen_buffers as seen_buffers
from gnomon.timeline.types import NONE as NONE
from gnomon.timeline.types import ROLES as ROLES
from gnomon.timeline.types import Memory as Memory
from gnomon.timeline.types import Role as Role
from gnomon.timeline.types import Spans as Spans
from gnomon.timeline.types import Timeline as Timeline
from gnomon.timeline.types import Worker as Worker
