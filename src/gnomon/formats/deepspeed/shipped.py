"""DeepSpeed files that projects ship and jobs name: what stands in them, where the file itself is not here.

`shipped(name)` returns the configuration of a file that one project alone ships under that name, and the project.
`named_stage(name)` reads stage and offloading from any other name (`zero3_bf16.json`, `z2_offload`). Read from
hiyouga/LLaMA-Factory ff6d4d1 examples/deepspeed, axolotl-ai-cloud/axolotl 067b021 deepspeed_configs and
modelscope/ms-swift 3602360 swift/config. Leaves out what a field means (`read`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gnomon.formats.trainer_terms import AUTO

_HOST: Mapping[str, object] = {"device": "cpu", "pin_memory": True}
_GATHERED: Mapping[str, object] = {"allgather_bucket_size": 500_000_000, "reduce_bucket_size": 500_000_000}
_FACTORY_3: Mapping[str, object] = {"stage": 3, "overlap_comm": False, "reduce_bucket_size": "auto"}
_AXOLOTL_3: Mapping[str, object] = {"stage": 3, "overlap_comm": True, "reduce_bucket_size": "auto"}

FACTORY, AXOLOTL = "LLaMA-Factory (ff6d4d1)", "axolotl (067b021)"

SHIPPED: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "ds_z0_config.json": (FACTORY, {"stage": 0, "overlap_comm": False, **_GATHERED}),
    "ds_z2_config.json": (FACTORY, {"stage": 2, "overlap_comm": False, **_GATHERED}),
    "ds_z2_offload_config.json": (
        FACTORY,
        {"stage": 2, "overlap_comm": False, **_GATHERED, "offload_optimizer": _HOST},
    ),
    "ds_z3_config.json": (FACTORY, _FACTORY_3),
    "ds_z3_offload_config.json": (FACTORY, {**_FACTORY_3, "offload_optimizer": _HOST, "offload_param": _HOST}),
    "zero3_bf16_cpuoffload_params.json": (AXOLOTL, {**_AXOLOTL_3, "offload_param": _HOST}),
    "zero3_bf16_cpuoffload_all.json": (AXOLOTL, {**_AXOLOTL_3, "offload_optimizer": _HOST, "offload_param": _HOST}),
    "deepspeed_configs/zero1.json": (AXOLOTL, {"stage": 1, "overlap_comm": True}),
    "deepspeed_configs/zero2.json": (AXOLOTL, {"stage": 2, "overlap_comm": True, "offload_optimizer": _HOST}),
    "deepspeed_configs/zero3.json": (AXOLOTL, _AXOLOTL_3),
    "deepspeed_configs/zero3_bf16.json": (AXOLOTL, _AXOLOTL_3),
}
"""End of a path -> (project, its zero_optimization). The rest of these files is left to the trainer ("auto")."""


def shipped(name: str) -> tuple[dict[str, object], str] | None:
    """(configuration, project) of a file that is not here; None where no project is known to ship it."""
    parts = name.replace("\\", "/").split("/")
    # With its folder first: names such as zero1.json are anyone's, and are listed with their folder only.
    for end in ("/".join(parts[-2:]), parts[-1]):
        if end in SHIPPED:
            project, zero = SHIPPED[end]
            return {**AUTO, "zero_optimization": dict(zero)}, project
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedStage:
    """What the name of a file, or of one of a trainer's settings, says."""

    stage: int
    optimizer_on_host: bool
    parameters_on_host: bool

    def describe(self) -> str:
        """Puts the configuration into words, as a sentence has it."""
        waits = [
            what
            for what, there in (("optimizer", self.optimizer_on_host), ("parameters", self.parameters_on_host))
            if there
        ]
        return f"ZeRO {self.stage}" + (f" with {' and '.join(waits)} on the host" if waits else "")

    def values(self) -> dict[str, object]:
        """A configuration of it, the rest left to the trainer."""
        zero: dict[str, object] = {"stage": self.stage}
        if self.optimizer_on_host:
            zero["offload_optimizer"] = _HOST
        if self.parameters_on_host:
            zero["offload_param"] = _HOST
        return {**AUTO, "zero_optimization": zero}


def named_stage(name: str) -> NamedStage | None:
    """Stage and offloading by a name; None where it has no stage. `offload` alone means what files of that name hold:
    the optimizer at stage 2, the optimizer and the parameters at stage 3."""
    last = name.replace("\\", "/").rpartition("/")[2].lower()
    stage = re.search(r"(?:zero|z|stage)[_-]?([0-3])", last)
    if stage is None:
        return None
    number = int(stage[1])
    away = "offload" in last
    parameters = away and number == 3 and not re.search(r"offload_?-?opt", last)
    optimizer = away and number > 0 and not re.search(r"offload_?-?param", last)
    return NamedStage(stage=number, optimizer_on_host=optimizer, parameters_on_host=parameters)
