"""strict() on MXNet: operators, functions and methods of arrays that are on different devices."""

import operator

import numpy
import pytest
from d2ldev_mxnet.framework import mx
from d2ldev_mxnet.strict_library import _COPIES

from d2ldev import DeviceMismatchError, cpu, gpu

pytestmark = pytest.mark.usefixtures("set_np")
np, nd = mx.np, mx.nd


def array(index, shape=(3, 3)):
    return np.ones(shape, ctx=mx.cpu(index))


def legacy(index, shape=(3, 3)):
    return nd.ones(shape, ctx=mx.cpu(index))


NUMPY_PAIRS = (
    *("add", "append", "arctan2", "broadcast_arrays", "copysign", "divide", "divmod", "dot"),
    *("equal", "float_power", "greater", "greater_equal", "heaviside", "hypot", "inner"),
    *("ldexp", "less", "less_equal", "matmul", "maximum", "meshgrid", "minimum", "mod"),
    *("multiply", "not_equal", "outer", "power", "remainder", "subtract", "take", "tensordot"),
    *("true_divide", "vdot"),
)
NUMPY_LISTS = (
    *("column_stack", "concatenate", "dstack", "hstack", "row_stack", "stack", "vstack"),
)
LEGACY_PAIRS = (
    *("Concat", "ElementWiseSum", "LinearRegressionOutput", "LogisticRegressionOutput"),
    *("MAERegressionOutput", "SoftmaxOutput", "add", "add_n", "broadcast_add", "broadcast_div"),
    *("broadcast_equal", "broadcast_greater", "broadcast_greater_equal", "broadcast_hypot"),
    *("broadcast_lesser", "broadcast_lesser_equal", "broadcast_like", "broadcast_logical_and"),
    *("broadcast_logical_or", "broadcast_logical_xor", "broadcast_maximum"),
    *("broadcast_minimum", "broadcast_mod", "broadcast_mul", "broadcast_not_equal"),
    *("broadcast_power", "broadcast_sub", "concat", "divide", "dot", "elemwise_add"),
    *("elemwise_div", "elemwise_mul", "elemwise_sub", "equal", "greater", "greater_equal"),
    *("khatri_rao", "lesser", "lesser_equal", "linalg_gemm2", "linalg_trmm", "linalg_trsm"),
    *("logical_and", "logical_or", "logical_xor", "maximum", "minimum", "modulo", "multiply"),
    *("not_equal", "power", "reshape_like", "slice_like", "stack", "subtract", "take"),
    *("true_divide",),
)
UNARY = (
    *("abs", "cos", "exp", "floor", "log", "negative", "relu", "rint", "sigmoid", "sign"),
    *("sin", "sqrt", "square", "tanh"),
)
OPERATORS = (
    *("add", "sub", "mul", "truediv", "mod", "pow", "eq", "ne", "lt", "le", "gt", "ge", "iadd"),
    *("isub", "imul", "itruediv", "imod"),
)


def mixed(backend, call, *operands):
    """The error of a call in a strict block; the same call outside of it is none."""
    call(*operands)
    return refused(backend, call, *operands)


def refused(backend, call, *operands):
    """The error of a call in a strict block."""
    with backend.strict(), pytest.raises(DeviceMismatchError) as caught:
        call(*operands)
    return caught.value


@pytest.mark.parametrize("name", NUMPY_PAIRS)
def test_a_function_of_np_with_operands_on_two_gpus_is_refused(backend, name):
    error = mixed(backend, getattr(np, name), array(1), array(2))
    assert error.devices == ("gpu:0", "gpu:1")


@pytest.mark.parametrize("name", NUMPY_LISTS)
def test_a_function_of_np_with_a_list_on_two_gpus_is_refused(backend, name):
    error = mixed(backend, getattr(np, name), [array(1), array(2)])
    assert error.devices == ("gpu:0", "gpu:1")


@pytest.mark.parametrize("name", LEGACY_PAIRS)
def test_a_legacy_operator_with_operands_on_two_gpus_is_refused(backend, name):
    error = mixed(backend, getattr(nd, name), legacy(1), legacy(2))
    assert error.devices == ("gpu:0", "gpu:1")


