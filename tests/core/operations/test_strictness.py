"""``strict()``: when functions are replaced, where it is in force, and what becomes of errors."""

import asyncio
import contextvars
import subprocess
import sys

import array_api_strict as xp
import pytest
from processes import run_python
from reference_backend import ReferenceFramework

import d2ldev
from d2ldev import DeviceMismatchError, gpu
from d2ldev.framework import CPU, Strict, mismatch, operands_of, replace
from d2ldev.framework.testing import framework_of

MIX = "b.ones(2, device='gpu:0') + b.ones(2, device='gpu:1')"


@pytest.fixture
def replaced():
    """What happened to a framework's functions, in order."""
    return []


class Noting(Strict):
    """Notes when functions are replaced, and when they are put back."""

    def __init__(self, noted):
        self.noted = noted

    def refuse_mixing(self, in_force):
        self.noted.append("replaced")
        return lambda: self.noted.append("put back")


def strictness_of(strict):
    """Return where a framework with this module ``strict`` is strict."""
    framework = ReferenceFramework()
    framework.strict = strict
    return framework.state.strictness


@pytest.fixture
def strict(replaced):
    return strictness_of(Noting(replaced))


def run(program, **environment):
    """Run a program on the reference backend, in a process of its own."""
    import os

    code = f"import d2ldev\nb = d2ldev.get_backend('reference')\n{program}"
    variables = {**os.environ, "D2LDEV_VIRTUAL_GPUS": "2", **environment}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=variables, check=False
    )


# -- blocks -----------------------------------------------------------------------------------


def test_functions_are_replaced_once_however_many_blocks_there_are(strict, replaced):
    with strict.block(), strict.block():
        assert replaced == ["replaced"]
    assert replaced == ["replaced", "put back"]


def test_functions_are_replaced_again_for_a_later_block(strict, replaced):
    for _ in range(2):
        with strict.block():
            pass
    assert replaced == ["replaced", "put back"] * 2


def test_a_task_that_outlives_its_block_is_in_none(strict):
    async def outlives(ended):
        inside = strict.in_force()
        await ended.wait()
        return inside, strict.in_force()

    async def main():
        ended = asyncio.Event()
        with strict.block():
            task = asyncio.create_task(outlives(ended))
            await asyncio.sleep(0)
        ended.set()
        return await task

    assert asyncio.run(main()) == (True, False)


def test_an_outer_block_is_in_force_in_a_copied_context_whose_inner_one_has_ended(strict):
    with strict.block():
        with strict.block():
            context = contextvars.copy_context()
        assert context.run(strict.in_force)


def test_strict_everywhere_is_in_force_in_every_thread_and_stays():
    code = """
        import threading
        from d2ldev.contract import Strict
        from d2ldev_reference import ReferenceFramework
        noted, found = [], []
        class Noting(Strict):
            def refuse_mixing(self, in_force):
                noted.append("replaced")
                return lambda: noted.append("put back")
        framework = ReferenceFramework()
        framework.strict, strict = Noting(), framework.state.strictness
        strict.everywhere()
        with strict.block():
            thread = threading.Thread(target=lambda: found.append(strict.in_force()))
            thread.start()
            thread.join()
        show([noted, found])
    """
    assert run_python(code) == [[["replaced"], [True]]]


def test_a_replacement_that_fails_leaves_no_block(replaced):
    class FailsFirst(Noting):
        def refuse_mixing(self, in_force):
            if not self.noted:
                self.noted.append("failed")
                raise ZeroDivisionError
            return super().refuse_mixing(in_force)

    strict = strictness_of(FailsFirst(replaced))
    with pytest.raises(ZeroDivisionError), strict.block():
        pass
    assert not strict.in_force()
    with strict.block():
        pass
    assert replaced == ["failed", "replaced", "put back"]


class _Owner:
    def first(self):
        return "first"

    def second(self):
        return "second"


def test_a_replacement_that_fails_halfway_puts_back_the_others():
    before = dict(vars(_Owner))
    with pytest.raises(KeyError):
        replace([(_Owner, "first", 1), (_Owner, "missing", 2)])
    assert dict(vars(_Owner)) == before


# -- the error --------------------------------------------------------------------------------


