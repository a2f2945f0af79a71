"""`gnomon plan` with another question: `--vary`, `--pareto`, `--longest`, `--largest`, `--max-step`, `--deadline`,
`--max-devices`.

`answer` prints a table of cases and returns 0, or 1 when none of them is what was asked. Leaves out the searches
(`gnomon.search.questions.goals`, `gnomon.search.questions.sweep`, `gnomon.search.questions.largest`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from gnomon.cli.budget import QUESTION, Budget
from gnomon.cli.models import read_model
from gnomon.cli.options.plan import PlanOptions
from gnomon.cli.request import tokens_of, tokens_per_batch
from gnomon.cli.terminal import Trying, print_json, print_lines
from gnomon.cli.values import quantity
from gnomon.errors import InputError, nearest
from gnomon.hardware import Cluster, parse_cluster
from gnomon.hardware.kinds import is_mixed
from gnomon.hardware.rent import other_months
from gnomon.models.presets import PRESETS
from gnomon.plans import Workload
from gnomon.report.page.sweep import sweep_page
from gnomon.report.sweep import fitted_words, sweep_mapping, sweep_text
from gnomon.report.tables import dollars, wrapped
from gnomon.request.model import read_config, too_long
from gnomon.schema import save_text
from gnomon.search.questions.goals import (
    FASTEST_NODES,
    Case,
    Question,
    among,
    best_case,
    fast_enough,
    fewest_devices,
    longest,
    of_nodes,
    pareto,
    up_to,
)
from gnomon.search.questions.largest import largest, largest_of
from gnomon.search.questions.sweep import VARIED, Value, Variation, sweep
from gnomon.search.refinement.choices import choices_of
from gnomon.units import parse_bytes, parse_count, parse_seconds, show_bytes, show_seconds

RESOLUTION = 0.01
"""Share of a device's memory by which plans of a front differ at least."""

MIXED = "45s"
"""Processor time of `--longest` and `--largest` over several kinds of devices, unless said: there sizes at the edge of
memory take most, and more of them would be looked at for minutes."""

ALONE = ("pareto", "longest", "largest", "max_step", "deadline")
"""Options that ask something else than the fastest plan, one at a time."""

MACHINES = ("nodes", "on")
"""What varies machines: what `--max-step`, `--deadline` and `--max-devices` choose among."""

Answer = tuple[Sequence[Case], str, bool]
"""Cases, what they answer, and whether that is what was asked."""


def is_asked(options: PlanOptions) -> bool:
    """Whether one of them is given. InputError for several, for what they do not go with, or `--html` without."""
    goals = [f"--{name.replace('_', '-')}" for name in ALONE if getattr(options, name) not in (None, False)]
    if len(goals) > 1:
        raise InputError(f"{' and '.join(goals)} are different questions; ask one at a time")
    names = [name_of(text) for text in options.vary]
    chooses = bool(options.max_devices) or goals in (["--max-step"], ["--deadline"])
    # --vary beside a question that chooses machines lists the machines to choose among; beside any other it is a second
    # question.
    if names and (goals or options.max_devices) and not (chooses and set(names) <= {*MACHINES} and len(names) == 1):
        first = goals[0] if goals else "--max-devices"
        raise InputError(
            f"{first} and --vary {' and '.join(names)} are different questions; --max-step, --deadline and "
            "--max-devices choose among the values of one --vary nodes or --vary on"
        )
    if options.max_devices and goals and not chooses:
        raise InputError(f"{goals[0]} and --max-devices are different questions; ask one at a time")
    if bool(options.deadline) != bool(options.tokens):
        raise InputError("--deadline TIME and --tokens N belong together: so many tokens in so much time")
    conflicting = [*goals, *(["--max-devices"] if options.max_devices else []), *(["--vary"] if names else [])]
    if conflicting and options.output:
        raise InputError(f"-o writes one plan, and {conflicting[0]} finds several; fix the case and plan it alone")
    if options.html and not conflicting:
        raise InputError("--html draws several cases; give --vary, --pareto, --longest or --max-step with it")
    if options.longest and options.seq_len:
        raise InputError("--longest looks for the sequence length and --seq-len gives it; leave one out")
    # Tokens and sequences of a step cannot both stay while the length grows.
    if options.longest and options.tokens_per_batch:
        raise InputError("--longest keeps the sequences of a step; give --global-batch in place of --tokens-per-batch")
    return bool(conflicting)


