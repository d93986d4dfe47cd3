"""What a log refuses of TensorFlow's scalars."""

import pytest
import tensorflow as tf

from d2ldev import DeviceLog, UnsupportedValueError


def test_a_traced_scalar_is_refused_with_what_to_do(tensorflow_backend):
    log = DeviceLog(tensorflow_backend)

    @tf.function(autograph=False)
    def step(x):
        log.add(loss=tf.reduce_sum(x))
        return x

    with pytest.raises(UnsupportedValueError, match="log loss") as caught:
        step(tf.ones(2))
    assert caught.value.fix == "return loss from what is compiled, and log what it returns"
    assert log.flush() == {}


def test_the_value_of_a_variable_is_the_one_it_had(tensorflow_backend):
    log = DeviceLog(tensorflow_backend, "gpu:0")
    with tensorflow_backend.on("gpu:0"):
        variable = tf.Variable(1.0)
        log.add(loss=variable)
        variable.assign(2.0)
    assert log.last() == {"loss": 1.0}