def test_the_error_names_the_operation_its_operands_and_the_line_that_fixes_it():
    error = mismatch("add", [("x", gpu(0)), ("y", CPU), ("z", gpu(0))])
    assert error.attempted == "run add"
    assert error.problem.endswith("x on gpu:0, y on cpu, z on gpu:0")
    assert error.fix == "y = backend.to(y, 'gpu:0')"
    assert error.devices == ("gpu:0", "cpu")


def test_every_operand_on_another_device_has_its_line():
    error = mismatch("where", [("a", gpu(0)), ("b", gpu(1)), ("c", CPU)])
    assert error.fix == "b = backend.to(b, 'gpu:0'); c = backend.to(c, 'gpu:0')"


def test_a_batch_moves_to_its_model_and_not_the_model_to_the_batch():
    weights = [("dense/kernel", gpu(1)), ("dense/bias", gpu(1))]
    assert mismatch("run", [("x", gpu(0)), *weights]).fix == "x = backend.to(x, 'gpu:1')"
    error = mismatch("matmul", [(0, gpu(0)), ("dense/kernel", gpu(1))])
    assert error.fix == "x = backend.to(x, 'gpu:1'), where x is operand 1 of matmul"


def test_a_name_that_cannot_be_assigned_to_is_not_in_the_fix():
    error = mismatch("run", [("x", gpu(0)), ("y", gpu(0)), ("dense/kernel", gpu(1))])
    assert error.fix == "model = backend.place(model, 'gpu:0')"


def test_operands_are_found_in_lists_and_among_keywords(reference):
    x, y = reference.ones(1, device="gpu:0"), reference.ones(1)
    found = operands_of(framework_of(reference), ([x, y], 1, "text"), {"out": y})
    assert found == [((0, 0), gpu(0)), ((0, 1), CPU), (("out",), CPU)]
    words = "found operand 1[0] on gpu:0, operand 1[1] on cpu, out on cpu"
    assert words in mismatch("concat", found).problem


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, y: xp.add(x, y),
        lambda x, y: xp.concat([x, y]),
        lambda x, y: xp.where(x > 0, x, y),
        lambda x, y: xp.linalg.matmul(x, y),
        lambda x, y: x.__iadd__(y),
        lambda x, y: x.__setitem__(0, y),
        lambda x, y: xp.searchsorted(x, y),
        lambda x, y: xp.take(x, xp.astype(y, xp.int64)),
    ],
)
def test_operations_of_the_reference_backend_raise_at_the_operation(reference, operation):
    x, y = reference.ones(2, device="gpu:0"), reference.ones(2, device="gpu:1")
    with reference.strict(), pytest.raises(DeviceMismatchError):
        operation(x, y)


def test_a_strict_function_is_one_whose_body_is_a_block(reference):
    @reference.strict()
    def add(x, y):
        return x + y

    with pytest.raises(DeviceMismatchError):
        add(reference.ones(1, device="gpu:0"), reference.ones(1))


def test_the_handle_has_strict(reference):
    with d2ldev.use_backend(reference), d2ldev.backend.strict():
        assert framework_of(reference).state.strictness.in_force()


# -- the process ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["1", " true ", "YES", "on"])
def test_the_variable_makes_the_process_strict(value):
    program = f"try:\n    {MIX}\nexcept d2ldev.DeviceMismatchError:\n    print('strict')"
    assert run(program, D2LDEV_STRICT=value).stdout == "strict\n"


@pytest.mark.parametrize("value", ["", "0", "false", "No", "off"])
def test_the_variable_can_turn_strict_off(value):
    program = f"try:\n    {MIX}\nexcept Exception as error:\n    print(type(error).__name__)"
    assert run(program, D2LDEV_STRICT=value).stdout == "ValueError\n"


def test_the_variable_is_in_force_in_threads():
    program = (
        "import threading\n"
        "def work():\n"
        f"    try:\n        {MIX}\n"
        "    except d2ldev.DeviceMismatchError:\n        print('strict')\n"
        "thread = threading.Thread(target=work); thread.start(); thread.join()"
    )
    assert run(program, D2LDEV_STRICT="1").stdout == "strict\n"


def test_a_value_that_is_neither_yes_nor_no_is_an_error():
    done = run("", D2LDEV_STRICT="maybe")
    assert done.returncode == 1
    assert "UnsupportedValueError: " in done.stderr
    assert "'maybe'" in done.stderr
