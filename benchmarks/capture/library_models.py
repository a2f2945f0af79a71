"""Small models of timm, torchvision, diffusers, torch-geometric, x-transformers, litgpt, torchtitan and of no library.

`models()` names each and says what builds it. All have random values; nothing is downloaded. A detector is its backbone
and head, without the choice of boxes, which depends on values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, dict[str, Tensor]]
"""(module, example)."""


def _pixels(side: int = 64) -> Tensor:
    return torch.randn(2, 3, side, side)


def _ids(most: int = 100) -> Tensor:
    return torch.randint(0, most, (2, 16))


def timm(name: str, **options: Any) -> Built:
    """An image model of timm."""
    from timm import create_model

    return create_model(name, num_classes=10, **options), {"x": _pixels()}


class Detector(nn.Module):
    """Scores and boxes of every anchor, before any is chosen."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.backbone, self.head = whole.backbone, whole.head

    def forward(self, x: Tensor) -> Any:
        """x: (batch, 3, height, width)."""
        return self.head(list(self.backbone(x).values()))


class Segmented(nn.Module):
    """Logits of every pixel."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, 3, height, width)."""
        return self.whole(x)["out"]


def torchvision(name: str) -> Built:
    """An image model of torchvision."""
    from torchvision import models as library

    bare = {"weights": None, "weights_backbone": None, "num_classes": 10}
    made: dict[str, Callable[[], nn.Module]] = {
        "vit": lambda: library.VisionTransformer(
            image_size=64, patch_size=16, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=96, num_classes=10
        ),
        "swin": lambda: library.SwinTransformer([4, 4], 24, [2, 2], [2, 4], [4, 4], num_classes=10),
        "convnext": lambda: library.ConvNeXt(
            [library.convnext.CNBlockConfig(24, 48, 2), library.convnext.CNBlockConfig(48, None, 2)], num_classes=10
        ),
        "lraspp_mobilenet_v3_large": lambda: Segmented(library.segmentation.lraspp_mobilenet_v3_large(**bare)),
        "ssdlite320_mobilenet_v3_large": lambda: Detector(library.detection.ssdlite320_mobilenet_v3_large(**bare)),
    }
    return made.get(name, lambda: getattr(library, name)(num_classes=10))(), {"x": _pixels()}


def diffusers(name: str) -> Built:
    """A denoiser or an autoencoder of diffusers."""
    import diffusers as library

    latents, text, when = torch.randn(2, 4, 16, 16), torch.randn(2, 8, 32), torch.tensor([3, 7])
    if name == "unet":
        unet = library.UNet2DConditionModel(
            sample_size=16, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32,
            attention_head_dim=8, norm_num_groups=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        )  # fmt: skip
        return unet, {"sample": latents, "timestep": when, "encoder_hidden_states": text}
    if name == "dit":
        dit = library.DiTTransformer2DModel(
            num_attention_heads=4, attention_head_dim=16, num_layers=2, sample_size=16, norm_num_groups=8
        )
        return dit, {"hidden_states": latents, "timestep": when, "class_labels": torch.tensor([1, 2])}
    if name == "sd3":
        sd3 = library.SD3Transformer2DModel(
            sample_size=16, num_layers=2, num_attention_heads=4, attention_head_dim=16, joint_attention_dim=32,
            caption_projection_dim=64, pooled_projection_dim=32, in_channels=4, out_channels=4, pos_embed_max_size=16,
        )  # fmt: skip
        given = {"hidden_states": latents, "encoder_hidden_states": text, "pooled_projections": torch.randn(2, 32)}
        return sd3, {**given, "timestep": when}
    vae = library.AutoencoderKL(
        block_out_channels=(32,), norm_num_groups=8, down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
    )  # fmt: skip
    return vae, {"sample": _pixels(32)}


def geometric(name: str) -> Built:
    """A graph network of torch-geometric on a batch of graphs."""
    from torch_geometric.nn import models as library

    from benchmarks.capture.own_models import Graphs

    network = getattr(library, name)(in_channels=16, hidden_channels=32, num_layers=3, out_channels=8)
    return Graphs(network), {"nodes": torch.randn(2, 20, 16), "edges": torch.randint(0, 20, (2, 2, 60))}


