"""The models of PyTorch in the zoo. ``MODELS`` is the table."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torchvision_operators  # noqa: F401  # before torchvision
from torch import nn
from zoo import SIZE, Batch, Build, Model

Rng = np.random.Generator


# -- what batches are made of ---------------------------------------------------------------------


def floats(rng: Rng, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.normal(size=(SIZE, *shape)).astype("float32"))


def integers(rng: Rng, high: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(high, size=(SIZE, *shape)))


def images(side: int, channels: int = 3) -> Batch:
    """Return a maker of batches of images, each with one of five classes."""
    return lambda rng: (floats(rng, channels, side, side), integers(rng, 5))


def mean_square(output: Any, y: torch.Tensor) -> torch.Tensor:
    """Compare a tensor, or the first tensor of an output."""
    return ((output if torch.is_tensor(output) else output[0]) - y).square().mean()


# -- torchvision ----------------------------------------------------------------------------------


class Detector(nn.Module):
    """A detector of torchvision, with the loss of its documentation: the sum of its losses."""

    def __init__(self, name: str) -> None:
        super().__init__()
        from torchvision.models import get_model

        self.net = get_model(name, weights=None, weights_backbone=None, num_classes=3)

    def forward(self, images: list[torch.Tensor]) -> Any:
        return self.net(images)

    def training_step(self, batch: Any) -> Any:
        return sum(self.net(*batch).values())


def boxes(rng: Rng) -> Any:
    places = [torch.tensor([[4.0 + i, 4.0, 40.0, 40.0 + i]]) for i in range(SIZE)]
    targets = [{"boxes": box, "labels": torch.tensor([1 + i % 2])} for i, box in enumerate(places)]
    return list(
        torch.rand(SIZE, 3, 64, 64, generator=torch.Generator().manual_seed(int(rng.integers(99))))
    ), targets


class Segmenter(nn.Module):
    """A model of torchvision for segmentation, whose prediction is the output ``out``."""

    def __init__(self, name: str) -> None:
        super().__init__()
        from torchvision.models import get_model

        self.net = get_model(name, weights=None, weights_backbone=None, num_classes=5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)["out"]


def segments(rng: Rng) -> Any:
    return floats(rng, 3, 64, 64), integers(rng, 5, 64, 64)


def segment_loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, y)


def _torchvision(name: str, **kwargs: Any) -> Build:
    def build() -> nn.Module:
        from torchvision import models

        if name in models.list_models():
            return models.get_model(name, weights=None, num_classes=5)
        return getattr(models, name)(num_classes=5, **kwargs)

    return build


# fmt: off
_VIT = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
_SWIN = {"patch_size": [2, 2], "embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2], "window_size": [2, 2], "stochastic_depth_prob": 0.0}
TORCHVISION = [
    Model("torchvision", "shufflenet_v2_x0_5", _torchvision("shufflenet_v2_x0_5"), images(32), "cross_entropy"),
    Model("torchvision", "mobilenet_v3_small", _torchvision("mobilenet_v3_small"), images(32), "cross_entropy"),
    Model("torchvision", "squeezenet1_1", _torchvision("squeezenet1_1"), images(64), "cross_entropy"),
    Model("torchvision", "VisionTransformer", _torchvision("VisionTransformer", **_VIT), images(32), "cross_entropy"),
    Model("torchvision", "SwinTransformer", _torchvision("SwinTransformer", **_SWIN), images(32), "cross_entropy"),
    Model("torchvision", "lraspp_mobilenet_v3_large", lambda: Segmenter("lraspp_mobilenet_v3_large"), segments, segment_loss),
    Model("torchvision", "ssdlite320_mobilenet_v3_large", lambda: Detector("ssdlite320_mobilenet_v3_large"), boxes, None),
]
# fmt: on


# -- timm and vit-pytorch -------------------------------------------------------------------------


def _timm(name: str, **kwargs: Any) -> Build:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, num_classes=5, **kwargs)

    return build


# fmt: off
_TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
TIMM = [
    Model("timm", name, _timm(name, **kwargs), images(side), "cross_entropy")
    for name, side, kwargs in [
        ("vit_tiny_patch16_224", 32, _TINY),
        ("eva02_tiny_patch14_224", 32, _TINY),
        ("convnext_atto", 64, {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}),
        ("mobilenetv3_small_050", 32, {}),
        ("swin_tiny_patch4_window7_224", 32, {"img_size": 32, "window_size": 4, "patch_size": 2, "embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2)}),
        ("tinynet_e", 32, {}),
        ("mobilevit_xxs", 64, {}),
        ("xcit_nano_12_p16_224", 32, {"img_size": 32, "depth": 2, "embed_dim": 16, "num_heads": 2}),
    ]
]
# fmt: on


def _vit_pytorch(module: str, name: str, **kwargs: Any) -> Build:
    def build() -> nn.Module:
        from importlib import import_module

        return getattr(import_module(f"vit_pytorch.{module}"), name)(num_classes=5, **kwargs)

    return build


# fmt: off
VIT_PYTORCH = [
    Model("vit-pytorch", "SimpleViT", _vit_pytorch("simple_vit", "SimpleViT", image_size=32, patch_size=8, dim=16, depth=2, heads=2, mlp_dim=32), images(32), "cross_entropy"),
    Model("vit-pytorch", "CCT", _vit_pytorch("cct", "CCT", img_size=32, embedding_dim=16, n_conv_layers=1, num_layers=2, num_heads=2, mlp_ratio=2.0, kernel_size=3, stride=2, padding=1, positional_embedding="learnable"), images(32), "cross_entropy"),
]
# fmt: on


# -- transformers: each with the batch of its own documentation, and its own loss -----------------


def _transformers(name: str, **config: Any) -> Build:
    def build() -> nn.Module:
        import transformers

        model = getattr(transformers, name)
        return model(model.config_class(**config))

    return build


def tokens(rng: Rng, length: int = 8, high: int = 60) -> dict[str, torch.Tensor]:
    ids = integers(rng, high - 4, length) + 4
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def classes_of_text(rng: Rng) -> Any:
    return {"labels": integers(rng, 3), **tokens(rng)}


def next_tokens(rng: Rng) -> Any:
    batch = tokens(rng)
    return {**batch, "labels": batch["input_ids"].clone()}


def translation(rng: Rng) -> Any:
    return {**tokens(rng), "labels": integers(rng, 56, 6) + 4}


def answers(rng: Rng) -> Any:
    return {**tokens(rng), "start_positions": integers(rng, 8), "end_positions": integers(rng, 8)}


def images_by_name(rng: Rng) -> Any:
    return {"pixel_values": floats(rng, 3, 32, 32), "labels": integers(rng, 3)}


def pairs(rng: Rng) -> Any:
    return {**tokens(rng), "pixel_values": floats(rng, 3, 32, 32), "return_loss": True}


def speech(rng: Rng) -> Any:
    return {"input_features": floats(rng, 8, 24), "labels": integers(rng, 56, 6) + 4}


def waves(rng: Rng) -> Any:
    return {"input_values": floats(rng, 400), "labels": integers(rng, 28, 3) + 2}


def series(rng: Rng) -> Any:
    time = {"past_time_features": floats(rng, 15, 1), "future_time_features": floats(rng, 4, 1)}
    seen = torch.ones(SIZE, 15)
    return {
        "past_values": floats(rng, 15),
        "past_observed_mask": seen,
        "future_values": floats(rng, 4),
        **time,
    }


# fmt: off
_TEXT = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BERT = {**_TEXT, "num_labels": 3}
_LLAMA = {**_TEXT, "num_key_value_heads": 1, "head_dim": 8}
_MOE = {**_LLAMA, "num_experts_per_tok": 2}
_IMAGE = {"image_size": 32, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "num_labels": 3}
_BART = {"vocab_size": 60, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None}
_T5 = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0, "pad_token_id": 0}
_GPT2 = {"vocab_size": 60, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_MAMBA = {"vocab_size": 60, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_CLIP = {"text_config": _TEXT, "vision_config": {**_IMAGE}, "projection_dim": 8}
_WHISPER = {**_BART, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 16, "begin_suppress_tokens": None, "suppress_tokens": None}
_WAV2VEC2 = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "conv_dim": (8, 8), "conv_kernel": (8, 4), "conv_stride": (4, 2), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "layerdrop": 0.0, "pad_token_id": 0}
_DEEPSEEK = {**_TEXT, "head_dim": 4, "num_key_value_heads": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
_SERIES = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2, 3, 4, 5, 6, 7], "num_time_features": 1, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
_SEGFORMER = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16, "num_labels": 3}
TRANSFORMERS = [
    Model("transformers", name, _transformers(name, **config), batch, **more)
    for name, config, batch, more in [
        ("BertForSequenceClassification", _BERT, classes_of_text, {}),
        ("BertForQuestionAnswering", _TEXT, answers, {}),
        ("RobertaForMaskedLM", _TEXT, next_tokens, {}),
        ("DebertaV2ForSequenceClassification", {**_BERT, "type_vocab_size": 0, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, classes_of_text, {}),
        ("AlbertForSequenceClassification", {**_BERT, "embedding_size": 8}, classes_of_text, {}),
        ("GPT2LMHeadModel", _GPT2, next_tokens, {}),
        ("LlamaForCausalLM", _LLAMA, next_tokens, {}),
        ("Gemma2ForCausalLM", _LLAMA, next_tokens, {}),
        ("MixtralForCausalLM", {**_MOE, "num_local_experts": 4}, next_tokens, {}),
        ("DeepseekV3ForCausalLM", _DEEPSEEK, next_tokens, {}),
        ("MambaForCausalLM", _MAMBA, next_tokens, {}),
        ("T5ForConditionalGeneration", _T5, translation, {}),
        ("BartForConditionalGeneration", _BART, translation, {}),
        ("ViTForImageClassification", _IMAGE, images_by_name, {}),
        ("SegformerForImageClassification", _SEGFORMER, images_by_name, {}),
        ("CLIPModel", _CLIP, pairs, {"shares": True}),
        ("WhisperForConditionalGeneration", _WHISPER, speech, {}),
        ("Wav2Vec2ForCTC", {**_WAV2VEC2, "ctc_loss_reduction": "mean"}, waves, {}),
        ("TimeSeriesTransformerForPrediction", _SERIES, series, {}),
    ]
]
# fmt: on


# -- torch_geometric and tensordict: batches that move by their own ``to`` ------------------------


class GraphClassifier(nn.Module):
    """A network of torch_geometric, called as in its documentation: with a ``Batch`` of graphs."""

    def __init__(self, name: str) -> None:
        super().__init__()
        from torch_geometric import nn as layers

        self.net = getattr(layers, name)(3, 8, num_layers=2, out_channels=2)

    def forward(self, graphs: Any) -> torch.Tensor:
        from torch_geometric.nn import global_mean_pool

        return global_mean_pool(self.net(graphs.x, graphs.edge_index), graphs.batch)

    def training_step(self, graphs: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self(graphs), graphs.y)


def _ring(rng: Rng) -> Any:
    from torch_geometric.data import Data

    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    x = torch.from_numpy(rng.normal(size=(4, 3)).astype("float32"))
    return Data(x=x, edge_index=edges, y=torch.from_numpy(rng.integers(2, size=1)))


def graphs(rng: Rng) -> Any:
    from torch_geometric.data import Batch

    return Batch.from_data_list([_ring(rng) for _ in range(SIZE)])


class HeteroClassifier(nn.Module):
    """Two kinds of nodes, with ``HeteroConv`` and ``SAGEConv`` of torch_geometric."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import HeteroConv, SAGEConv

        kinds = [("user", "rates", "item"), ("item", "rated_by", "user")]
        self.conv = HeteroConv({kind: SAGEConv((3, 3), 2) for kind in kinds})

    def forward(self, data: Any) -> torch.Tensor:
        return self.conv(data.x_dict, data.edge_index_dict)["user"]

    def training_step(self, data: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self(data), data["user"].y)


