"""The table for those who come from Keras."""

import keras
import numpy as np
import tensorflow as tf
from coming_from import find_unknown, read_rows, run_our_lines


def test_our_lines_run(tmp_path):
    run_our_lines("tensorflow", "Keras 3", folder=tmp_path)


def test_the_lines_of_keras_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(loss="mse")
    names = {"keras": keras, "rows": [[1.0]], "x": keras.ops.ones(2), "model": model}
    arrays = np.ones((8, 2), "float32"), np.zeros(8)
    names["batches"] = tf.data.Dataset.from_tensor_slices(arrays).batch(4)
    policy, looked_up = keras.config.dtype_policy(), 0
    for code, _ in read_rows("Keras 3"):
        if "gpu:" in code or "seed" in code:  # there is none, or it would seed the next tests
            looked_up += 1
            assert find_unknown(code, {"keras": keras}) == []
        else:
            exec(code, dict(names))
    keras.config.set_dtype_policy(policy)
    assert looked_up == 2
