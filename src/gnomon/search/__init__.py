"""Search: the best plan of a space, exactly, with what it was compared with.

`plan` is the whole search; `make_space` says what is searched, `solve` searches it. Bounds order and prune; the
simulator decides.
"""

from gnomon.plans.precision import default_precision as default_precision
from gnomon.search.equal.solve import solve as solve
from gnomon.search.mixed.plan_mixed import MixedResult as MixedResult
from gnomon.search.mixed.plan_mixed import plan_mixed as plan_mixed
from gnomon.search.mixed.results import MixedFound as MixedFound
from gnomon.search.planning import Loss as Loss
from gnomon.search.planning import loss as loss
from gnomon.search.planning import plan as plan
from gnomon.search.results import Counts as Counts
from gnomon.search.results import FoundPlan as FoundPlan
from gnomon.search.results import Result as Result
from gnomon.search.results import memory_limit as memory_limit
from gnomon.search.results import pick_diverse as pick_diverse
from gnomon.search.space.points import Limit as Limit
from gnomon.search.space.points import Point as Point
from gnomon.search.space.points import Space as Space
from gnomon.search.space.points import make_space as make_space
from gnomon.search.space.points import parse_limit as parse_limit