def hetero_graph(rng: Rng) -> Any:
    from torch_geometric.data import HeteroData

    data = HeteroData()
    data["user"].x, data["item"].x = floats(rng, 3), floats(rng, 3)
    data["user"].y = integers(rng, 2)
    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    data["user", "rates", "item"].edge_index = edges
    data["item", "rated_by", "user"].edge_index = edges.flip(0)
    return data


class TensorDictClassifier(nn.Module):
    """A ``TensorDictSequential``, with batches that are TensorDicts."""

    def __init__(self) -> None:
        super().__init__()
        from tensordict.nn import TensorDictModule, TensorDictSequential

        first = TensorDictModule(nn.Linear(3, 8), in_keys=["x"], out_keys=["hidden"])
        last = TensorDictModule(nn.Linear(8, 2), in_keys=["hidden"], out_keys=["logits"])
        self.net = TensorDictSequential(first, last)

    def forward(self, data: Any) -> torch.Tensor:
        return self.net(data)["logits"]

    def training_step(self, data: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self(data), data["y"])


def tensordict(rng: Rng) -> Any:
    from tensordict import TensorDict

    return TensorDict({"x": floats(rng, 3), "y": integers(rng, 2)}, batch_size=[SIZE])


# fmt: off
GRAPHS = [
    *[
        Model("torch_geometric", name, lambda name=name: GraphClassifier(name), graphs, None)
        for name in ("GCN", "GAT", "GraphSAGE", "GIN")
    ],
    Model("torch_geometric", "HeteroConv", HeteroClassifier, hetero_graph, None),
    Model("tensordict", "TensorDictSequential", TensorDictClassifier, tensordict, None),
]
# fmt: on


