"""The orders' own facts: legal where rows can be computed, as many units held as stated, and nowhere else written.

That `check` and `predict` agree on every order is asked for random numbers; files that say what their rows are not are
refused. One file in a folder of its own is planned, predicted, run and listed in tests/orders/test_added.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gnomon import orders
from gnomon.errors import GnomonError, PlanError
from gnomon.lowering import lower
from gnomon.models.llama import LlamaConfig, llama
from gnomon.orders.checked import checked, problems
from gnomon.plans import Mesh, Optimizer, Plan, Schedule, Workload, check
from gnomon.prediction import predict
from gnomon.program import issue_order_peak, validate
from gnomon.program.rows import Rows, of_lists

GRAPH = llama(
    LlamaConfig(
        name="deep",
        num_kv_heads=4,
        head_dim=16,
        hidden_size=64,
        ffn_size=128,
        num_layers=20,
        num_heads=4,
        vocab_size=256,
    )
)
SIZES = {"S": 1, "X": 0, "Y": 0, "DX": 0, "DY": 0, "P": 0, "G": 0}
NAMES = st.sampled_from([order.name for order in orders.every()])
NUMBERS = {"p": st.integers(1, 5), "m": st.integers(1, 14), "v": st.integers(1, 4)}


def plan_of(order: orders.Order, p: int, m: int, v: int) -> Plan:
    schedule = Schedule(name=order.name, num_microbatches=m, virtual_stages=v, placement=order.placement)
    return Plan(mesh=Mesh(pp=p), schedule=schedule, optimizer=Optimizer(clip=False))


@given(name=NAMES, **NUMBERS)
@settings(max_examples=400)
@example(name="zero_bubble_v", p=2, m=2, v=2)
@example(name="dualpipe_v", p=4, m=7, v=2)
def test_an_order_is_legal_where_its_rows_run_and_holds_what_it_says(name: str, p: int, m: int, v: int) -> None:
    order = orders.find(name)
    plan, reason = plan_of(order, p, m, v), order.legal(p, m, v)
    if reason is not None:
        for refused in (lambda: order.rows(p, m, v), lambda: check(plan, GRAPH), lambda: lower(GRAPH, plan)):
            with pytest.raises(PlanError, match=re.escape(f"schedule {name}")):
                refused()
        return
    check(plan, GRAPH)
    assert not list(problems(order, p, m, v))  # in_flight is exact there
    program = lower(GRAPH, plan)
    peaks = issue_order_peak(program, validate(program).deps, SIZES)
    assert [int(peak.bytes) for peak in peaks] == [order.most_held(rank, p, m, v) for rank in range(p)]


@given(name=NAMES, zero=st.sampled_from((0, 3)), **NUMBERS)
@settings(max_examples=25)
@example(name="zero_bubble_v", zero=0, p=2, m=2, v=2)
@example(name="dualpipe_v", zero=3, p=2, m=4, v=2)
@example(name="looped_bfs", zero=0, p=1, m=4, v=2)
def test_check_and_predict_agree(name: str, zero: int, p: int, m: int, v: int) -> None:
    plan = plan_of(orders.find(name), p, m, v)
    plan = Plan(mesh=Mesh(pp=p, dp_shard=2), schedule=plan.schedule, optimizer=Optimizer(zero=zero))  # type: ignore[arg-type]
    workload = Workload(global_batch_size=2 * m, seq_len=64)

    def refused(ask: object) -> bool:
        try:
            assert callable(ask)
            ask()
        except GnomonError:
            return True
        return False

    by_check = refused(lambda: check(plan, GRAPH, None, workload))
    assert refused(lambda: predict(GRAPH, f"1x{2 * p}xh100-sxm", plan, workload)) == by_check


def test_a_plan_names_an_order_that_there_is() -> None:
    with pytest.raises(PlanError, match=r"unknown schedule '1F1B' \(here it is 'one_f_one_b'\); known: dualpipe_v, "):
        Schedule(name="1F1B")
    with pytest.raises(PlanError, match=r"unknown schedule 'zero_buble_v' \(did you mean 'zero_bubble_v'"):
        Schedule(name="zero_buble_v")


def test_names_and_aliases_lead_to_one_order() -> None:
    known = [name for order in orders.every() for name in (order.name, *order.aliases)]
    assert len(set(known)) == len(known)
    for software in ("megatron-lm", "torchtitan", "deepspeed", "nanotron"):
        spelled = [order.names[software] for order in orders.every() if software in order.names]
        assert spelled and len(set(spelled)) == len(spelled)
        assert orders.spelled(software)[spelled[0]].name == orders.DEFAULT


def test_only_the_orders_name_themselves() -> None:
    """One fact, one place: outside its own file a schedule's name is no string of the package, but for the default."""
    source = Path(orders.__file__).parents[1]
    wanted = re.compile(f'"({"|".join(orders.names())})"')
    actual = {
        f"{path.relative_to(source)}: {line.strip()}"
        for path in source.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if (name := wanted.search(line)) and path != source / "orders" / f"{name.group(1)}.py"
    }
    assert actual == {'orders/order.py: DEFAULT = "one_f_one_b"'}


