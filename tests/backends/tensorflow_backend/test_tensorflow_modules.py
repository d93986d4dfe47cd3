"""``tf.Module``s and variables after ``place``: the same variables, with other memory."""

import gc
import weakref

import pytest
import tensorflow as tf
from d2ldev_conformance.data import room_for

from d2ldev import UnsupportedValueError, cpu, gpu


class Linear(tf.Module):
    """A module with a method under ``tf.function``."""

    def __init__(self):
        super().__init__()
        self.weight = tf.Variable([[2.0], [3.0]])
        self.scale = tf.constant(1.0)

    @tf.function(autograph=False)
    def __call__(self, x):
        return x @ self.weight * self.scale


class Holder(tf.Module):
    """A module with whatever it is given, in attributes."""

    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def on(device, value):
    with tf.device({"cpu": "/CPU:0", "gpu:0": "/CPU:1", "gpu:1": "/CPU:2"}[device]):
        return tf.Variable(value)


def test_a_method_that_was_traced_is_traced_again_after_the_move(tensorflow_backend):
    module = Linear()
    x = tf.constant([[1.0, 1.0]])
    assert float(module(x)[0, 0]) == 5
    tensorflow_backend.place(module, "gpu:1")
    module.weight.assign([[4.0], [5.0]])
    assert float(module(x)[0, 0]) == 9


def test_a_method_of_another_module_keeps_its_trace(tensorflow_backend):
    moved, other = Linear(), Linear()
    x = tf.constant([[1.0, 1.0]])
    moved(x), other(x)
    before = other.__call__
    tensorflow_backend.place(moved, "gpu:1")
    assert other.__call__ is before


def test_who_holds_a_variable_still_holds_it(tensorflow_backend):
    variable = on("cpu", [1.0, 2.0])
    held = {"v": variable}
    tensorflow_backend.place(variable, "gpu:1")
    held["v"].assign_add([1.0, 1.0])
    assert variable.numpy().tolist() == [2, 3]
    assert tensorflow_backend.device_of(held["v"]) is gpu(1)


@pytest.mark.parametrize(
    "dtype", ["float32", "int32", "int64", "bool", "bfloat16", "complex64", "float8_e5m2"]
)
def test_a_variable_of_every_dtype_moves_with_its_values(tensorflow_backend, dtype):
    with tf.device("/CPU:0"):
        variable = tf.Variable(tensorflow_backend.ones((2, 3), dtype=dtype))
    tensorflow_backend.place(variable, "gpu:0")
    assert tensorflow_backend.device_of(variable) is gpu(0)
    assert tensorflow_backend.to_numpy(variable).tolist() == [[1, 1, 1], [1, 1, 1]]


def test_a_variable_keeps_its_name_its_shape_and_whether_it_is_trained(tensorflow_backend):
    variable = tf.Variable([1.0], name="w", trainable=False, shape=tf.TensorShape([None]))
    before = (variable.name, variable.trainable, variable.shape, variable._unique_id)
    tensorflow_backend.place(variable, "gpu:1")
    after = (variable.name, variable.trainable, variable.shape, variable._unique_id)
    assert after[:2] == before[:2]
    assert after[2].as_list() == before[2].as_list()
    assert after[3] == before[3]
    variable.assign([1.0, 2.0, 3.0])
    assert variable.numpy().tolist() == [1, 2, 3]


def test_a_moved_variable_is_watched_by_a_tape(tensorflow_backend):
    variable = tensorflow_backend.place(tf.Variable(3.0), "gpu:1")
    with tf.GradientTape() as tape:
        y = variable * variable
    assert float(tape.gradient(y, variable)) == 6


def test_a_moved_variable_is_written_in_every_way(tensorflow_backend):
    variable = tensorflow_backend.place(tf.Variable([1.0, 2.0, 3.0]), "gpu:1")
    variable.assign_sub([1.0, 1.0, 1.0])
    variable.scatter_nd_update([[0]], [9.0])
    variable[1:2].assign([7.0])
    assert variable.numpy().tolist() == [9, 7, 2]
    assert tensorflow_backend.device_of(variable) is gpu(1)


def test_the_memory_on_the_old_device_is_given_back(tensorflow_backend):
    variable = tf.Variable(tf.ones(1000))
    old = variable.handle
    tensorflow_backend.place(variable, "gpu:0")
    left = tf.raw_ops.ReadVariableOp(resource=old, dtype=tf.float32)
    assert left.shape == (0,)


