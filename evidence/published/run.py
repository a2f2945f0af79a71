"""A published run as Gnomon's own values: model, plan, workload, stack, cluster, and what was measured.

`read_runs(source)` returns every row as a `Run` or a `RefusedRun` with the reason, in the order of the file. Nothing is
predicted here, and nothing is fitted to what was measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from evidence.published import automodel, nvidia, torchtitan
from evidence.published.adapters import adapters_of
from evidence.published.bridge import with_offloading, with_recompute, with_sharding
from evidence.published.complete import completed, interleaved
from evidence.published.composed import with_composition
from evidence.published.machines import cluster
from evidence.published.measured import PARAMETERS_ALONE, Peak, readings
from evidence.published.megatron_ci import with_test_facts, with_test_plan
from evidence.published.model import Config, build, model_config
from evidence.published.notes import MemoryMetric, NoteFacts, read_notes
from evidence.published.plan import plan, stack, with_stages, workload
from evidence.published.row import Refused, Row, read_table
from evidence.published.scripts import with_script_facts
from evidence.published.settings import saved as saved_of
from evidence.published.sizes import with_sizes
from evidence.published.units import in_usual_units
from evidence.published.words import with_words
from gnomon.errors import GnomonError, InputError
from gnomon.graph import BF16, FUSED, Graph, Setting, graph_work
from gnomon.hardware import Cluster
from gnomon.models.decoder import DecoderConfig
from gnomon.models.gpt import GptConfig
from gnomon.models.llama import LlamaConfig
from gnomon.models.lora import Adapters
from gnomon.plans import Plan, Workload
from gnomon.software import Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measured training run."""

    id: str
    """Of the row."""
    family: str
    """Rows of one source."""
    model: Config
    """Sizes."""
    plan: Plan
    """Decisions."""
    workload: Workload
    """The batch."""
    stack: Stack
    """The program."""
    cluster: Cluster
    """The machines."""
    readings_s: tuple[float, ...]
    """Seconds per step that the row implies, the most trustworthy first."""
    covers: Literal["step", "forward_backward"]
    """What the time is of: a whole step, or without the update."""
    memory_bytes: int | None
    """Peak, as published; GB and GiB are not told apart by most sources."""
    memory_metric: MemoryMetric
    """What that is."""
    memory_rank: int | None
    """Of which rank; None for the highest, or not said."""
    facts: NoteFacts = field(repr=False)
    """From the notes."""
    adapters: Adapters | None = None
    """What is trained beside frozen weights; None: all weights are."""
    pieced: bool = False
    """The source leaves out sizes, length or the whole batch, which scripts of its program say."""
    recompute_open: bool = False
    """The source does not say what is recomputed: `fitted_reading` takes the least that fits."""
    notes: tuple[str, ...]
    """What the row leaves open, and how it was filled in."""
    row: Row = field(repr=False)
    """As published."""

    @property
    def step_s(self) -> float:
        """The reading to trust."""
        return self.readings_s[0]

    @property
    def graph(self) -> Graph:
        """The model's graph."""
        return build(self.model, self.adapters)

    @property
    def group(self) -> tuple[str, str, int]:
        """Runs that a user would choose among: same family, model and number of devices."""
        return (self.family, self.row.model, self.row.num_devices or 0)


_OF_A_JOB = ("layers", "hidden", "heads", "seq_len", "global_batch")


def read_runs(source: str | Path) -> tuple[tuple[Run, ...], tuple[Refused, ...]]:
    """(runs, rows without one) of a table, given as a Path, or of its text, given as str.

    InputError when the table as a whole cannot be read.
    """
    rows, refused = read_table(source)
    rows, interleaves = interleaved(rows)
    return _runs(rows, list(refused), interleaves)


def _runs(
    rows: Iterable[Row], refused: list[Refused], interleaves: Mapping[str, str]
) -> tuple[tuple[Run, ...], tuple[Refused, ...]]:
    runs: list[Run] = []
    for row in rows:
        try:
            made = to_run(row)
            note = interleaves.get(row.id)
            runs.append(replace(made, notes=(note, *made.notes)) if note else made)
        except GnomonError as error:
            refused.append(Refused(id=row.id, family=row.family, reason=str(error)))
    return tuple(runs), tuple(refused)


