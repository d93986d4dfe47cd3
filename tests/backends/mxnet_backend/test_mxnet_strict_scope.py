"""strict() on MXNet: where it is in force, and what is in place when it is not."""

import asyncio
import operator
import os
import subprocess
import sys
import threading

import pytest
from d2ldev_mxnet.backend import MXNetBackend
from d2ldev_mxnet.framework import mx
from d2ldev_mxnet.strict_backward import guarded_backward
from d2ldev_mxnet.strict_errors import translating
from d2ldev_mxnet.strict_library import guarded_library
from d2ldev_mxnet.strict_python import guarded_functions

from d2ldev import DeviceMismatchError, UnsupportedValueError


def array(index):
    return mx.np.ones((2,), ctx=mx.cpu(index))


def mix():
    return array(1) + array(2)


def is_refused():
    try:
        mix()
    except DeviceMismatchError:
        return True
    return False


@pytest.fixture
def places(backend):
    """Every object and name that strictness replaces something at."""
    guards = (guarded_library, guarded_functions, guarded_backward, translating)
    return [(owner, name) for guard in guards for owner, name, _ in guard(backend)]


@pytest.fixture
def in_place(places):
    """What is at these places, to be compared by identity."""
    return lambda: [vars(owner)[name] for owner, name in places]


def same(before, after):
    return all(a is b for a, b in zip(before, after, strict=True))


def test_everything_is_replaced_in_a_block(backend, in_place):
    before = in_place()
    with backend.strict():
        inside = in_place()
    assert not any(a is b for a, b in zip(before, inside, strict=True))


def test_the_very_functions_are_back_after_a_block(backend, in_place):
    before = in_place()
    with backend.strict():
        pass
    assert same(before, in_place())


def test_they_are_back_after_an_error(backend, in_place):
    before = in_place()
    with pytest.raises(DeviceMismatchError), backend.strict():
        mix()
    assert same(before, in_place())


def test_they_are_back_after_the_outermost_of_nested_blocks(backend, in_place):
    before = in_place()
    with backend.strict():
        with backend.strict():
            pass
        assert is_refused()
    assert same(before, in_place())


def test_they_are_back_when_blocks_of_threads_overlap(backend, in_place):
    before = in_place()
    entered, done = threading.Event(), threading.Event()

    def other():
        with backend.strict():
            entered.set()
            done.wait(10)

    thread = threading.Thread(target=other)
    with backend.strict():
        thread.start()
        assert entered.wait(10)
    assert not same(before, in_place())
    done.set()
    thread.join()
    assert same(before, in_place())


def test_they_are_back_after_a_generator_is_closed(backend, in_place):
    before = in_place()

    def generate():
        with backend.strict():
            yield is_refused()

    generator = generate()
    assert next(generator)
    generator.close()
    assert same(before, in_place())


def test_two_backends_are_strict_at_once(backend, in_place):
    before = in_place()
    other = MXNetBackend(virtual_gpus=2)
    with backend.strict(), other.strict():
        assert is_refused()
    assert same(before, in_place())


def test_another_thread_is_as_before(backend):
    found = []
    with backend.strict():
        thread = threading.Thread(target=lambda: found.append(is_refused()))
        thread.start()
        thread.join()
    assert found == [False]


def test_tasks_have_blocks_of_their_own(backend):
    async def strict():
        with backend.strict():
            await asyncio.sleep(0)
            return is_refused()

    async def free():
        await asyncio.sleep(0)
        return is_refused()

    async def both():
        return await asyncio.gather(strict(), free(), strict())

    assert asyncio.run(both()) == [True, False, True]


def test_many_threads_mix_and_are_refused(backend):
    found = []

    def work(is_strict):
        for _ in range(50):
            if is_strict:
                with backend.strict():
                    found.append(is_refused() is True)
            else:
                found.append(is_refused() is False)

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 300
    assert all(found)


def test_functions_that_were_imported_before_are_refused(backend):
    from mxnet.ndarray import concat
    from mxnet.numpy import add, meshgrid

    legacy = [mx.nd.ones((2,), ctx=mx.cpu(i)) for i in (1, 2)]
    with backend.strict():
        for call, operands in ((concat, legacy), (add, (array(1), array(2)))):
            with pytest.raises(DeviceMismatchError):
                call(*operands)
        with pytest.raises(DeviceMismatchError):
            meshgrid(array(1), array(2))


@pytest.mark.filterwarnings("ignore:Please import:DeprecationWarning")
def test_legacy_arrays_are_made_of_others(backend):
    x = mx.nd.ones((2,), ctx=mx.cpu(1))
    with backend.strict():
        assert mx.nd.array(x, ctx=mx.cpu(2)).ctx == mx.cpu(2)


def test_compiled_cython_modules_are_an_error(backend, monkeypatch, in_place):
    before = in_place()
    monkeypatch.setattr(mx.nd._internal._imperative_invoke, "__module__", "mxnet._cy3.ndarray")
    with pytest.raises(UnsupportedValueError, match="MXNET_ENABLE_CYTHON=0"), backend.strict():
        mix()
    assert same(before, in_place())


STRICT = """
import threading
import d2ldev
backend = d2ldev.get_backend("mxnet")
x, y = backend.ones(2, device="gpu:0"), backend.ones(2, device="gpu:1")
def refused():
    try:
        x + y
    except d2ldev.DeviceMismatchError:
        print("refused")
refused()
thread = threading.Thread(target=refused)
thread.start()
thread.join()
with backend.strict():
    pass
refused()
print((x + backend.to(y, "gpu:0")).asnumpy())
"""


def test_the_variable_puts_every_thread_under_it():
    environment = os.environ | {"D2LDEV_STRICT": "1", "D2LDEV_VIRTUAL_GPUS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", STRICT], capture_output=True, text=True, env=environment, check=False
    )
    assert (done.stdout, done.returncode) == ("refused\n" * 3 + "[2. 2.]\n", 0), done.stderr


CUSTOM = """
import d2ldev
backend = d2ldev.get_backend("mxnet")
import mxnet as mx
class Add(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        there = mx.nd.ones((2,), ctx=mx.cpu(2))
        self.assign(out_data[0], req[0], in_data[0] + in_data[1] + there)
@mx.operator.register("add_custom")
class Properties(mx.operator.CustomOpProp):
    def list_arguments(self):
        return ["x", "y"]
    def create_operator(self, context, shapes, dtypes):
        return Add()
x, y = (mx.nd.ones((2,), ctx=mx.cpu(i)) for i in (1, 2))
print(mx.nd.Custom(y, y, op_type="add_custom").asnumpy())
try:
    mx.nd.Custom(x, y, op_type="add_custom")
except d2ldev.DeviceMismatchError:
    print("refused")
"""


def test_a_custom_operator_runs_and_refuses_to_mix_its_operands():
    environment = os.environ | {"D2LDEV_STRICT": "1", "D2LDEV_VIRTUAL_GPUS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", CUSTOM], capture_output=True, text=True, env=environment, check=False
    )
    assert (done.stdout, done.returncode) == ("[3. 3.]\nrefused\n", 0), done.stderr


def test_operators_of_python_outside_are_mxnet_s(backend):
    with backend.strict():
        assert is_refused()
    assert operator.add(array(1), array(2)).asnumpy().tolist() == [2, 2]
