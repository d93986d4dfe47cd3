"""``torch.compile``: functions that use d2ldev in one graph, and models that are compiled."""

import json
import os
import subprocess
import sys
import threading

import pytest
import torch
from processes import run_interpreter
from safetensors.torch import save_file
from torch_versions import needs_torch

import d2ldev
from d2ldev import CheckpointError, Trainer, backend


class Compiler:
    """A compiler that runs what it is given, and counts how often it was asked."""

    def __init__(self):
        self.programs = 0

    def __call__(self, program, _inputs):
        self.programs += 1
        return program.forward


@pytest.fixture
def compiler():
    torch.compiler.reset()
    yield Compiler()
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def _torch_is_active(torch_backend):
    with d2ldev.use_backend(torch_backend):
        yield


def compile_model(function, compiler):
    return torch.compile(function, backend=compiler, fullgraph=True)


FUNCTIONS = {
    "to": lambda x: backend.to(x, "cpu") * 2,
    "to a device": lambda x: backend.to(x, backend.try_gpu(7)) * 2,
    "to, a batch": lambda x: backend.to({"x": x, "rest": [x, 1]}, "cpu")["x"] * 2,
    "copy, a batch": lambda x: backend.copy({"x": x, "rest": [x + 1, 1]}, "cpu")["rest"][0] * 2,
    "rand with a seed": lambda x: backend.rand(3, seed=7) * x,
    "randn with a seed": lambda x: backend.randn((3,), seed=7, dtype="float64") * x,
    "copy": lambda x: backend.copy(x, "cpu") * 2,
    "device_of": lambda x: x * 2 if backend.device_of(x) == backend.cpu() else x,
    "num_gpus": lambda x: x * (backend.num_gpus() + 2),
    "zeros": lambda x: backend.zeros(3) + x,
    "ones, on a device": lambda x: backend.ones((2, 3), device="cpu") + x,
    "arange": lambda x: backend.arange(3) + x,
    "astype": lambda x: backend.asarray(x, dtype="float64") + 1,
    "native": lambda x: x.to(backend.native("cpu")) * 2,
    "name": lambda x: x * len(backend.name),
}


# A batch with a tensor that the program has made itself: each tensor is asked for its ``id``.
MADE = "copy, a batch"
NEEDS_IDS = needs_torch(2, 12, "traces no id() of a tensor that the program has made")


@pytest.mark.parametrize("how", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=NEEDS_IDS if name == MADE else ()) for name in FUNCTIONS]
)
def test_a_function_is_compiled_as_one_graph(compiler, name, how):
    x = torch.arange(3.0)
    y = compile_model(FUNCTIONS[name], how)(x)
    assert torch.equal(y, FUNCTIONS[name](x))