def to_run(row: Row) -> Run:
    """The run of a row. GnomonError says what is missing or cannot be expressed."""
    given = row
    row, from_pages = with_script_facts(given)
    pieced = any(getattr(given, name) is None and getattr(row, name) is not None for name in _OF_A_JOB)
    row, measured = in_usual_units(row)
    row, sized = with_sizes(row)
    row, from_words = with_words(row)
    row, implied = completed(row)
    row, from_test = with_test_facts(row)
    row, from_code = with_composition(row)
    facts = read_notes(row)
    if facts.inconsistent:
        raise InputError(f"the source contradicts itself: {facts.inconsistent.strip()}")
    row, from_recipe = with_recompute(row, facts.release)
    row, from_sharding = with_sharding(row)
    row, from_offloading = with_offloading(row, facts.release)
    row, from_adapters = automodel.with_recipe(row)
    row, from_preset = torchtitan.with_recipe(row)
    row, from_script = nvidia.with_script(row)
    adapters, from_lora = adapters_of(row)
    config, from_model = model_config(row)
    machines, from_cluster = cluster(row)
    short, from_packing = nvidia.packed(row)
    made, from_plan = plan(short, facts)
    made, from_checkpoints = torchtitan.recomputed(row, made, lambda: build(config))
    made, from_stages = with_stages(made, row, config, facts)
    config, from_tie = _untied(config, made)
    program, from_stack = stack(row, facts)
    return Run(
        id=row.id,
        family=row.family,
        model=config,
        plan=with_test_plan(automodel.layout(row, made), row),
        workload=workload(short),
        stack=program,
        cluster=machines,
        readings_s=readings(row, config.vocab_size, lambda: _step_flops(row, config, machines, made)),
        adapters=adapters,
        pieced=pieced,
        covers="forward_backward" if facts.without_optimizer else "step",
        recompute_open=saved_of(row)[2],
        memory_bytes=None if row.mem_gib is None else round(row.mem_gib * 2**30),
        memory_metric=facts.memory_metric,
        memory_rank=made.world_size - 1 if facts.memory_rank == -1 else facts.memory_rank,
        facts=facts,
        notes=(
            *from_pages,
            *measured,
            *sized,
            *from_words,
            *implied,
            *from_test,
            *from_code,
            *from_recipe,
            *from_sharding,
            *from_offloading,
            *from_adapters,
            *from_preset,
            *from_script,
            *from_lora,
            *from_model,
            *from_cluster,
            *from_packing,
            *from_plan,
            *from_checkpoints,
            *from_stages,
            *from_tie,
            *from_stack,
        ),
        row=row,
    )


def _untied(config: Config, made: Plan) -> tuple[Config, tuple[str, ...]]:
    """A head of its own where the update is on the host and parameters are divided, for which tied ones have no rows
    in a Program: one more matrix of the vocabulary is gathered and updated."""
    if made.optimizer.offload is None or made.optimizer.zero != 3 or not getattr(config, "tied", False):
        return config, ()
    if not isinstance(config, (GptConfig, LlamaConfig, DecoderConfig)):
        return config, ()
    return replace(config, tied=False), ("the tied head taken as one of its own: its update is on the host",)


def _step_flops(row: Row, config: Config, machines: Cluster, made: Plan) -> Peak:
    """Model FLOPs of a step, attention counted whole, and the dense peak of all devices: for sources that publish
    nothing but FLOP/s or MFU, and whose formula is not known, or is known to count parameters alone."""
    peak = sum(device.flops_per_s(made.precision.compute) for device in machines.devices)
    if re.search(PARAMETERS_ALONE, row.source or ""):
        tokens = (row.global_batch or 0) * (row.seq_len or 0)
        return Peak(flops=6.0 * build(config).num_parameters() * tokens, flops_per_s=peak)
    sizes = {"batch": row.global_batch or 0, "seq": row.seq_len or 0}
    work = graph_work(build(config), FUSED, Setting(sizes=sizes, dtypes=BF16, causal_flops="full"))
    return Peak(flops=float(work.total.matmul_flops), flops_per_s=peak)