@pytest.mark.parametrize("name", UNARY)
def test_an_output_on_another_device_is_refused(backend, name):
    error = mixed(backend, lambda x, y: getattr(nd, name)(x, out=y), legacy(1), legacy(2))
    assert error.devices == ("gpu:0", "gpu:1")


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("make", [array, legacy])
def test_an_operator_of_python_is_refused(backend, name, make):
    error = mixed(backend, getattr(operator, name), make(1), make(2))
    assert error.devices == ("gpu:0", "gpu:1")


@pytest.mark.parametrize(
    ("call", "operation"),
    [
        (lambda x, y: np.einsum("ij,jk->ik", x, y), "einsum"),
        (lambda x, y: np.where(x > 0, x, y), "where"),
        (lambda x, y: np.add(x, x, out=y), "add"),
        (lambda x, y: mx.npx.pick(x, y[0]), "pick"),
        (lambda x, y: mx.npx.fully_connected(x, y, None, num_hidden=3, no_bias=True), None),
        (lambda x, y: mx.npx.reshape_like(x, y), "reshape_like"),
        (lambda x, y: x.dot(y), "dot"),
        (lambda x, y: np.linalg.solve(x + np.eye(3, ctx=x.ctx), y), "solve"),
        (lambda x, y: np.random.normal(x, y), None),
        (lambda x, y: numpy.add(x, y), "add"),
        (lambda x, y: numpy.concatenate([x, y]), "concatenate"),
        (lambda x, y: numpy.logaddexp(x, y), "logaddexp"),
    ],
)
def test_other_functions_of_np_are_refused_by_name(backend, call, operation):
    error = mixed(backend, call, array(1), array(2))
    assert f"cannot run {operation or ''}" in str(error)


@pytest.mark.parametrize(
    ("call", "operation"),
    [
        (lambda x, y: nd.concatenate([x, y]), "__setitem__"),
        (lambda x, y: nd.concatenate([x, y], axis=1), "slice_assign"),
        (lambda x, y: x.broadcast_like(y), "broadcast_like"),
        (lambda x, y: nd.sparse.dot(x.tostype("csr"), y), "dot"),
        (lambda x, y: nd.contrib.allclose(x, y), "allclose"),
        (lambda x, y: nd.sgd_update(x, y, lr=0.1), "sgd_update"),
        (lambda x, y: nd.random.normal(x, y), "sample_normal"),
    ],
)
def test_other_legacy_functions_are_refused_by_name(backend, call, operation):
    error = mixed(backend, call, legacy(1), legacy(2))
    assert f"cannot run {operation}: " in str(error)


@pytest.mark.parametrize("make", [array, legacy])
@pytest.mark.parametrize("key", [slice(None), 0, (slice(None), 1), [0, 2]], ids=str)
def test_a_value_from_elsewhere_cannot_be_assigned(backend, make, key):
    x = make(1)
    error = refused(backend, lambda: operator.setitem(x, key, make(2)[key]))
    assert "x on gpu:0, value on gpu:1" in str(error)


@pytest.mark.parametrize("make", [array, legacy])
def test_an_index_from_elsewhere_is_refused(backend, make):
    x, index = make(1), make(2)[0].astype("int32")
    assert "index on gpu:1" in str(refused(backend, lambda: x[index]))
    assert "index" in str(refused(backend, lambda: x[index, 0:2]))
    assert "index on gpu:1" in str(refused(backend, lambda: operator.setitem(x, index, 2)))


def test_what_numpy_computes_is_refused(backend):
    error = refused(backend, numpy.histogram2d, array(1, (3,)), array(2, (3,)))
    assert "cannot run histogram2d" in str(error)


def test_what_numpy_computes_stays_where_its_operands_are(backend):
    with backend.strict():
        results = [*numpy.divmod(array(2), array(2)), *numpy.histogram(array(2))]
    assert {backend.device_of(x) for x in results} == {gpu(1)}


def test_a_mask_from_elsewhere_is_refused(backend):
    x, mask = array(1), array(2) > 0
    assert "index on gpu:1" in str(refused(backend, lambda: x[mask]))
    assert "index on gpu:1" in str(refused(backend, lambda: operator.setitem(x, mask, 2)))