def name_of(text: str) -> str:
    """What a `--vary` varies."""
    return text.partition("=")[0].strip().replace("-", "_")


def varied_machines(options: PlanOptions) -> tuple[Cluster, ...]:
    """Clusters that `--vary on` names."""
    varied = [_varied(text) for text in options.vary if name_of(text) == "on"]
    return tuple(value for each in varied for value in each.values if isinstance(value, Cluster))


def answer(
    options: PlanOptions, question: Question, cluster: Cluster, workload: Workload, assumed: Sequence[str]
) -> int:
    """Searches for the plans that no other beats on all goals, prints and draws them."""
    on_progress = Trying()
    mixed = is_mixed(cluster) and bool(options.longest or options.largest)
    # One budget for all cases: what the first ones leave is the others'.
    with Budget(options.budget, MIXED if mixed else QUESTION) as budget:
        question = replace(
            question, spare=replace(question.spare, on_progress=on_progress), on_progress=on_progress, keep_going=budget
        )
        cases, summary, met = _cases(options, question, cluster, workload)
        spent = "" if budget() else budget.text
    on_progress.end()
    longest_used = max((n for case in cases if case.best for n in case.workload.sequence_lengths()), default=0)
    # Of the largest case, as lengths may be what varies.
    if not options.largest and (warning := too_long(options.model, longest_used)) and warning not in assumed:
        assumed = (*assumed, warning)
    if options.longest or options.largest:
        summary += _found_so(cases, spent)
    elif unseen := sum(case.num_unseen for case in cases):
        summary += (
            f"{'; ' if summary else ''}budget spent (--budget {budget.text}): {unseen:,} plans were not looked at"
        )
    if options.best == "cost" and (warning := other_months(case.rent for case in cases if case.best and case.rent)):
        summary += f"{'; ' if summary else ''}{warning}"
    _show(options, cases, summary, assumed)
    return budget.status or (0 if met else 1)


def _cases(options: PlanOptions, question: Question, cluster: Cluster, workload: Workload) -> Answer:
    if options.pareto:
        return _front(question, cluster, workload)
    if options.longest:
        cases = longest(question, cluster, workload, multiple=options.longest)
        return cases, f"longest: {cases[-1].label}, in multiples of {options.longest}", True
    if options.largest:
        cases = _largest(options, question, cluster, workload)
        return cases, f"largest that fits: {cases[-1].label}", True
    if options.max_step or options.deadline or options.max_devices:
        return _machines(options, question, cluster, workload)
    return _swept(options, question, cluster, workload)


def _found_so(cases: Sequence[Case], spent: str) -> str:
    """What the plans of the other cases are, what was not looked at, and by what the last fits that has no plan in the
    exact search. spent: the time that was allowed, where all of it is."""
    last = cases[-1]
    words = (
        f"; its plan is the best of those on one kind and of {FASTEST_NODES:,} partial pipelines over kinds at most, "
        "those of the other cases some that fit"
        if is_mixed(last.cluster) and not spent
        else ""
    )
    if spent:
        words = f"; the {spent} of processor time allowed (--budget) are spent: its plan fits, others may be faster"
    if any("not looked at" in case.why for case in cases):
        words += "; of larger ones not every plan was looked at, so that one may fit"
    if last.fit is None:
        return words
    plain = [case.label for case in cases if case.best is not None and case.fit is None]
    before = f"; without such choices {plain[-1]} does" if plain else ""
    return f"{words}; it fits by {fitted_words(last.fit)}{before}"


def _front(question: Question, cluster: Cluster, workload: Workload) -> Answer:
    # Points of a front that are closer are one plan and its rounding.
    resolution = int(min(group.node.device.memory_bytes for group in cluster.groups) * RESOLUTION)
    cases = pareto(question, cluster, workload, resolution_bytes=resolution)
    falls = f"the fastest in the memory allowed, which falls by {show_bytes(resolution)} or more"
    summary = f"Each plan is {falls}."
    usual = choices_of(question.base)
    if not is_mixed(cluster) and any(case.best is not None and choices_of(case.best.plan) != usual for case in cases):
        summary = f"Each plan of the exact search is {falls}; plans with offload and the like are made of those."
    return cases, summary, bool(cases)


