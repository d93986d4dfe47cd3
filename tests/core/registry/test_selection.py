"""Which backend is the active one: the variable, the order of preference, the fallback."""

import pytest
from installs import find_extras
from processes import FRAMEWORKS, make_backend, run_python

import d2ldev
from d2ldev.registry import loading

ACTIVE = "import d2ldev; show(d2ldev.backend.name)"
SEVERAL = """
    import warnings
    import d2ldev
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        show(d2ldev.backend.name)
    show(caught[0].category.__name__)
    show(str(caught[0].message))
"""


# -- importing --------------------------------------------------------------------------------


def test_importing_d2ldev_imports_no_framework_and_no_numpy():
    code = f"""
        import sys
        import d2ldev
        from d2ldev import backend
        show(sorted({{*{FRAMEWORKS}, "numpy", "array_api_strict"}} & set(sys.modules)))
    """
    assert run_python(code, hide=()) == [[]]


def test_the_handle_is_resolved_at_its_first_use_and_not_before():
    code = """
        import os
        from d2ldev import backend
        os.environ["D2LDEV_BACKEND"] = "reference"
        show(backend.name)
    """
    assert run_python(code) == ["reference"]


def test_a_backend_can_be_imported_by_its_name():
    code = "import d2ldev; from d2ldev import reference as d2l; show(d2l.name)"
    assert run_python(code) == ["reference"]


def test_importing_a_backend_by_its_name_does_not_make_it_the_active_one():
    code = """
        import warnings
        warnings.simplefilter("error")
        from d2ldev import reference
        from d2ldev.registry import selection as registry
        show(registry.get_selection().framework is None)
    """
    assert run_python(code) == [True]


@pytest.mark.parametrize(("alias", "name"), [("pytorch", "torch"), ("tf", "tensorflow")])
def test_a_backend_can_be_imported_by_its_alias(install, alias, name):
    code = f"from d2ldev import {alias} as d2l; show(d2l.name)"
    assert run_python(code, path=[install(name)]) == [name]


def test_importing_a_backend_that_is_not_installed_says_how_to_install_it():
    code = """
        try:
            from d2ldev import torch
        except ImportError as error:
            show(str(error))
    """
    (message,) = run_python(code)
    assert find_extras(message) == ["torch"]


def test_importing_a_name_that_is_not_a_backend_is_an_import_error():
    with pytest.raises(ImportError, match="no_such_backend"):
        from d2ldev import no_such_backend  # noqa: F401


def test_an_attribute_that_is_not_a_backend_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'd2ldev' has no attribute 'no_such_backend'"):
        d2ldev.no_such_backend  # noqa: B018


# -- D2LDEV_BACKEND ---------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["reference", " reference\n", "Reference", "REFERENCE"])
def test_the_variable_is_read_without_regard_to_case_and_white_space(text):
    assert run_python(ACTIVE, environment={"D2LDEV_BACKEND": text}) == ["reference"]


@pytest.mark.parametrize(
    ("text", "name"),
    [("pytorch", "torch"), ("PyTorch", "torch"), ("tf", "tensorflow"), (" TF ", "tensorflow")],
)
def test_the_variable_may_be_an_alias(install, text, name):
    path = [install("torch", "tensorflow")]
    assert run_python(ACTIVE, path=path, environment={"D2LDEV_BACKEND": text}) == [name]


@pytest.mark.parametrize("text", ["", " ", "\t\n"])
def test_the_variable_is_unset_if_it_is_empty(install, text):
    path = [install("jax")]
    assert run_python(ACTIVE, path=path, environment={"D2LDEV_BACKEND": text}) == ["jax"]


def test_the_variable_comes_before_the_order_of_preference(install):
    path = [install("torch")]
    environment = {"D2LDEV_BACKEND": "reference"}
    assert run_python(ACTIVE, path=path, environment=environment) == ["reference"]


def test_the_variable_may_name_a_third_party_s_backend(tmp_path):
    path = [make_backend(tmp_path)]
    assert run_python(ACTIVE, path=path, environment={"D2LDEV_BACKEND": "Mine"}) == ["mine"]


FAILING = """
    import d2ldev
    for attempt in range(2):
        try:
            d2ldev.backend.num_gpus()
        except d2ldev.D2LDevError as error:
            show([type(error).__name__, str(error)])
"""


@pytest.fixture(scope="module")
def misspelt():
    """What two uses in a process say whose variable is misspelt."""
    return run_python(FAILING, environment={"D2LDEV_BACKEND": "refrence"})


def test_a_misspelt_variable_is_an_error_at_every_use(misspelt):
    assert [name for name, _ in misspelt] == ["UnknownBackendError"] * 2


@pytest.mark.parametrize(
    "part",
    [
        "use the backend 'refrence' (from D2LDEV_BACKEND='refrence')",
        "known: torch, ",
        "installed: reference",
        "did you mean 'reference'?",
        "D2LDEV_BACKEND=reference",
    ],
)
def test_an_invalid_variable_is_reported(misspelt, part):
    assert part in misspelt[0][1]


def test_the_fix_for_a_misspelt_name_uses_the_name_that_is_meant(monkeypatch):
    monkeypatch.setattr(loading, "available_backends", lambda: ["torch", "reference"])
    with pytest.raises(d2ldev.UnknownBackendError) as error:
        d2ldev.get_backend("refrence")
    assert error.value.fix.startswith("did you mean 'reference'? D2LDEV_BACKEND=reference, or ")