def x_transformers(name: str) -> Built:
    """A transformer of x-transformers."""
    from x_transformers import Decoder, Encoder, TransformerWrapper

    kind, options = {
        "decoder": (Decoder, {"rotary_pos_emb": True, "ff_swish": True, "ff_glu": True}),
        "encoder": (Encoder, {"use_rmsnorm": True, "attn_kv_heads": 2}),
        "alibi": (Decoder, {"alibi_pos_bias": True}),
    }[name]
    layers = kind(dim=64, depth=2, heads=4, **options)
    return TransformerWrapper(num_tokens=256, max_seq_len=32, attn_layers=layers), {"x": _ids()}


def litgpt(name: str) -> Built:
    """A model of litgpt, in two small layers of a named one's kind."""
    from litgpt import GPT, Config

    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "padded_vocab_size": 256, "block_size": 64}
    if name != "pythia-14m":
        sizes |= {"n_query_groups": 2, "intermediate_size": 96, "head_size": 16}
    return GPT(Config.from_name(name, **sizes)), {"idx": _ids()}


def torchtitan(name: str) -> Built:
    """The first three layers of torchtitan's `debugmodel` of each, with its own `ScaledDotProductAttention` in place of
    a compiled flex attention."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    config = import_module(f"torchtitan.models.{name}").model_registry("debugmodel").model
    config.layers = config.layers[:3]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    model.init_states()
    return model, {"tokens": _ids()}


def own(name: str) -> Built:
    """What has no package."""
    from benchmarks.capture import own_models

    module = getattr(own_models, name)()
    if name == "Dlrm":
        return module, {"dense": torch.randn(2, 8), "sparse": torch.randint(0, 50, (2, 4, 3))}
    return module, {"ids": _ids(), **({"labels": _ids()} if name == "NanoGPT" else {})}


def models() -> Iterator[tuple[str, Callable[[], Built]]]:
    """(name, what builds it)."""
    every = {
        "own": (own, ("NanoGPT", "Dlrm", "Lstm", "Gru", "Selective", "Branches")),
        "torch-geometric": (geometric, ("GCN", "GraphSAGE", "GIN", "GAT")),
        "x-transformers": (x_transformers, ("decoder", "encoder", "alibi")),
        "litgpt": (litgpt, ("pythia-14m", "Llama-3.2-1B", "Gemma-2-2b")),
        "torchtitan": (torchtitan, ("llama3", "deepseek_v3")),
        "diffusers": (diffusers, ("unet", "dit", "sd3", "vae")),
    }
    for library, (make, names) in every.items():
        for name in names:
            yield f"{library} {name}", partial(make, name)
    swin = {"img_size": 64, "window_size": 4, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)}
    for name, options in {
        "vit_tiny_patch16_224": {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 4},
        "swin_tiny_patch4_window7_224": swin,
        "convnext_atto": {"depths": (1, 1, 2, 1)},
        **dict.fromkeys(("mobilenetv3_small_050", "regnetx_002", "resnet10t", "efficientnet_lite0"), {}),
    }.items():
        yield f"timm {name}", partial(timm, name, **options)
    for name in (
        "vit", "swin", "convnext", "mobilenet_v3_small", "ssdlite320_mobilenet_v3_large", "lraspp_mobilenet_v3_large",
        "efficientnet_b0", "resnet50",
    ):  # fmt: skip
        yield f"torchvision {name}", partial(torchvision, name)


KEPT: list[Any] = []
"""What has to live as long as the process."""


def declared() -> None:
    """Declares the two ops that torchvision's Python asks for, where its binary fits another torch; none of the models
    here calls them."""
    found = find_spec("torchvision")
    binary = Path(found.origin).parent / "_C.so" if found is not None and found.origin else None
    try:
        if binary is not None and binary.exists():
            torch.ops.load_library(str(binary))
            return
    except OSError:
        pass
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    KEPT.append(library)