def _largest(options: PlanOptions, question: Question, cluster: Cluster, workload: Workload) -> tuple[Case, ...]:
    rule: Any = options.largest or ""
    if rule in ("layers", "hidden", "both"):
        config, _ = read_config(options.model)
        if config is None:
            raise InputError(
                f"--largest {rule} makes a decoder deeper or wider, and {options.model} is none; name models"
            )
        return largest(question, cluster, workload, config, rule)
    names = [name.strip() for name in rule.split(",") if name.strip()]
    # One word that is no model is a rule with a typo; of several, each is read as a model and says what is wrong with
    # it.
    if len(names) == 1 and names[0] not in PRESETS and not Path(names[0]).exists():
        known = ("layers", "hidden", "both")
        hint = nearest(rule, known)
        raise InputError(f"--largest {rule[:40]!r} is no rule{hint}; write layers, hidden, both, or names of models")
    return largest_of(question, cluster, workload, [read_model(name)[0] for name in names])


def _machines(options: PlanOptions, question: Question, cluster: Cluster, workload: Workload) -> Answer:
    """Fewest, fastest or cheapest machines under limits on time and devices."""
    clusters = _choices(options, cluster)
    limit, steps, what = _time_limit(options, workload)
    if limit == float("inf"):
        cases = among(question, clusters, workload)
        best = best_case(cases, options.best)
        word = "cheapest" if options.best == "cost" else "fastest"
        summary = f"{word} on at most {options.max_devices} devices, in whole nodes: "
    elif options.best == "cost":
        cases = tuple(fast_enough(question, clusters, workload, limit))
        best = best_case(cases, "cost", limit)
        summary = f"cheapest machines for {what}: "
    else:
        cases = fewest_devices(question, clusters, workload, limit)
        # The search goes up in devices and ends with the first case that meets the limit.
        best = best_case(cases[-1:], "step", limit)
        summary = f"fewest devices for {what}: "
    if best is None:
        most = max(machines.num_devices for machines in clusters)
        if limit == float("inf"):
            return cases, f"nothing runs and fits on up to {most} devices", False
        return cases, f"no number of nodes up to {most} devices takes {show_seconds(limit)} a step or less", False
    return cases, summary + _spent(best, steps), True


def _choices(options: PlanOptions, cluster: Cluster) -> list[Cluster]:
    """Machines to choose among, fewer devices first."""
    if not options.vary:
        return list(up_to(cluster, options.max_devices))
    (varied,) = (_varied(text) for text in options.vary)
    if varied.name == "nodes":
        nodes = {int(value) for value in varied.values if not isinstance(value, Cluster)}
        clusters = [
            machines
            for machines in up_to(of_nodes(cluster, max(nodes)), options.max_devices)
            if machines.num_nodes in nodes
        ]
    else:
        kinds = [value for value in varied.values if isinstance(value, Cluster)]
        # Whole nodes are rented, so a kind whose one node has too many devices is none of the choices.
        fit = [kind for kind in kinds if options.max_devices is None or _node(kind) <= options.max_devices]
        clusters = [machines for kind in fit for machines in up_to(kind, options.max_devices)]
    if not clusters:
        raise InputError(f"none of {options.vary[0][:60]!r} has {options.max_devices} devices or less")
    return sorted(clusters, key=lambda machines: machines.num_devices)


def _node(cluster: Cluster) -> int:
    """Devices of the smallest node."""
    return min(group.node.count for group in cluster.groups)


def _time_limit(options: PlanOptions, workload: Workload) -> tuple[float, int, str]:
    """(seconds that a step may take, steps of the whole training or 0, what was asked in words)."""
    if options.max_step:
        limit = quantity("--max-step", parse_seconds, options.max_step)
        return limit, 0, show_seconds(limit)
    if not options.deadline:
        return float("inf"), 0, ""
    deadline = quantity("--deadline", parse_seconds, options.deadline)
    tokens = quantity("--tokens", parse_count, options.tokens or "")
    if not tokens or not deadline:
        raise InputError("--deadline and --tokens must be above 0")
    # The last step counts whole.
    steps = ceil(tokens / sum(workload.sequence_lengths()))
    return deadline / steps, steps, f"{options.tokens} tokens in {options.deadline} ({steps:,} steps)"