# Each in a process in which nothing else has used d2ldev: what it prints.
FIRST_USES = {
    "the handle": (
        "from d2ldev import backend\n"
        "f = torch.compile(lambda x: backend.to(x, 'cpu') * 2, backend='eager', fullgraph=True)\n"
        "print(f(torch.ones(2)).tolist(), backend.name)",
        "[2.0, 2.0] torch",
    ),
    "a device": (
        "from d2ldev import backend\n"
        "f = torch.compile(lambda x: backend.to(x, 'gpu:1'), backend='eager', fullgraph=True)\n"
        "print(f(torch.ones(2)).device)",
        "vgpu:1",
    ),
    **{
        f"the backend of {name}": (
            "import d2ldev\n"
            "ask = lambda x: d2ldev.backend_of(x).ones(3) + x\n"
            "f = torch.compile(ask, backend='eager', fullgraph=True)\n"
            f"print(f({made}).tolist())",
            "[2.0, 2.0, 2.0]",
        )
        for name, made in [
            ("a tensor", "torch.ones(3)"),
            ("a parameter", "torch.nn.Parameter(torch.ones(3))"),
        ]
    },
}
# torch and its compiler are imported once, and then there is a child for each program.
CHILDREN = """
import json, os, sys, traceback, torch, torch._dynamo
for code in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        try:
            exec(code)
        except BaseException:
            print(traceback.format_exc().splitlines()[-1])
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def first_uses():
    codes = json.dumps([code for code, _ in FIRST_USES.values()])
    environment = {**os.environ, "D2LDEV_VIRTUAL_GPUS": "2"}
    done = run_interpreter("-c", CHILDREN, codes, env=environment)
    return dict(zip(FIRST_USES, done.stdout.splitlines(), strict=True))


@pytest.mark.parametrize("name", FIRST_USES)
def test_it_may_be_the_first_use_of(first_uses, name):
    assert first_uses[name] == FIRST_USES[name][1]


def scale(x):
    return x * 2 if backend.name == "torch" else x * 3


def test_a_program_holds_for_the_backend_that_it_was_compiled_with(compiler):
    function = compile_model(scale, compiler)
    x = torch.ones(1)
    first = function(x)
    with d2ldev.use_backend("reference"):
        inside = function(x)
    assert [first.item(), inside.item(), function(x).item()] == [2, 3, 2]
    assert compiler.programs == 2


def test_a_thread_runs_the_program_of_its_own_backend(compiler, torch_backend):
    function = compile_model(scale, compiler)
    found = []

    def work():
        with d2ldev.use_backend(torch_backend):
            found.append(function(torch.ones(1)).item())

    thread = threading.Thread(target=work)
    with d2ldev.use_backend("reference"):
        found.append(function(torch.ones(1)).item())
        thread.start()
        thread.join()
    assert found == [3, 2]


def test_a_program_holds_for_the_device_of_the_block_that_it_was_compiled_in(compiler, virtual):
    function = compile_model(lambda: backend.ones(1), compiler)
    with d2ldev.use_backend(virtual):
        places = [str(function().device)]
        with backend.on("gpu:1"):
            places.append(str(function().device))
        places.append(str(function().device))
    assert places == ["cpu", "vgpu:1", "cpu"]


@pytest.mark.parametrize("device", ["cpu", "gpu:0", "gpu:1"])
def test_copies_to_and_from_virtual_gpus_are_compiled(virtual, vgpu, compiler, device):
    y = compile_model(lambda x: virtual.to(x, device) + 1, compiler)(torch.zeros(2, device=vgpu))
    assert virtual.device_of(y) == virtual.device(device)
    assert y.tolist() == [1, 1]


@pytest.mark.parametrize("how", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["rand", "randn"])
def test_numbers_of_a_seed_are_drawn_on_virtual_gpus_and_are_the_same_each_time(virtual, name, how):
    draw = getattr(virtual, name)
    torch.compiler.reset()
    function = compile_model(lambda x: (x + 1) * draw(3, seed=7, device="gpu:1"), how)
    x = virtual.ones(3, device="gpu:1")
    results = [function(x), function(x)]
    assert [virtual.device_of(y) for y in results] == [virtual.device("gpu:1")] * 2
    assert all(torch.equal(y.cpu(), 2 * draw(3, seed=7)) for y in results)


@needs_torch(2, 12, "traces no id() of a container")
def test_a_batch_is_moved_to_a_virtual_gpu_in_one_graph(virtual, compiler):
    batch = {"x": torch.ones(2), "rest": (torch.zeros(2), [torch.ones(1), 3])}
    moved = compile_model(lambda batch: virtual.to(batch, "gpu:1"), compiler)(batch)
    assert compiler.programs == 1
    assert set(virtual.placement(moved).values()) == {virtual.device("gpu:1")}
    assert moved["rest"][1][1] == 3


def test_a_seed_imports_no_compiler():
    code = (
        "import sys; from d2ldev import torch as d2l; d2l.rand(1, seed=1); import torch\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr


# -- compiled models ------------------------------------------------------------------------------


def network():
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.LSTM(3, 1))


def compile_network():
    return torch.compile(network(), backend="eager")


def network_with_a_compiled_layer():
    net = network()
    net[0] = torch.compile(net[0], backend="eager")
    return net


NETWORKS = pytest.mark.parametrize(
    "make", [compile_network, network_with_a_compiled_layer], ids=["whole", "a layer of it"]
)


def assert_equal(one, other):
    for x, y in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(x, y)


@NETWORKS
def test_a_compiled_model_has_the_names_of_the_plain_one(torch_backend, make):
    assert list(torch_backend.placement(make())) == list(torch_backend.placement(network()))


@NETWORKS
def test_a_compiled_model_and_a_plain_one_read_each_other_s_files(torch_backend, path, make):
    saved = make()
    torch_backend.save(saved, path)
    plain = torch_backend.load_into(network(), path)
    assert_equal(plain, saved)
    torch_backend.save(plain, path)
    again = make()
    assert torch_backend.load_into(again, path) is again
    assert_equal(again, saved)


def test_another_program_s_file_of_a_compiled_model_is_read_by_the_line_of_the_error(
    torch_backend, path
):
    saved, other = network(), network()
    save_file(torch.compile(saved, backend="eager").state_dict(), path)
    with pytest.raises(CheckpointError) as caught:
        torch_backend.load_into(other, path)
    assert "only='_orig_mod'" in caught.value.fix
    assert_equal(torch_backend.load_into(other, path, only="_orig_mod"), saved)


def test_the_layers_of_a_compiled_model_are_known_to_other_frameworks(
    torch_backend, reference, path
):
    net = torch_backend.mlp([2, 3, 1], seed=1)
    torch_backend.save(torch.compile(net, backend="eager"), path)
    loaded = reference.load_into(reference.mlp([2, 3, 1], seed=2), path)
    kernel = reference.to_numpy(loaded.layers[0]["weight"])
    assert kernel.tolist() == net[0].weight.tolist()


def test_a_compiled_model_without_shapes_gets_those_of_the_file(torch_backend, path):
    torch_backend.save(torch.nn.Sequential(torch.nn.Linear(2, 3)), path)
    net = torch.nn.Sequential(torch.nn.LazyLinear(3))
    torch_backend.load_into(torch.compile(net, backend="eager"), path)
    assert net[0].weight.shape == (3, 2)


def test_a_compiled_model_is_placed_as_it_is(virtual, vgpu):
    net = compile_network()
    assert virtual.place(net, "gpu:1") is net
    assert {x.device for x in [*net.parameters(), *net.buffers()]} == {vgpu}


def test_a_run_of_a_compiled_model_goes_on_with_the_plain_one(torch_backend, path):
    def model():
        net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        net[0].weight.requires_grad = False
        net[1].eval()
        return net

    batches = [(torch.ones(4, 2), torch.ones(4, 3))]
    first = torch.compile(model(), backend="eager")
    Trainer(1, backend=torch_backend).fit(first, batches, checkpoint=path)
    net = model()
    Trainer(1, backend=torch_backend).fit(net, batches, checkpoint=path, resume=True)
    assert_equal(net, first)
    assert not net[0].weight.requires_grad
