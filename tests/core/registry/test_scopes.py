"""``get_backend``, ``set_backend`` and ``use_backend``: for the process, and for a block."""

import asyncio
import threading

import pytest
from processes import run_python

import d2ldev
from d2ldev.framework.testing import framework_of

# -- get_backend and set_backend --------------------------------------------------------------


def test_get_backend_of_a_backend_is_that_backend(other):
    assert d2ldev.get_backend(other) is other


@pytest.mark.parametrize("function", [d2ldev.get_backend, d2ldev.set_backend])
@pytest.mark.parametrize("value", [None, 1, b"reference", d2ldev.Backend], ids=repr)
def test_a_value_that_is_not_a_name_or_a_backend_is_refused(function, value):
    with pytest.raises(d2ldev.UnsupportedValueError, match="it is neither a name nor a backend"):
        function(value)


@pytest.mark.parametrize("name", ["", " ", "no such backend"])
def test_get_backend_of_an_unknown_name_is_refused(name):
    with pytest.raises(d2ldev.UnknownBackendError, match="installed: "):
        d2ldev.get_backend(name)


def test_set_backend_returns_the_backend(restored_backend, reference):
    assert d2ldev.set_backend("reference") is reference


def test_set_backend_is_for_every_thread(restored_backend, other):
    d2ldev.set_backend(other)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(d2ldev.get_backend(d2ldev.backend)))
    thread.start()
    thread.join()
    assert seen == [other]


def test_set_backend_with_an_unknown_name_changes_nothing(restored_backend, other):
    d2ldev.set_backend(other)
    with pytest.raises(d2ldev.UnknownBackendError):
        d2ldev.set_backend("no such backend")
    assert d2ldev.get_backend(d2ldev.backend) is other


def test_set_backend_inside_use_backend_waits_for_the_end_of_the_block(
    restored_backend, reference, other
):
    with d2ldev.use_backend(reference):
        d2ldev.set_backend(other)
        inside = d2ldev.get_backend(d2ldev.backend)
    assert (inside, d2ldev.get_backend(d2ldev.backend)) == (reference, other)


@pytest.mark.parametrize(
    ("code", "environment", "reason"),
    [
        ("", {"D2LDEV_BACKEND": " reference "}, "D2LDEV_BACKEND=reference"),
        ("", {}, "none of torch, jax, tensorflow, mxnet is installed"),
        ("d2ldev.set_backend('reference')", {}, "set_backend"),
        ("d2ldev.use_backend('reference').__enter__()", {}, "use_backend"),
    ],
)
def test_the_reason_of_the_choice_is_available(code, environment, reason):
    asking = "from d2ldev.registry import selection; show(selection.selection_reason())"
    code = f"import d2ldev; {code}\n{asking}"
    assert run_python(code, environment=environment) == [reason]


def test_the_reason_of_the_choice_names_the_order_of_preference(install):
    code = "import d2ldev.registry.selection; show(d2ldev.registry.selection.selection_reason())"
    assert run_python(code, path=[install("jax")]) == [
        "jax is the first that is installed of torch, jax, tensorflow, mxnet"
    ]


# -- use_backend ------------------------------------------------------------------------------


def test_use_backend_gives_the_backend(reference):
    with d2ldev.use_backend("Reference") as entered:
        assert entered is reference


def test_use_backend_is_for_the_length_of_the_block(reference, other):
    with d2ldev.use_backend(other):
        inside = d2ldev.get_backend(d2ldev.backend)
    assert (inside, d2ldev.get_backend(d2ldev.backend)) == (other, reference)


def test_blocks_are_nested(reference, other):
    third = d2ldev.Backend(type(framework_of(reference))(virtual_gpus=0))
    seen = []
    with d2ldev.use_backend(other):
        with d2ldev.use_backend(third):
            seen.append(d2ldev.get_backend(d2ldev.backend))
        seen.append(d2ldev.get_backend(d2ldev.backend))
    assert seen == [third, other]


def test_an_exception_leaves_the_block(reference, other):
    with pytest.raises(ZeroDivisionError), d2ldev.use_backend(other):
        raise ZeroDivisionError
    assert d2ldev.get_backend(d2ldev.backend) is reference


def test_one_object_can_be_entered_inside_its_own_block(reference, other):
    seen, again = [], d2ldev.use_backend(other)
    with again:
        with d2ldev.use_backend(reference):
            with again:
                seen.append(d2ldev.get_backend(d2ldev.backend))
            seen.append(d2ldev.get_backend(d2ldev.backend))
        seen.append(d2ldev.get_backend(d2ldev.backend))
    assert [*seen, d2ldev.get_backend(d2ldev.backend)] == [other, reference, other, reference]


def test_one_object_can_be_entered_after_its_block(reference, other):
    again = d2ldev.use_backend(other)
    with again:
        pass
    with again:
        assert d2ldev.get_backend(d2ldev.backend) is other


def test_an_unknown_name_is_refused_on_entering(reference):
    with pytest.raises(d2ldev.UnknownBackendError), d2ldev.use_backend("no such backend"):
        pass
    assert d2ldev.get_backend(d2ldev.backend) is reference


def test_use_backend_needs_no_choice_for_the_process():
    code = """
        import warnings
        warnings.simplefilter("error")
        import d2ldev.registry.selection
        with d2ldev.use_backend("reference"):
            show(d2ldev.backend.name)
        show(d2ldev.registry.selection.get_selection().framework is None)
    """
    assert run_python(code) == ["reference", True]


def test_asyncio_tasks_have_blocks_of_their_own(reference, other):
    async def task(name, entered, others):
        with d2ldev.use_backend(name):
            entered.set()
            await others.wait()
            return d2ldev.get_backend(d2ldev.backend)

    async def both():
        first, second = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(
            task("reference", first, second),
            task(other, second, first),
        )

    assert asyncio.run(both()) == [reference, other]


def within(name):
    """Yield inside a block."""
    with d2ldev.use_backend(name):
        yield d2ldev.get_backend(d2ldev.backend)


def test_a_generator_that_ends_leaves_its_block(reference, other):
    assert list(within(other)) == [other]
    assert d2ldev.get_backend(d2ldev.backend) is reference


def test_a_generator_that_is_closed_leaves_its_block(reference, other):
    generator = within(other)
    next(generator)
    generator.close()
    assert d2ldev.get_backend(d2ldev.backend) is reference


def test_a_generator_that_is_closed_in_another_block_leaves_its_own(reference, other):
    third = d2ldev.Backend(type(framework_of(reference))(virtual_gpus=0))
    generator = within(other)
    next(generator)
    with d2ldev.use_backend(third):
        generator.close()
        inside = d2ldev.get_backend(d2ldev.backend)
    assert (inside, d2ldev.get_backend(d2ldev.backend)) == (third, reference)


def test_a_generator_that_is_closed_in_another_thread_changes_nothing_there(reference, other):
    seen, generator = [], within(other)

    def close():
        with d2ldev.use_backend(other):
            generator.close()
            seen.append(d2ldev.get_backend(d2ldev.backend))
        seen.append(d2ldev.get_backend(d2ldev.backend))

    def enter_and_close():
        next(generator)
        thread = threading.Thread(target=close)
        thread.start()
        thread.join()

    thread = threading.Thread(target=enter_and_close)
    thread.start()
    thread.join()
    assert seen == [other, reference]
