"""Importing MXNet: in processes of their own, because it happens once in each."""

import json
import os
import subprocess
import sys

import pytest
from installs import find_extras


def run(code, **environment):
    """Return what ``code`` printed as JSON in a new process."""
    variables = {name: value for name, value in os.environ.items() if "D2LDEV" not in name}
    done = subprocess.run(
        [sys.executable, "-c", f"import json, sys\n{code}"],
        env=variables | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


FAILING = """
import d2ldev, numpy
{before}
try:
    d2ldev.get_backend('mxnet')
except d2ldev.BackendNotInstalledError as error:
    print(json.dumps([
        str(error), repr(error.__cause__), 'bool' in vars(numpy),
        d2ldev.get_backend('reference').name,
    ]))
"""


@pytest.fixture(scope="module")
def used():
    """What is left of a first use: the name in NumPy, MXNet's modes, and its names' counts."""
    return run("""
import d2ldev, numpy
backend = d2ldev.get_backend('mxnet')
import mxnet as mx
x = backend.ones((2, 3))
from d2ldev_mxnet.provision import samples
for make in samples(backend).values(): make(backend.cpu())
print(json.dumps({
    'bool': 'bool' in vars(numpy),
    'shape': mx.util.is_np_shape(),
    'array': mx.util.is_np_array(),
    'first': mx.gluon.nn.HybridSequential().name,
    'index': backend.to_numpy(x[True]).shape,
    'full': str(mx.np.full((2,), True).dtype),
    'test_utils': str(mx.test_utils.np.bool),
}))
""")


def test_numpy_is_as_it_was(used):
    assert used["bool"] is False


def test_mxnet_s_modes_are_as_they_were(used):
    assert (used["shape"], used["array"]) == (False, False)


def test_no_name_of_mxnet_s_counting_is_used_up(used):
    assert used["first"] == "hybridsequential0"


def test_mxnet_still_indexes_with_a_bool(used):
    assert used["index"] == [1, 2, 3]


def test_mxnet_still_fills_with_a_bool(used):
    assert used["full"] == "bool"


def test_every_module_that_reads_the_name_has_it(used):
    assert used["test_utils"] == "<class 'bool'>"


def test_the_modules_that_read_numpy_bool_are_all_known():
    code = """
import pathlib, re
from d2ldev_mxnet import importing
folder = pathlib.Path(importing.import_mxnet().__file__).parent
reads = re.compile(r'^(?![ ]*(>>>|#|\\'\\'\\')).*\\b_?np\\.bool\\b', re.M)
found = set()
for path in folder.rglob('*.py'):
    code = re.sub(r'\"\"\".*?\"\"\"', '', path.read_text(encoding='utf-8'), flags=re.S)
    if reads.search(re.sub(r'#.*', '', code)):
        parts = path.relative_to(folder.parent).with_suffix('').parts
        found.add('.'.join(parts))
print(json.dumps(sorted(found - set(importing._READERS))))
"""
    assert run(code) == []


def test_a_user_s_own_shim_stays():
    code = """
import numpy
numpy.bool = bool
import mxnet, d2ldev
d2ldev.get_backend('mxnet').ones(2)
print(json.dumps([numpy.bool is bool, sys.modules['mxnet.numpy.multiarray']._np is numpy]))
"""
    assert run(code) == [True, True]


def test_a_user_s_shim_set_before_the_backend_s_import_stays():
    code = """
import numpy
numpy.bool = bool
import d2ldev
d2ldev.get_backend('mxnet').ones(2)
print(json.dumps(numpy.bool is bool))
"""
    assert run(code) is True


ORDERS = {
    "the backend": "from d2ldev import mxnet as d2l; import mxnet",
    "its name": "import d2ldev; d2ldev.get_backend('mxnet'); from mxnet import gluon; import mxnet",
    "the active backend": "from d2ldev import backend; backend.num_gpus(); import mxnet",
    "the book's functions": "from d2ldev.native import mxnet as d2l; import mxnet",
    "a block": "import d2ldev\nwith d2ldev.use_backend('mxnet'): import mxnet",
}


@pytest.mark.parametrize("order", ORDERS)
def test_mxnet_is_imported_by_the_user_after_the_backend(order):
    code = f"""
import numpy
{ORDERS[order]}
import d2ldev
x = mxnet.np.full((2,), True)
d2l = d2ldev.get_backend('mxnet')
print(json.dumps([str(x.dtype), d2l.device_of(x).kind, 'bool' in vars(numpy)]))
"""
    assert run(code, D2LDEV_BACKEND="mxnet") == ["bool", "cpu", False]


def test_nothing_of_mxnet_s_is_mended_before_it_is_asked_for():
    code = """
import d2ldev
from d2ldev import backend
d2ldev.available_backends()
try:
    import mxnet
except AttributeError as error:
    print(json.dumps('bool' in str(error)))
"""
    assert run(code, D2LDEV_BACKEND="mxnet") is True


def test_mxnet_has_the_loader_that_it_has_without_d2ldev():
    code = """
from d2ldev import mxnet as d2l
import mxnet
found = type(mxnet.__loader__).__name__, sorted(vars(mxnet.__loader__)), mxnet.__spec__.name
print(json.dumps(found))
"""
    assert run(code) == ["SourceFileLoader", ["name", "path"], "mxnet"]


def test_after_tensorflow_the_backend_is_an_error_and_no_crash():
    code = """
import types, d2ldev
sys.modules['tensorflow'] = types.ModuleType('tensorflow')
try:
    d2ldev.get_backend('mxnet')
except d2ldev.BackendNotInstalledError as error:
    print(json.dumps([error.problem, 'mxnet' in sys.modules]))
"""
    problem, is_there = run(code)
    assert "TensorFlow was imported before it" in problem
    assert not is_there


def test_an_import_of_the_user_s_that_failed_is_made_up_for():
    code = """
try:
    import mxnet
except AttributeError as error:
    failed = 'bool' in str(error)
import d2ldev
x = d2ldev.get_backend('mxnet').ones(2)
import mxnet
print(json.dumps([failed, type(x) is mxnet.np.ndarray]))
"""
    assert run(code) == [True, True]


def test_warnings_as_errors_do_not_hinder_the_import():
    code = """
import warnings
import d2ldev
warnings.simplefilter('error')
print(json.dumps(d2ldev.get_backend('mxnet').num_gpus() >= 0))
"""
    assert run(code) is True


def test_a_backend_with_a_broken_library_is_not_installed(tmp_path):
    library = tmp_path / "libmxnet.so"
    library.write_text("no library")
    message, cause, is_left, other = run(FAILING.format(before=""), MXNET_LIBRARY_PATH=str(library))
    assert "OSError" in message
    assert find_extras(message) == ["mxnet"]
    assert cause.startswith("OSError")
    assert (is_left, other) == (False, "reference")


# ``mxnet-cu117``, which nothing tells from this MXNet but the name of its distribution.
FOR_CUDA = """
import ctypes, pathlib, d2ldev
from importlib import metadata
from d2ldev.operations import nvml
loaded, load, find = [], ctypes.CDLL, metadata.distribution

def no_mxnet(name):
    if name == 'mxnet':
        raise metadata.PackageNotFoundError(name)
    return find(name)

def note(path, *args, **kwargs):
    if 'nvidia' in str(path):
        loaded.append(pathlib.Path(path).name)
        raise OSError(path)
    return load(path, *args, **kwargs)

metadata.distribution, ctypes.CDLL = no_mxnet, note
nvml.has_driver = lambda: {driver}
try:
    d2ldev.get_backend('mxnet')
    said = ''
except d2ldev.BackendNotInstalledError as error:
    said = error.problem
print(json.dumps([said, loaded]))
"""


def test_a_build_for_cuda_warns_without_a_driver():
    said, loaded = run(FOR_CUDA.replace("{driver}", "False"))
    assert "built for CUDA" in said
    assert "no NVIDIA driver here (libcuda.so.1)" in said
    assert loaded == []


def test_a_build_for_cuda_is_given_the_libraries_of_nvidia_s_wheels(tmp_path):
    (tmp_path / "nvidia").mkdir()
    code = FOR_CUDA.replace("{driver}", "True")
    said, loaded = run(code, PYTHONPATH=os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    assert said == ""
    assert {"libcudart.so.11.0", "libcublas.so.11", "libcudnn.so.8", "libnccl.so.2"} <= set(loaded)


def test_a_backend_with_a_too_new_numpy_is_not_installed():
    # What NumPy 2 took away, and MXNet reads first.
    message, cause, is_left, other = run(FAILING.format(before="del numpy.PZERO"))
    assert "PZERO" in message
    assert cause.startswith("AttributeError")
    assert (is_left, other) == (False, "reference")


def test_a_forked_child_computes():
    code = """
import os, d2ldev
backend = d2ldev.get_backend('mxnet')
backend.num_gpus()
x = backend.ones((2, 2))
x @ x
child = os.fork()
if child == 0:
    y = backend.ones((2, 2))
    os._exit(int(backend.to_numpy(y @ y)[0, 0]))
print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""
    assert run(code) == 2


LIMITED = """
import resource, d2ldev
backend = d2ldev.get_backend('mxnet')
x = backend.ones(2**28)
backend.synchronize()
with open('/proc/self/statm') as file:
    size = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 2**29,) * 2)
try:
    {make}
except d2ldev.OutOfDeviceMemoryError as error:
    backend.synchronize()
    print(json.dumps([str(error), type(error.__cause__).__name__, float(x[0])]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is read from /proc")
@pytest.mark.parametrize(
    "make",
    [
        "backend.zeros(2**28)",
        "backend.full((2**14, 2**14), 2.0)",
        "backend.arange(0.0, float(2**28))",
        "backend.randn(2**28)",
        "backend.copy(x)",
        "backend.copy(x.as_nd_ndarray())",
        "backend.asarray(x, dtype='float64')",
    ],
)
def test_too_little_memory_is_an_error_of_the_call_that_asked(make):
    message, cause, kept = run(LIMITED.format(make=make))
    assert "cpu has too little free memory" in message
    assert cause == "MXNetError"
    assert kept == 1.0