def test_a_name_that_is_like_no_other_gets_no_suggestion():
    with pytest.raises(d2ldev.UnknownBackendError) as error:
        d2ldev.get_backend("zzzzzzzz")
    assert "did you mean" not in str(error.value)


def test_a_misspelt_name_in_a_call_is_not_blamed_on_the_variable():
    with pytest.raises(d2ldev.UnknownBackendError) as error:
        d2ldev.get_backend("refrence")
    assert "(from " not in str(error.value)


@pytest.fixture(scope="module")
def not_installed():
    """What two uses in a process say whose variable names a framework that is not there."""
    return run_python(FAILING, environment={"D2LDEV_BACKEND": "torch"})


def test_a_variable_with_a_missing_backend_is_an_error_at_every_use(not_installed):
    assert [name for name, _ in not_installed] == ["BackendNotInstalledError"] * 2


@pytest.mark.parametrize(
    "part",
    [
        "use the torch backend (from D2LDEV_BACKEND='torch')",
        "torch is not installed",
        "known: torch, ",
        "installed: reference",
        "fix: pip install",
    ],
)
def test_a_variable_with_a_missing_backend_is_reported(not_installed, part):
    assert part in not_installed[0][1]


# -- the order of preference ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("installed", "first"),
    [
        (["mxnet", "tensorflow", "jax", "torch"], "torch"),
        (["mxnet", "tensorflow", "jax"], "jax"),
        (["mxnet", "tensorflow"], "tensorflow"),
        (["mxnet"], "mxnet"),
    ],
)
def test_the_first_that_is_installed_is_taken(install, installed, first):
    assert run_python(ACTIVE, path=[install(*installed)]) == [first]


def test_installed_packages_are_found_without_importing_them(install):
    code = f"""
        import sys
        {ACTIVE}
        show(sorted(set({FRAMEWORKS}) & set(sys.modules)))
    """
    assert run_python(code, path=[install("torch", "jax")]) == ["torch", []]


def test_a_third_party_s_backend_comes_after_the_built_in_ones(install, tmp_path):
    make_backend(tmp_path, "mine")
    assert run_python(ACTIVE, path=[install("mxnet")]) == ["mxnet"]


def test_the_only_third_party_s_backend_is_taken_where_no_other_is_installed(tmp_path):
    code = f"import warnings; warnings.simplefilter('error'); {ACTIVE}"
    assert run_python(code, path=[make_backend(tmp_path)]) == ["mine"]


def test_several_third_party_backends_give_no_default(tmp_path):
    for name in ("mine", "yours"):
        make_backend(tmp_path, name)
    name, _, _ = run_python(SEVERAL, path=[tmp_path])
    assert name == "reference"


def test_the_fallback_warning_names_the_installed_third_parties(tmp_path):
    for name in ("mine", "yours"):
        make_backend(tmp_path, name)
    _, category, message = run_python(SEVERAL, path=[tmp_path])
    assert category == "BackendFallbackWarning"
    assert "none of mine, yours is preferred" in message


def test_available_backends_are_those_installed_in_the_order_of_preference(install, tmp_path):
    make_backend(tmp_path, "mine")
    path = [install("mxnet", "torch")]
    code = "import d2ldev; show(d2ldev.available_backends())"
    assert run_python(code, path=path) == [["torch", "mxnet", "mine", "reference"]]


def test_asking_which_backends_are_available_imports_no_framework(install):
    code = f"""
        import sys, d2ldev
        d2ldev.available_backends()
        show(sorted({{*{FRAMEWORKS}, "numpy"}} & set(sys.modules)))
    """
    assert run_python(code, path=[install(*FRAMEWORKS)]) == [[]]


# -- none installed ---------------------------------------------------------------------------

FALLBACK = """
    import threading, warnings
    import d2ldev
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        d2ldev.backend.num_gpus()
        d2ldev.backend.num_gpus()
        thread = threading.Thread(target=d2ldev.backend.num_gpus)
        thread.start()
        thread.join()
    show(d2ldev.backend.name)
    show([type(w.message).__name__ for w in caught])
    show(str(caught[0].message))
    show(caught[0].filename)
"""


@pytest.fixture(scope="module")
def fallback():
    return run_python(FALLBACK)


def test_without_a_framework_the_reference_backend_is_taken(fallback):
    assert fallback[0] == "reference"


def test_the_fallback_is_warned_of_once(fallback):
    assert fallback[1] == ["BackendFallbackWarning"]


@pytest.mark.parametrize(
    "part",
    [
        "none of torch, jax, tensorflow, mxnet is installed",
        "fix: pip install",
        "D2LDEV_BACKEND=reference",
    ],
)
def test_the_fallback_s_warning_says(fallback, part):
    assert part in fallback[2]


def test_the_fallback_s_warning_points_to_the_user_s_line(fallback):
    assert fallback[3] == "<string>"


def test_choosing_the_reference_backend_is_not_a_fallback():
    code = f"import warnings; warnings.simplefilter('error'); {ACTIVE}"
    assert run_python(code, environment={"D2LDEV_BACKEND": "reference"}) == ["reference"]