FILE = """
from gnomon.orders import Order
from gnomon.program.rows import of_lists


def build(p, m, v):
    every = range(m)
    return of_lists(
        [[("F", r, u) for u in every] + [("B", r, u) for u in {backwards}] for r in range(p)], num_stages=p, num_units=m
    )


ORDER = Order(name="{name}", title="GPipe, last first", paper="Huang et al. 2019", build=build{facts})
"""


def file_of(folder: Path, *, name: str = "last_first", backwards: str = "reversed(every)", facts: str = "") -> Path:
    path = folder / f"{name}.py"
    path.write_text(FILE.format(name=name, backwards=backwards, facts=facts), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "gpipe"}, "has an order named 'gpipe', and there is one already; choose another name"),
        ({"facts": ", backward='split'"}, "backward = 'split' is said, and rank 0 has 1 B and 0 I"),
        ({"facts": ", in_flight=lambda rank, p, m, v: p"}, "rank 0 has 2 units in flight, and in_flight says 1"),
        ({"facts": ", activations=lambda rank, p, m, v: 1"}, "rank 0 holds activations of 2 units, and 1 are said"),
        ({"facts": ", stages=(2, 2)"}, "rows of .ranks, stages, microbatches. = .1, 1, 1., not .1, 2, 1."),
        ({"backwards": "every[1:]"}, "rank 0 computes 1 forwards and 0 backwards, not 1"),
        ({"facts": ", microbatches=lambda p, m, v: 'needs luck'"}, "no rows for up to 4 pipeline ranks"),
        ({"name": "no name"}, "a name is an identifier"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_say_what_its_rows_are_is_refused(
    tmp_path: Path, fields: dict[str, str], message: str
) -> None:
    with pytest.raises(GnomonError, match=message):
        orders.add(file_of(tmp_path, **fields))
    assert not orders.added()


def test_rows_that_wait_for_each_other_are_refused() -> None:
    """A backward before the forward that it needs, on the rank after."""
    gpipe = orders.find("gpipe")

    def stuck(p: int, m: int, v: int) -> Rows:
        rows = [[*(("B", r, u) for u in range(m)), *(("F", r, u) for u in range(m))] for r in range(p)]
        return of_lists(rows, num_stages=p, num_units=m)

    with pytest.raises(PlanError, match="rank 0 waits for ever before the B of microbatch 0 in stage 0"):
        checked(orders.Order(name="stuck", title="", paper="", build=stuck))
    assert checked(gpipe) is gpipe


@pytest.mark.parametrize(
    ("text", "message"),
    [("x = 1", "has no order; define ORDER"), ("import nothing_of_the_kind", "cannot be loaded: ModuleNotFoundError")],
)
def test_a_file_without_an_order_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "order.py"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(GnomonError, match=message):
        orders.add(path)
    with pytest.raises(GnomonError, match="is no Python file with an order"):
        orders.add(tmp_path / "missing.py")


def test_the_page_has_what_the_orders_say() -> None:
    """docs/schedules.md: a row of both tables for every order, in order of preference."""
    page = (Path(__file__).parents[2] / "docs/schedules.md").read_text(encoding="utf-8")
    costs, names = [], []
    for order in orders.every():
        stages = f"{order.stages_text}, in a V" if order.placement == "v" else order.stages_text
        costs.append(f"| `{order.name}` | {stages} | {order.bubble} | {order.held} | {order.asks} |")
        spelled = (order.names.get(name) for name in ("megatron-lm", "torchtitan", "deepspeed", "nanotron"))
        cells = " | ".join(f"`{name}`" if name else "" for name in spelled)
        names.append(f"| `{order.name}` | {order.paper} | {cells} |")
    assert "\n".join(costs) in page and "\n".join(names) in page
