"""What a source leaves open about recompute, settled as an honest reader would: the least that fits.

`settled(run)` returns the run to predict, with a note on what was taken. The run ran, so its memory sufficed: where the
source is silent, it is read with the least recompute with which the prediction fits the device, or as it is if none
does. A source that states its recompute is taken at its word.
"""

from __future__ import annotations

import re
from dataclasses import replace

from gnomon.errors import GnomonError
from gnomon.formats.published.run import Run
from gnomon.formats.published.settings import XLA, lighter_first
from gnomon.plans import Saved
from gnomon.prediction import Prediction, predict


def settled(run: Run) -> tuple[Run, Prediction]:
    """The run as it is to be read, and its prediction. GnomonError as `predict` raises it."""
    first = predict(run.graph, run.cluster, run.plan, run.workload, run.stack)
    if first.fits or not run.recompute_open:
        return run, first
    last = run, first
    xla = bool(re.search(XLA, run.row.framework.lower()))
    for saved in lighter_first(run.row.layers or 0, run.plan.num_stages, offloads=xla)[1:]:
        tried = replace(run, plan=replace(run.plan, saved=saved))
        try:
            found = predict(tried.graph, tried.cluster, tried.plan, tried.workload, tried.stack)
        except GnomonError:
            continue
        what = "the least that fits" if found.fits else "nothing fits; taken as much as can be"
        last = replace(tried, notes=(*run.notes, f"recompute not stated: {what}, {_words(saved)}")), found
        if found.fits:
            break
    return last


def _words(saved: Saved) -> str:
    if saved.preset == "full":
        return "all layers, their inputs on the host" if saved.rules else "all layers"
    counts = [rule.first_per_stage for rule in saved.rules if rule.first_per_stage is not None]
    layers = f"{counts[0]} layers of each stage, " if counts else ""
    return f"{layers}norms and activations"
