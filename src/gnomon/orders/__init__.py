"""Pipeline schedules, one a file of this folder: each holds its `Order` under the name `ORDER`.

The folder is the registry: `names` lists it, `find` loads one by name, `every` all of them, the usual ones first.
`add(path)` has a file from elsewhere count as if it lay here; `checked` is what it must pass. A file is loaded when it
is first asked for, so that help and lists of names need no numpy. Leaves out messages, prices and everything else that
goes with a schedule in a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

from gnomon.errors import InputError, PlanError, nearest
from gnomon.late import load_late
from gnomon.orders.order import DEFAULT as DEFAULT
from gnomon.orders.order import Order as Order
from gnomon.orders.order import Placement as Placement
from gnomon.orders.order import Vocabulary as Vocabulary

if TYPE_CHECKING:
    from gnomon.program.rows import Rows

_BESIDE = ("__init__", "order", "checked")
"""Files of the folder that are no schedules."""

_IN_FOLDER = frozenset(path.stem for path in Path(__file__).parent.glob("*.py")) - frozenset(_BESIDE)
_loaded: dict[str, Order] = {}
_added: dict[str, Path] = {}


def names() -> tuple[str, ...]:
    """Names of all orders, by the alphabet, nothing loaded."""
    return tuple(sorted({*_IN_FOLDER, *_added}))


def find(name: str) -> Order:
    """The order of a name. PlanError with what may be meant for one that there is not."""
    if name not in _loaded:
        if name not in _IN_FOLDER:
            lowered = name[:40]
            same = [order.name for order in every() if lowered.lower().replace("-", "_") in order.aliases]
            hint = f" (here it is {same[0]!r})" if same else nearest(lowered, names())
            raise PlanError(f"unknown schedule {lowered!r}{hint}; known: {', '.join(names())}")
        loaded: Order = load_late(f"gnomon.orders.{name}:ORDER")
        assert loaded.name == name, f"orders/{name}.py holds the order {loaded.name}"
        _loaded[name] = loaded
    return _loaded[name]


def every() -> tuple[Order, ...]:
    """All orders, the usual ones first."""
    return tuple(sorted((find(name) for name in names()), key=lambda order: (order.preference, order.name)))


def rows(name: str, ranks: int, microbatches: int, virtual: int | None = None) -> Rows:
    """Rows of compute actions of an order by name, as `Order.rows`."""
    return find(name).rows(ranks, microbatches, virtual)


def spelled(software: str) -> Mapping[str, Order]:
    """What a software calls the orders that it has -> the order, the usual ones first."""
    return {order.names[software]: order for order in every() if software in order.names}


def add(path: str | Path) -> Order:
    """Have the order of a Python file (its `ORDER`) count like those of the folder, in this process.

    A plan can name it from then on, the search tries it, and processes that `gnomon run` starts add it too. The same
    file twice is added once. InputError for a file that cannot be loaded or has no Order; PlanError for a name that is
    taken, and for an order whose rows are not what it says (`checked`).
    """
    file = Path(path).resolve()
    if (known := next((name for name, added in _added.items() if added == file), None)) is not None:
        return _loaded[known]
    spec = spec_from_file_location(f"gnomon_order_{file.stem}", file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise InputError(f"{path} is no Python file with an order; give one that defines ORDER = Order(…)")
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    order = getattr(module, "ORDER", None)
    if not isinstance(order, Order):
        raise InputError(f"{path} has no order; define ORDER = gnomon.orders.Order(…) in it")
    if order.name in names():
        raise PlanError(f"{path} has an order named {order.name!r}, and there is one already; choose another name")
    check: object = load_late("gnomon.orders.checked:checked")
    assert callable(check)
    check(order)
    _added[order.name], _loaded[order.name] = file, order
    return order


def added() -> tuple[Path, ...]:
    """Files that `add` was given, for another process to add."""
    return tuple(_added.values())
