"""A model to run, by its name: `read_runnable_model` reads a preset, a config.json or its folder.

Unlike `request.model`, what the name leaves open of the results is an error: a run computes them. `refuse_unrunnable`
says so before plans are searched for Gnomon's own runtime. Leaves out weights.
"""

from __future__ import annotations

from pathlib import Path

from gnomon.errors import PlanError
from gnomon.formats.huggingface.runnable import read_runnable
from gnomon.formats.job import read_source
from gnomon.graph import Graph
from gnomon.models.lora import parse_adapters, with_adapters
from gnomon.models.numerics import PRESETS, with_numerics
from gnomon.models.presets import model
from gnomon.models.trained import parse_trained, with_trained
from gnomon.request.model import is_code, known_model, trained_line
from gnomon.software import Stack, own


def read_runnable_model(name: str) -> tuple[Graph, tuple[str, ...]]:
    """(model with all that its results depend on, notes) of a preset, a config.json or its folder; PlanError for a
    model that the runtime has not."""
    base, part = parse_trained(name)
    if part is not None:
        graph, notes = read_runnable_model(base)
        return (graph := with_trained(graph, part)), (*notes, trained_line(graph))
    base, adapters = parse_adapters(name)
    if adapters is not None and adapters.magnitudes:
        raise PlanError(f"the runtime does not train DoRA's magnitudes; give {base}+lora{adapters.rank}")
    if adapters is not None and adapters.whole:
        raise PlanError(
            f"the runtime trains adapters alone, and {name} trains {', '.join(adapters.whole)} whole beside them; "
            f"leave +whole out, or train a part of the model by its names (+only:…)"
        )
    if adapters is not None:
        graph, notes = read_runnable_model(base)
        return with_adapters(graph, adapters), (*notes, f"of {base} the adapters alone are trained")
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if path.suffix == ".json" or path.is_file():
        text, source = read_source(path)
        called = path.resolve().parent.name if path.name == "config.json" else path.stem
        read = read_runnable(text, called or source)
        return read.graph, read.notes
    known = known_model(name)
    numerics = next((values for start, values in PRESETS.items() if known.startswith(start)), None)
    if numerics is None:
        raise PlanError(
            f"the runtime does not run {name!r} by its name: of the presets it has {', '.join(PRESETS)} in all their "
            f"sizes; give the model's config.json, or one of these"
        )
    return with_numerics(model(known), numerics), ()


def refuse_unrunnable(name: str, stack: Stack) -> None:
    """PlanError for a model that Gnomon's own runtime does not run by this name, where plans for it are asked."""
    if stack.name != own.NAME or is_code(name):
        return
    try:
        read_runnable_model(name)
    except PlanError as error:
        raise PlanError(f"{error}, or plan for another program with --stack (gnomon catalogue stacks)") from None