def _spent(case: Case, steps: int) -> str:
    """Machines, and the whole training's time and rent if its length is known."""
    assert case.best is not None
    words = f"{case.cluster.num_devices}, in whole nodes ({case.cluster.name})"
    if steps:
        words += f"; the training takes {case.best.step_s * steps / 86400:.3g} days"
        if case.dollars_per_step is not None:
            words += f" and {dollars(case.dollars_per_step * steps)}"
    elif case.dollars_per_token is not None:
        words += f"; 1M tokens cost {dollars(case.dollars_per_token * 1e6)}"
    return words


def _swept(options: PlanOptions, question: Question, cluster: Cluster, workload: Workload) -> Answer:
    varied = tuple(_varied(text) for text in options.vary)
    cases = sweep(question, cluster, workload, varied, tokens_per_batch=tokens_per_batch(options))
    if options.best == "step":
        return cases, "", True
    best = best_case(cases, "cost")
    # Machines without a price on record have plans and no cost.
    if best is None or best.dollars_per_token is None:
        return cases, "no case has a plan", False
    return cases, f"cheapest: {best.label}, {dollars(best.dollars_per_token * 1e6)} for 1M tokens", True


def _show(options: PlanOptions, cases: Sequence[Case], summary: str, assumed: Sequence[str]) -> None:
    title = f"{options.model} on {options.on}"
    priced = (line for case in cases if case.rent is not None for line in case.rent.sources)
    shown = tuple(dict.fromkeys((*assumed, *priced)))
    if options.json:
        print_json({**sweep_mapping(cases), "answer": summary, "assumptions": list(shown)})
    else:
        first = "memory allowed" if options.pareto else "case"
        print_lines((title, "", *sweep_text(cases, first), *(("", *wrapped(summary, indent="")) if summary else ())))
        if shown:
            print_lines(("", "assumed", *(line for assumption in shown for line in wrapped(assumption, bullet="- "))))
    if options.html:
        save_text(sweep_page(cases, title, summary, front=options.pareto), options.html)


def _varied(text: str) -> Variation:
    """What varies and its values, as in `seq_len=4k,32k`, `nodes=1..16`, `on=4x8xh100-sxm,2xaws-p5`."""
    name, rest = name_of(text), text.partition("=")[2]
    if name not in VARIED:
        raise InputError(f"cannot vary {name[:40]!r}{nearest(name, VARIED)}; there are {', '.join(VARIED)}")
    values = tuple(value for part in rest.split(",") if part.strip() for value in _values(name, part.strip()))
    if not values:
        raise InputError(f"--vary {text[:40]!r} has no values; write {name}=V,V,…, as in seq_len=4k,32k or nodes=1..16")
    return Variation(name=name, values=values)


def _values(name: str, text: str) -> tuple[Value, ...]:
    """One value, or a range of whole numbers; lengths of sequences are counted in units of 1,024."""
    if name == "on":
        return (parse_cluster(text),)
    if name == "memory":
        return (quantity("--vary memory", parse_bytes, text),)
    if name in ("network", "links"):
        try:
            return (float(text.removesuffix("x")),)
        except ValueError:
            raise InputError(f"--vary {name} takes factors, as in {name}=0.5,1,2, not {text[:20]!r}") from None
    first, dots, last = text.partition("..")
    if dots:
        low, high = (quantity(f"--vary {name}", parse_count, end) for end in (first, last))
        # Each value is a search of its own.
        if not 1 <= low <= high <= low + 4096:
            raise InputError(f"--vary {name}={text[:40]}: a range goes up, from 1 on, over 4,096 values at most")
        return tuple(range(low, high + 1))
    value = quantity(f"--vary {name}", tokens_of if name == "seq_len" else parse_count, text)
    if value < 1:
        raise InputError(f"--vary {name}={text[:40]}: values are at least 1")
    return (value,)
