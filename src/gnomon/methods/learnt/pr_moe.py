"""PR-MoE: the mixture of DeepSpeed-MoE, with more experts in later layers and a dense feed-forward beside one expert.

It is a network (`models.pr_moe`, presets `pr-moe-350m` and `pr-moe-1.3b`), and no decision of a plan: `gnomon plan`,
`predict` and `run` take it as any model, under every axis. So no plan turns it on, and what follows from it is that of
its Graph. Leaves out its student (MoS), whose distillation is `mos`.
"""

from __future__ import annotations

from gnomon.methods.method import Method

METHOD = Method(
    name="pr_moe",
    paper="DeepSpeed-MoE, Rajbhandari et al., ICML 2022",
    about="more experts in later layers (pyramid), and a dense feed-forward beside one expert (residual)",
    switch="the model",
    exactness="statistical",
    missing={
        "rewritten": "it is a network: actions of its Program are those of any mixture",
        "planned": "a search takes the network as it is given: gnomon plan pr-moe-350m",
    },
    on=lambda plan: False,
)
