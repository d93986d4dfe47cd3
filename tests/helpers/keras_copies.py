"""What holds for copies of Keras models on each framework that Keras computes with."""

import keras
import numpy as np
import pytest

from d2ldev import UnsupportedValueError


def make_changed_model():
    layers = keras.layers.Dense(2), keras.layers.Dropout(0.5), keras.layers.Dropout(0.1)
    net = keras.Sequential([keras.Input((3,)), *layers])
    net.layers[2].rate = 0.0  # a layer that is made so has no seed
    return net


def check_copies_of_a_changed_model(backend):
    """Check that ``replicate`` names the lacking variable, and that its fix works."""
    model, devices = make_changed_model(), ["gpu:0", "gpu:1"]
    with pytest.raises(UnsupportedValueError, match="replicate") as error:
        backend.replicate(model, devices)
    told = f"the copy of {model.layers[2].name} lacks seed_generator_state"
    assert told in error.value.problem
    assert "copy.set_weights(model.get_weights()); backend.place(copy, device)" in error.value.fix
    for device in devices:
        copy = make_changed_model()
        copy.set_weights(model.get_weights())
        backend.place(copy, device)
        for value, wanted in zip(copy.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(value, wanted)
        assert set(backend.placement(copy).values()) == {backend.device(device)}