# -- diffusers and x-transformers -----------------------------------------------------------------


def _diffusers(name: str, **config: Any) -> Build:
    def build() -> nn.Module:
        import diffusers

        return getattr(diffusers, name)(**config)

    return build


def noisy_images(rng: Rng) -> Any:
    return {
        "sample": floats(rng, 3, 16, 16),
        "timestep": integers(rng, 1000),
        "y": floats(rng, 3, 16, 16),
    }


def noisy_images_of_text(rng: Rng) -> Any:
    return {**noisy_images(rng), "encoder_hidden_states": floats(rng, 5, 8)}


def reconstruction(rng: Rng) -> Any:
    image = floats(rng, 3, 16, 16)
    return {"sample": image, "y": image.clone()}


def latents(rng: Rng) -> Any:
    return {
        "hidden_states": floats(rng, 4, 8, 8),
        "timestep": integers(rng, 1000),
        "class_labels": integers(rng, 5),
        "y": floats(rng, 4, 8, 8),
    }


# fmt: off
_UNET = {"sample_size": 16, "in_channels": 3, "out_channels": 3, "layers_per_block": 1, "block_out_channels": (8, 16), "norm_num_groups": 4}
_VAE = {"in_channels": 3, "out_channels": 3, "block_out_channels": (8,), "down_block_types": ("DownEncoderBlock2D",), "up_block_types": ("UpDecoderBlock2D",), "latent_channels": 2, "norm_num_groups": 4}
DIFFUSERS = [
    Model("diffusers", "UNet2DModel", _diffusers("UNet2DModel", **_UNET, attention_head_dim=4, down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D")), noisy_images, mean_square),
    Model("diffusers", "UNet2DConditionModel", _diffusers("UNet2DConditionModel", **_UNET, attention_head_dim=4, cross_attention_dim=8, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D")), noisy_images_of_text, mean_square),
    Model("diffusers", "AutoencoderKL", _diffusers("AutoencoderKL", **_VAE), reconstruction, mean_square),
    Model("diffusers", "DiTTransformer2DModel", _diffusers("DiTTransformer2DModel", num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=1, sample_size=8, patch_size=2, num_embeds_ada_norm=1000, norm_num_groups=4), latents, mean_square),
]
# fmt: on


def _decoder(**options: Any) -> Any:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=16, depth=2, heads=2, attn_dim_head=8, **options)
    return TransformerWrapper(num_tokens=60, max_seq_len=16, attn_layers=layers)


def _autoregressive() -> nn.Module:
    from x_transformers import AutoregressiveWrapper

    return AutoregressiveWrapper(_decoder(rotary_pos_emb=True))


def _image_transformer() -> nn.Module:
    from x_transformers import Encoder, ViTransformerWrapper

    layers = Encoder(dim=16, depth=2, heads=2, attn_dim_head=8)
    return ViTransformerWrapper(image_size=32, patch_size=8, num_classes=5, attn_layers=layers)


def _identity(output: torch.Tensor) -> torch.Tensor:
    """Return the model's output, which is its loss."""
    return output


def next_token_loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.transpose(1, 2), y)


# fmt: off
X_TRANSFORMERS = [
    Model("x-transformers", "TransformerWrapper", lambda: _decoder(alibi_pos_bias=True), lambda rng: (integers(rng, 60, 8), integers(rng, 60, 8)), next_token_loss),
    Model("x-transformers", "AutoregressiveWrapper", _autoregressive, lambda rng: (integers(rng, 60, 9),), _identity),
    Model("x-transformers", "ViTransformerWrapper", _image_transformer, images(32), "cross_entropy"),
]
# fmt: on


# -- optimizers, each with one network ------------------------------------------------------------


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def vectors(rng: Rng) -> Any:
    return floats(rng, 6), integers(rng, 5)


def _optimizer(package: str, name: str, make: Any) -> Model:
    return Model(package, name, _mlp, vectors, "cross_entropy", optimizer=make)


def _of_torch(name: str, **kwargs: Any) -> Model:
    make = lambda net: getattr(torch.optim, name)(net.parameters(), **kwargs)  # noqa: E731
    return _optimizer("torch.optim", name, make)


def _of_timm(name: str) -> Model:
    def make(net: nn.Module) -> Any:
        from timm.optim import create_optimizer_v2

        return create_optimizer_v2(net, opt=name, lr=1e-3)

    return _optimizer("timm.optim", name, make)


# fmt: off
OPTIMIZERS = [
    _of_torch("SGD", lr=1e-2, momentum=0.9, nesterov=True),
    _of_torch("Adagrad", lr=1e-2),
    _of_torch("Adafactor", lr=1e-2),
    _of_torch("Rprop", lr=1e-3),
    _of_torch("LBFGS", lr=1e-1, max_iter=3),
    *[_of_timm(name) for name in ("lamb", "lion", "adopt", "nadamw", "lookahead_adamw")],
]

MODELS = [
    *TORCHVISION,
    *TIMM,
    *VIT_PYTORCH,
    *TRANSFORMERS,
    *GRAPHS,
    *DIFFUSERS,
    *X_TRANSFORMERS,
    *OPTIMIZERS,
]
# fmt: on
