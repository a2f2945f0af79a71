"""Search: the best plan of a space, exactly, with what it was compared with.

`make_space` says what is searched, `solve` searches it. Bounds order and prune; the simulator decides.
"""

from gnomon.search.solve import Counts as Counts
from gnomon.search.solve import Found as Found
from gnomon.search.solve import Result as Result
from gnomon.search.solve import memory_limit as memory_limit
from gnomon.search.solve import solve as solve
from gnomon.search.space import Limit as Limit
from gnomon.search.space import Point as Point
from gnomon.search.space import Space as Space
from gnomon.search.space import make_space as make_space
from gnomon.search.space import parse_limit as parse_limit