def test_a_refused_operation_in_place_changes_nothing(backend):
    x = array(1)
    with backend.strict():
        with pytest.raises(DeviceMismatchError):
            x += array(2)
        with pytest.raises(DeviceMismatchError):
            x[:] = array(2) + 1
    assert (x.asnumpy() == 1).all()


def test_every_operator_of_the_library_is_refused(backend):
    invoke = mx.nd._internal._imperative_invoke
    names = [name for name in mx.operator.get_all_registered_operators() if name not in _COPIES]
    passed = []
    with backend.strict():
        for name in names:
            handle = mx.base.OpHandle()
            mx.base.check_call(
                mx.base._LIB.NNGetOpHandle(name.encode(), mx.base.ctypes.byref(handle))
            )
            try:
                invoke(handle.value, [array(1), array(2)], [], [], None, True, False)
            except DeviceMismatchError:
                continue
            passed.append(name)
    assert len(names) > 1000
    assert passed == []


def test_the_message_names_operands_as_the_operator_does(backend):
    error = refused(backend, lambda x, y: x - y, array(2), array(1))
    assert str(error) == (
        "cannot run subtract: its operands are on different devices: lhs on gpu:1, rhs on gpu:0\n"
        "  devices: gpu:1, gpu:0\n"
        "  fix: rhs = backend.to(rhs, 'gpu:1')"
    )


def test_the_cpu_and_a_virtual_gpu_do_not_mix(backend):
    assert refused(backend, operator.add, array(0), array(1)).devices == ("cpu", "gpu:0")


def test_a_0_dim_array_of_the_host_is_an_operand_as_on_hardware(backend):
    assert refused(backend, operator.add, array(1), array(0, ())).devices == ("gpu:0", "cpu")


@pytest.mark.parametrize("scalar", [2, 2.0, True, numpy.float32(2)])
def test_a_number_is_no_operand(backend, scalar):
    with backend.strict():
        assert backend.device_of(array(2) * scalar) is gpu(1)


@pytest.mark.parametrize("name", [n for n in NUMPY_PAIRS if n != "take"])
def test_operands_that_agree_give_what_they_gave(backend, name):
    x, y = (
        backend.rand((3, 3), seed=0, device="gpu:1"),
        backend.rand((3, 3), seed=1, device="gpu:1"),
    )
    plain = getattr(np, name)(x, y)
    with backend.strict():
        strict = getattr(np, name)(x, y)
    outputs = [(a, b) for a, b in zip(as_list(plain), as_list(strict), strict=True)]
    assert all((backend.to_numpy(a) == backend.to_numpy(b)).all() for a, b in outputs)
    assert {backend.device_of(b) for _, b in outputs} == {gpu(1)}


def as_list(x):
    return x if isinstance(x, (list, tuple)) else [x]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.copyto(mx.cpu(2)),
        lambda x: x.copyto(array(2)),
        lambda x: x.as_in_ctx(mx.cpu(2)),
        lambda x: x.as_nd_ndarray().as_in_context(mx.cpu(2)),
        lambda x: np.array(x, ctx=mx.cpu(2)),
        lambda x: np.full((2,), 3, ctx=mx.cpu(2)),
        lambda x: np.random.uniform(size=(2,), ctx=mx.cpu(2)),
    ],
)
def test_what_is_told_a_context_works(backend, make):
    with backend.strict():
        assert backend.device_of(make(array(1))) is gpu(1)


def test_d2ldev_s_own_moves_work(backend):
    x = array(1)
    with backend.strict():
        assert backend.device_of(backend.to({"x": x}, "gpu:1")["x"]) is gpu(1)
        assert backend.device_of(backend.copy(x, device="cpu")) is cpu()
        assert backend.device_of(backend.asarray([1, 2], device="gpu:1")) is gpu(1)
        assert backend.to_numpy(x).sum() == 9


def test_contexts_that_are_one_device_mix(hardware):
    with hardware.strict():
        assert (array(0) + array(1)).asnumpy().sum() == 18
