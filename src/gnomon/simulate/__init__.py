"""The simulator: a virtual clock over any Program. It knows levels and predecessors, nothing about pipelines.

`simulate` returns a Timeline, `play` the times of one step, `period` those of the steady state with its proof;
`makespans` and `periods` do it for thousands of sets of durations, `durations` resolves a table of seconds by label.
Where durations come from is the prices' business, what a Timeline says is the timeline's.
"""

from gnomon.simulate.durations import Durations as Durations
from gnomon.simulate.durations import durations as durations
from gnomon.simulate.durations import labels as labels
from gnomon.simulate.many import Script as Script
from gnomon.simulate.many import makespans as makespans
from gnomon.simulate.many import periods as periods
from gnomon.simulate.period import Period as Period
from gnomon.simulate.period import makespan as makespan
from gnomon.simulate.period import period as period
from gnomon.simulate.play import Clock as Clock
from gnomon.simulate.play import Times as Times
from gnomon.simulate.play import base_from as base_from
from gnomon.simulate.play import play as play
from gnomon.simulate.play import play_steps as play_steps
from gnomon.simulate.run import STREAM_ROLES as STREAM_ROLES
from gnomon.simulate.run import simulate as simulate
from gnomon.simulate.steady import Steady as Steady
from gnomon.simulate.steady import steady as steady
