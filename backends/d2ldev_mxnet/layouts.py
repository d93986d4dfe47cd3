"""The layers of a Gluon sequence: Gluon's layouts are the canonical ones."""

from __future__ import annotations

from typing import Any

from d2ldev.files.layers import Layer
from d2ldev_mxnet.framework import mx
from d2ldev_mxnet.mlp import NumPySequential

_nn = mx.gluon.nn
_SEQUENCES = (_nn.Sequential, _nn.HybridSequential, NumPySequential)
_CONVOLUTIONS = (_nn.Conv1D, _nn.Conv2D, _nn.Conv3D)
_FUNCTIONS = (_nn.Lambda, _nn.HybridLambda)
_LAYOUTS = {"NCW", "NCHW", "NCDHW"}


def layers_of(model: Any) -> list[Layer] | None:
    """The dense and convolution layers of a model in one sequence; None for another model."""
    if type(model) not in _SEQUENCES:
        return None
    layers = []
    for layer in model._children.values():
        if type(layer) is _nn.Dense or type(layer) in _CONVOLUTIONS:
            layout = getattr(layer, "_kwargs", {}).get("layout", "NCHW")
            if layout not in _LAYOUTS:
                return None
            layers.append(Layer(_array(layer.weight), _array(layer.bias)))
        elif not _keeps_order(layer):
            return None  # it may put what it is given into another order
    return layers


def _keeps_order(layer: Any) -> bool:
    is_gluon_s = type(layer).__module__.startswith("mxnet.gluon.nn.")
    return is_gluon_s and not layer._children and not isinstance(layer, _FUNCTIONS)


def _array(parameter: Any) -> Any:
    """The one array of a parameter; None if it has none yet, or several."""
    arrays = [] if parameter is None else parameter._data or []
    return arrays[0] if len(arrays) == 1 else None
