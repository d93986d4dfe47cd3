"""The models of Keras in the zoo. ``MODELS`` is the table."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from zoo import SIZE, Batch, Build, Model

Rng = np.random.Generator
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
MEAN_SQUARE = keras.losses.MeanSquaredError()


def floats(rng: Rng, *shape: int) -> np.ndarray:
    return rng.normal(size=(SIZE, *shape)).astype("float32")


def integers(rng: Rng, high: int, *shape: int) -> np.ndarray:
    return rng.integers(high, size=(SIZE, *shape)).astype("int32")


def images(side: int) -> Batch:
    """Return a maker of batches of images, each with one of five classes."""
    return lambda rng: (floats(rng, side, side, 3), integers(rng, 5))


def _mobile_net() -> Any:
    options = {"weights": None, "classes": 5, "classifier_activation": None, "dropout": 0.0}
    return keras.applications.MobileNet((32, 32, 3), alpha=0.25, **options)


# fmt: off
APPLICATIONS = [Model("keras.applications", "MobileNet", _mobile_net, images(32), CROSS_ENTROPY)]
# fmt: on


# -- keras_hub ------------------------------------------------------------------------------------


def _hub(name: str, **config: Any) -> Build:
    def build() -> Any:
        import keras_hub

        return getattr(keras_hub.models, name)(**config)

    return build


def _classifier(name: str, backbone: Build) -> Build:
    def build() -> Any:
        import keras_hub

        make = getattr(keras_hub.models, name)
        return make(
            backbone=backbone(), num_classes=5, preprocessor=None, activation=None, dropout=0.0
        )

    return build


def _language_model(name: str, backbone: Build) -> Build:
    def build() -> Any:
        import keras_hub

        return getattr(keras_hub.models, name)(backbone=backbone(), preprocessor=None)

    return build


def tokens(rng: Rng, prefix: str = "") -> dict[str, np.ndarray]:
    ids = integers(rng, 60, 8)
    return {f"{prefix}token_ids": ids, f"{prefix}padding_mask": np.ones_like(ids)}


def features(rng: Rng) -> Any:
    return {**tokens(rng), "y": floats(rng, 8, 16)}


def pairs_of_features(rng: Rng) -> Any:
    return {"segment_ids": integers(rng, 2, 8), **tokens(rng), "y": integers(rng, 5)}


def classes_of_text(rng: Rng) -> Any:
    return {**tokens(rng), "y": integers(rng, 5)}


def next_tokens(rng: Rng) -> Any:
    return {**tokens(rng), "y": integers(rng, 60, 8)}


def decoder_loss(output: Any, y: Any) -> Any:
    return MEAN_SQUARE(y, output["decoder_sequence_output"])


def translation(rng: Rng) -> Any:
    return {**tokens(rng, "encoder_"), **tokens(rng, "decoder_"), "y": floats(rng, 8, 16)}


# fmt: off
_TEXT = {"vocabulary_size": 60, "num_layers": 1, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32, "dropout": 0.0, "max_sequence_length": 16}
_LLAMA = {"vocabulary_size": 60, "num_layers": 1, "num_query_heads": 2, "num_key_value_heads": 1, "hidden_dim": 16, "intermediate_dim": 32, "dropout": 0.0}
_GEMMA = {**_LLAMA, "head_dim": 8}
_T5 = {"vocabulary_size": 60, "num_layers": 1, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32, "dropout": 0.0, "key_value_dim": 8}
_VIT = {"image_shape": (32, 32, 3), "patch_size": 8, "num_layers": 1, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
HUB = [
    Model("keras_hub", "BertTextClassifier", _classifier("BertTextClassifier", _hub("BertBackbone", **_TEXT)), pairs_of_features, CROSS_ENTROPY),
    Model("keras_hub", "DistilBertTextClassifier", _classifier("DistilBertTextClassifier", _hub("DistilBertBackbone", **_TEXT)), classes_of_text, CROSS_ENTROPY),
    Model("keras_hub", "RobertaBackbone", _hub("RobertaBackbone", **_TEXT), features, MEAN_SQUARE),
    Model("keras_hub", "GPT2CausalLM", _language_model("GPT2CausalLM", _hub("GPT2Backbone", **_TEXT)), next_tokens, CROSS_ENTROPY),
    Model("keras_hub", "LlamaBackbone", _hub("LlamaBackbone", **_LLAMA), features, MEAN_SQUARE),
    Model("keras_hub", "GemmaBackbone", _hub("GemmaBackbone", **_GEMMA), features, MEAN_SQUARE),
    Model("keras_hub", "T5Backbone", _hub("T5Backbone", **_T5), translation, decoder_loss),
    Model("keras_hub", "BartBackbone", _hub("BartBackbone", **_TEXT), translation, decoder_loss),
    Model("keras_hub", "ViTImageClassifier", _classifier("ViTImageClassifier", _hub("ViTBackbone", **_VIT)), images(32), CROSS_ENTROPY),
]
# fmt: on


# -- several inputs and outputs, as Keras's own guides build them ---------------------------------


def _two_inputs() -> Any:
    title, body = keras.Input((4,), name="title"), keras.Input((6,), name="body")
    joined = keras.layers.concatenate([title, body])
    return keras.Model([title, body], keras.layers.Dense(5)(joined))


def two_inputs(rng: Rng) -> Any:
    return {"body": floats(rng, 6), "title": floats(rng, 4), "y": integers(rng, 5)}


def _recurrent() -> Any:
    layers = [keras.Input((None,)), keras.layers.Embedding(60, 8, mask_zero=True)]
    layers += [keras.layers.Bidirectional(keras.layers.LSTM(8)), keras.layers.Dense(5)]
    return keras.Sequential(layers)


# fmt: off
GUIDES = [
    Model("keras", "two inputs", _two_inputs, two_inputs, CROSS_ENTROPY),
    Model("keras", "Bidirectional LSTM", _recurrent, lambda rng: (integers(rng, 60, 8), integers(rng, 5)), CROSS_ENTROPY),
]
# fmt: on


# -- the optimizers, each with one model ----------------------------------------------------------


def _optimizer(name: str, **kwargs: Any) -> Model:
    make = lambda _: getattr(keras.optimizers, name)(learning_rate=1e-3, **kwargs)  # noqa: E731
    return GUIDES[0]._replace(package="keras.optimizers", name=name, optimizer=make)


# fmt: off
OPTIMIZERS = [
    _optimizer("SGD", momentum=0.9, nesterov=True),
    _optimizer("RMSprop", centered=True),
    _optimizer("Lion"),
    _optimizer("Adafactor"),
    _optimizer("Ftrl"),
    _optimizer("Muon"),
]

MODELS = [*APPLICATIONS, *HUB, *GUIDES, *OPTIMIZERS]
# fmt: on