def test_a_moved_variable_ends_with_its_last_holder(tensorflow_backend):
    variable = tf.Variable([1.0])
    tensorflow_backend.place(variable, "gpu:1")
    ended = weakref.ref(variable)
    del variable
    gc.collect()
    assert ended() is None


def test_ties_survive(tensorflow_backend):
    variable = on("cpu", [1.0])
    module = Holder(a=variable, b=[variable], c=Holder(d=variable))
    tensorflow_backend.place(module, "gpu:1")
    assert module.a is module.b[0] is module.c.d is variable


def test_tensors_in_wrapped_containers_are_replaced_in_them(tensorflow_backend):
    x = tf.ones(2)
    module = Holder(
        mapping={"x": x, "inner": {"y": (x, [x])}}, pair=(x, on("cpu", 1.0)), names=["a", x]
    )
    tensorflow_backend.place(module, "gpu:0")
    found = [module.mapping["x"], module.mapping["inner"]["y"][0], module.pair[0], module.names[1]]
    assert {tensorflow_backend.device_of(each) for each in found} == {gpu(0)}
    assert len({id(each) for each in found}) == 1
    assert module.names[0] == "a"


def test_a_moved_module_is_tracked_as_before(tensorflow_backend, tmp_path):
    module = Holder(mapping={"x": tf.ones(2), "v": on("cpu", 1.0)}, pair=(tf.ones(1), {"w": 2}))
    tensorflow_backend.place(module, "gpu:1")
    module.mapping["new"] = tf.Variable(5.0)
    path = tf.train.Checkpoint(m=module).save(str(tmp_path / "m"))
    names = [name for name, _ in tf.train.list_variables(path)]
    assert any("mapping/new" in name for name in names)
    assert len(module.variables) == 2


def test_strings_in_a_module_stay_on_the_host(tensorflow_backend):
    module = Holder(words=tf.constant(["a"]), seen=tf.Variable(["b"]), weight=tf.Variable(1.0))
    tensorflow_backend.place(module, "gpu:0")
    assert tensorflow_backend.placement(module) == {"weight": gpu(0)}
    assert module.seen.numpy().tolist() == [b"b"]


def test_a_variable_of_strings_has_no_place_on_a_gpu(tensorflow_backend):
    variable = tf.Variable(["a"])
    with pytest.raises(UnsupportedValueError, match="string"):
        tensorflow_backend.place({"v": variable}, "gpu:0")
    assert tensorflow_backend.device_of(variable) is cpu()


def test_a_generator_goes_on_with_its_numbers(tensorflow_backend):
    moved, twin = (tf.random.Generator.from_seed(3) for _ in range(2))
    moved.normal((2,)), twin.normal((2,))
    tensorflow_backend.place(moved, "gpu:1")
    assert moved.normal((3,)).numpy().tolist() == twin.normal((3,)).numpy().tolist()
    assert tensorflow_backend.device_of(moved.state) is gpu(1)


def test_a_failure_leaves_variables_and_tensors_where_they_were(tensorflow_backend, monkeypatch):
    module = Holder(a=on("cpu", [1.0]), b=tf.ones(1), c=on("cpu", [2.0]))
    room = room_for(2, tensorflow_backend._copy_all)
    monkeypatch.setattr(tensorflow_backend, "_copy_all", room)
    with pytest.raises(MemoryError):
        tensorflow_backend.place(module, "gpu:1")
    assert set(tensorflow_backend.placement(module).values()) == {cpu()}
    assert [module.a.numpy().tolist(), module.c.numpy().tolist()] == [[1], [2]]


def test_a_moved_module_is_exported(tensorflow_backend, tmp_path):
    module = Linear()
    tensorflow_backend.place(module, "gpu:1")
    x = tf.constant([[1.0, 1.0]])
    module(x)
    tf.saved_model.save(module, str(tmp_path / "module"))
    again = tf.saved_model.load(str(tmp_path / "module"))
    assert float(again(x)[0, 0]) == 5


def test_a_moved_variable_s_handle_says_whose_it_is(tensorflow_backend):
    variable = tf.Variable([1.0], name="w")
    before = vars(variable.handle)
    tensorflow_backend.place(variable, "gpu:1")
    assert vars(variable.handle) == before
    assert variable.handle._parent_trackable() is variable
