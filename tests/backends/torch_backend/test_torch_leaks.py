"""``d2ldev.find_leaks`` in PyTorch: each kind of leak with its line, and no false alarm.

The library is a module in a folder of its own. Its functions that begin with ``good`` are right.
"""

from contextlib import suppress
from functools import partial

import numpy as np
import pytest
import torch
from leaky_libraries import find_number, import_library
from torch.nn.modules import module as modules
from torch.nn.utils import rnn

import d2ldev
from d2ldev.contract.leaks import Frames
from d2ldev.leaks.finding import Leaks, follow

LIBRARY = """
import numpy as np
import torch
from torch.nn.utils import rnn

CONSTANT = torch.ones(3)

def create(x):
    made = torch.ones(3)  # create
    return x + made

def create_inside(x):
    return x + torch.nn.Linear(3, 3)(x)  # module

def create_in_place(x):
    total = torch.zeros(3)  # in place
    total += x
    return total

def create_by_copy(x):
    out = torch.zeros(3)  # copy
    out[:] = x
    return out

def create_on_cuda(x):
    return x + torch.ones(3, device="cuda")  # cuda

exec("def make_up():\\n    return torch.ones(3)")

def create_by_made_up_function(x):
    return x + make_up()  # made up

def create_in_trace(x):
    return torch.jit.trace(lambda y: y + torch.ones(3), (x,))(x)  # trace

def create_in_vmap(x):
    return torch.func.vmap(lambda row: row + torch.ones(3))(x[None])  # vmap

def begin_backward(x):
    y = x.detach().requires_grad_() * 2
    y.backward(torch.ones(3))  # begin backward

def begin_gradient(x):
    torch.autograd.functional.vjp(lambda y: y * 2, x, torch.ones(3))  # begin gradient

def begin_with_number(x):
    y = x.detach().requires_grad_()
    y.sum().backward(torch.tensor(2.0))
    return y.grad

def create_in_gradient(x):
    return torch.func.grad(lambda y: (y * torch.ones(3)).sum())(x)  # grad

def create_in_generator(x):
    return next(x + torch.ones(3) for _ in range(1))  # generator

@torch.compile
def create_in_compiled(x):
    return x + torch.ones(3)  # compiled

def create_in_hook(x):
    x = x.clone().requires_grad_()
    x.register_hook(lambda gradient: gradient * torch.ones(3))  # hook
    x.sum().backward()
    return x.grad

def catch(x):
    try:
        return x + torch.ones(3)  # catch
    except RuntimeError:
        return x

def convert(x):
    return x + torch.from_numpy(np.ones(3, "float32"))  # numpy

def create_like(x):
    return x + torch.ones_like(x, device="cpu")  # like

def create_new(x):
    return x + x.new_ones(3, device="cpu")  # new

def create_on_device(x, device=torch.device("cpu")):
    return x + torch.ones(3, device=device)  # default

def construct(x):
    return x + torch.Tensor([1, 2, 3])  # constructor

def make_three():
    return torch.ones(3)  # facade

def create_by_facade(x):
    return x + make_three()  # caller

def return_it(x):
    return torch.arange(len(x)) + 1  # result

def make_input(array):
    return torch.as_tensor(array)

def move(x):
    host = x.cpu()  # move
    return (host + 1).to(x.device)

def move_by_name(x):
    return x.to("cpu").exp().to(x.device)  # to

def move_in_place(x):
    host = x.cpu()  # move in place
    host += 1
    out = torch.zeros_like(x)
    out[:] = host
    return out

def move_to_count(x):
    return x - x.cpu().mean()  # number

def move_to_order(x):
    return x[x.cpu().argsort()]  # order

def move_to_a_module(x):
    return torch.nn.Softmax(0)(x.cpu()).to(x.device)  # softmax

def move_to_cuda(x):
    return x + x.cuda()  # gpu 0

def pack_there(x):
    lengths = torch.ones(1, dtype=torch.int64, device=x.device)
    return rnn.pack_padded_sequence(x[:, None, None], lengths, enforce_sorted=False).data  # pack

def refuse(x):
    return np.sum(x.numpy())  # refusal

def read(x):
    return float(x[0]) + x.cpu().numpy().sum()  # read

def use_constant(x):
    return x + CONSTANT

def draw(x):
    return x + torch.randn(3, generator=torch.Generator(), device=x.device)  # draw

class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0] * torch.full((3,), 2.0)  # backward

def differentiate(x):
    x = x.clone().requires_grad_()
    Square.apply(x).sum().backward()
    return x.grad

class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.plain = torch.ones(3)  # attribute

    def forward(self, x):
        return x + self.plain

def use_plain(x):
    return Plain()(x)

class TwoNames(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(3))  # second name
        self.scales = [self.scale]

    def forward(self, x):
        return x * self.scale * self.scales[0]

class Unlisted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [Net()]  # no ModuleList

    def forward(self, x):
        return self.layers[0](x)

class Total(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.total = torch.zeros(3)

    def _apply(self, function):
        super()._apply(function)
        self.total = function(self.total)
        return self

    def forward(self, x):
        self.total += x
        return self.total

class Located(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.device = torch.device("cpu")

    def to(self, device):
        self.device = device
        return super().to(device)

    def forward(self, x):
        return x + torch.ones(3, device=self.device)

def close_over(x):
    def call():
        return x + torch.ones(3)  # closed over

    return call

class Sampler:
    def __init__(self, number):
        self.order = torch.randperm(number)  # kept

    def choose(self, x):
        return x.index_select(0, self.order)

    def choose_by_copy(self, x):
        return x[self.order] + x.index_select(0, self.order.to(x.device))

class Noise:
    def __init__(self):
        self.scale = torch.ones(3)  # of the noise

    def draw(self, number):
        return torch.rand(number, 3) * self.scale

    def weigh(self, x):
        return x * self.scale

class PlacedSampler(Sampler):
    def __init__(self, number, device=None):
        self.order = torch.randperm(number, device=device)

class MovedSampler(Sampler):
    def to(self, device):
        self.order = self.order.to(device)
        return self

class Pair:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def to(self, device):
        return Pair(self.x.to(device), self.y.to(device))

class Data:
    def __init__(self):
        self.x, self.y = torch.rand(8, 3), torch.from_numpy(np.ones((8, 3), "float32"))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + torch.rand(3), self.y[index]

def train_on(net, pair):
    return torch.nn.functional.mse_loss(net(pair.x), pair.y)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3) * 2)
        self.register_buffer("shift", self.scale * torch.ones(3))

    def forward(self, x):
        return torch.nn.functional.dropout(self.linear(x) * self.scale + self.shift)

def name_cuda(x):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator("cuda" if x.device.type == "cuda" else "cpu")
    return torch.randn(3, generator=generator, device=device) + x.cuda()

def create_sparse(x):
    made = torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (3, 3))  # sparse
    return made @ x

def move_sparse(x):
    return (x.diag().to_sparse().cpu() * 2).to(x.device)  # sparse move

class Graph:
    def __init__(self):
        self.adjacency = torch.eye(3).to_sparse()  # adjacency

def multiply(graph, x):
    return torch.sparse.mm(graph, x[:, None]).sum()

def good_graph(x):
    graph = torch.eye(3, device=x.device).to_sparse()
    return torch.sparse.mm(graph.to_sparse_csr(), x[:, None]) + graph.coalesce().values()[0]

def good_factories(x):
    made = torch.ones(3, device=x.device) + torch.zeros_like(x) + x.new_ones(3)
    return made + torch.tensor(2.0) + torch.full_like(x, 2)

def good_indices(x):
    order = torch.randperm(3)
    return x[order] + x[torch.tensor([True, True, True])]

def pick(x):
    y = x[None] * 2
    y[torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.long)] = 1
    return y[torch.zeros(3, dtype=torch.long), torch.arange(3)]

def good_transfer(x):
    return x + torch.linspace(0, 1, 3).to(x)

def good_in_place(x):
    total = torch.zeros_like(x)
    total += x
    total[0] = 3
    return total.mul_(2)

def good_packing(x):
    lengths = torch.ones(1, dtype=torch.int64, device=x.device).cpu().clamp(max=3)
    packed = rnn.pack_padded_sequence(x[:, None, None], lengths, enforce_sorted=False)
    padded, _ = rnn.pad_packed_sequence(packed)
    return padded.tensor_split(lengths + 1)[0]

def good_mask(x):
    return x[(x > 0).cpu()]

def good_round_trip(x):
    return x.cpu().to(x.device)

def hand_over(x):
    norms = np.linalg.norm(x.cpu().double()[None].numpy(), axis=1)  # hand over
    return torch.as_tensor(norms, device=x.device)

def stay(x, device):
    made = torch.ones(3, device=device) + torch.zeros_like(x, device=device)
    return x.to(device) + made.to(device=device)

def put(x, device="cpu"):
    return x.to(device) + torch.ones(3, device=device)

def put_inside(x):
    return x + put(torch.ones(3, device=x.device))  # no device

class Learner:
    def __init__(self, device="cpu"):
        self.device = device

    def learn(self, x):
        net = torch.nn.Linear(3, 3).to(self.device)
        return net(put(x, self.device))

    def learn_there(self, x):
        return x + torch.ones(3, device="cpu")  # there

def good_functional(x):
    return torch.func.vmap(lambda row: row * 2)(x[None])[0] + torch.func.grad(torch.sum)(x)
"""
KINDS = {
    "create": ("mix", "create", "creates"),
    "create_inside": ("mix", "module", "creates"),
    "create_in_place": ("mix", "in place", "creates"),
    "create_by_copy": ("result", "copy", "creates"),
    "create_on_cuda": ("mix", "cuda", "creates"),
    "create_like": ("mix", "like", "creates"),
    "create_new": ("mix", "new", "creates"),
    "create_on_device": ("mix", "default", "creates"),
    "create_by_made_up_function": ("mix", "made up", "creates"),
    "create_in_trace": ("mix", "trace", "creates"),
    "create_in_vmap": ("mix", "vmap", "creates"),
    "create_in_gradient": ("mix", "grad", "creates"),
    "begin_backward": ("mix", "begin backward", "creates"),
    "begin_gradient": ("mix", "begin gradient", "creates"),
    "create_in_generator": ("mix", "generator", "creates"),
    "create_in_compiled": ("mix", "compiled", "creates"),
    "create_in_hook": ("mix", "hook", "creates"),
    "catch": ("mix", "catch", "creates"),
    "convert": ("mix", "numpy", "creates"),
    "construct": ("mix", "constructor", "creates"),
    "create_sparse": ("mix", "sparse", "creates"),
    "move_sparse": ("move", "sparse move", "moves"),
    "return_it": ("result", "result", "creates"),
    "move": ("move", "move", "moves"),
    "move_by_name": ("move", "to", "moves"),
    "move_in_place": ("move", "move in place", "moves"),
    "move_to_count": ("move", "number", "moves"),
    "move_to_order": ("move", "order", "moves"),
    "move_to_a_module": ("move", "softmax", "moves"),
    "pack_there": ("refusal", "pack", "reads"),
    "move_to_cuda": ("mix", "gpu 0", "moves"),
    "refuse": ("refusal", "refusal", "reads"),
    "draw": ("mix", "draw", "draws"),
    "differentiate": ("mix", "backward", "creates"),
}
number_of = partial(find_number, LIBRARY)


@pytest.fixture(scope="module")
def backend(virtual):
    return virtual


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    with import_library(tmp_path_factory.mktemp("library"), "leaky_library", LIBRARY) as module:
        yield module


def find(backend, function, **options):
    """Return the leaks of a function of the library."""
    with d2ldev.find_leaks("gpu:1", backend=backend, **options) as leaks:
        x = torch.ones(3)
        assert x.device == torch.device("vgpu:1")
        getattr(function(x), "shape", None)  # to see a result is to look at it
    return leaks


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", KINDS)
def test_each_leak_is_found_with_its_line(backend, library, name):
    kind, comment, action = KINDS[name]
    leaks = find(backend, getattr(library, name)).find_failing()
    assert {(leak.kind, leak.line.number, leak.action) for leak in leaks} == {
        (kind, number_of(comment), action)
    }


def test_a_leak_names_both_lines(backend, library):
    line = number_of("create")
    (leak,) = find(backend, library.create)
    assert str(leak) == (
        f"leaky_library.py:{line} creates on the CPU a tensor that meets one on gpu:1 in add at "
        f"leaky_library.py:{line + 1}"
    )
    assert leak.line.function == "leaky_library.create"


def test_the_caller_of_a_function_that_gives_a_tensor_on_is_named(backend, library):
    (leak,) = find(backend, library.create_by_facade)
    assert (leak.line.number, leak.caller.number) == (number_of("facade"), number_of("caller"))
    assert f"leaky_library.py:{number_of('facade')}, called at leaky_library.py:" in str(leak)
    assert find(backend, library.create)[0].caller is None
    allowed = [f"leaky_library.py:{number_of('caller')}"]
    assert list(find(backend, library.create_by_facade, allow=allowed)) == []


def test_reads_of_the_host_are_a_kind_of_their_own(backend, library):
    leaks = find(backend, library.read)
    assert [(leak.kind, leak.line.number) for leak in leaks] == [("read", number_of("read"))] * 2
    assert leaks.find_failing() == []
    assert leaks.by_line() == [(leaks[0], 2)]


def test_a_hand_over_to_numpy_is_a_read(backend, library):
    (leak,) = find(backend, library.hand_over)
    assert (leak.kind, leak.line.number) == ("read", number_of("hand over"))


def test_a_move_names_what_is_computed_there(backend, library):
    (leak,) = find(backend, library.move)
    line = number_of("move")
    assert str(leak) == (
        f"leaky_library.py:{line} moves to the CPU a tensor of gpu:1, computes with it there in "
        f"add at leaky_library.py:{line + 1}, and takes it back"
    )


def test_lengths_that_the_test_packs_are_on_the_host(backend):
    with d2ldev.find_leaks("gpu:1", backend=backend) as leaks:
        rnn.pack_padded_sequence(torch.ones(3, 1, 1), torch.ones(1, dtype=torch.int64))
    assert list(leaks) == []


def test_leaks_are_in_the_order_of_their_first_occurrence(backend, library):
    def call(x):
        for function in (library.create, library.convert, library.create):
            function(x)

    leaks = find(backend, call)
    assert [leak.line.number for leak in leaks.find_failing()] == [
        number_of("create"),
        number_of("numpy"),
    ]
    assert [leak for leak, _ in leaks.by_line()] == leaks.find_failing() == leaks[:2]


def test_a_tensor_from_before_the_block_has_no_line(backend, library):
    (leak,) = find(backend, library.use_constant)
    assert (leak.kind, leak.line) == ("mix", None)
    assert str(leak).startswith("a tensor of unknown origin on the CPU meets one on gpu:1 in add")


def test_an_attribute_that_no_module_moves_is_found(backend, library):
    (leak,) = find(backend, lambda x: library.Plain()(x))
    assert (leak.kind, leak.line.number) == ("mix", number_of("attribute"))


def test_a_second_name_of_a_buffer_is_left_behind(backend, library):
    (leak,) = find(backend, lambda x: library.TwoNames()(x))
    assert (leak.kind, leak.line.number) == ("mix", number_of("second name"))


def test_a_module_that_its_owner_does_not_list_is_left_behind(backend, library):
    leaks = find(backend, lambda x: library.Unlisted()(x))
    assert {leak.operation for leak in leaks} == {"linear", "mul", "add"}


@pytest.mark.parametrize("name", ["Total", "Located"])
def test_modules_move_as_by_their_own_methods(backend, library, name):
    assert list(find(backend, lambda x: getattr(library, name)()(x))) == []


def test_a_module_that_is_cast_at_once_is_on_the_device(backend, library):
    with d2ldev.find_leaks("gpu:1", backend=backend) as leaks:
        model = library.Net()
        weight = model.linear.weight
        model.double()
        model(torch.ones(3, dtype=torch.float64))
    assert weight is model.linear.weight
    assert list(leaks) == []


def test_what_a_function_closes_over_is_an_argument(backend, library):
    leaks = find(backend, lambda x: library.close_over(x)())
    assert [leak.line.number for leak in leaks] == [number_of("closed over")]


def test_a_tensor_that_an_object_keeps_is_followed(backend, library):
    (leak,) = find(backend, lambda x: library.Sampler(3).choose(x))
    assert (leak.kind, leak.line.number) == ("mix", number_of("kept"))
    assert list(find(backend, lambda x: library.Sampler(3).choose_by_copy(x))) == []


def test_what_an_object_draws_may_go_back_to_it(backend, library):
    def draw_and_weigh(_x):
        noise = library.Noise()
        drawn = noise.draw(4)
        assert drawn.shape == (4, 3)
        noise.weigh(drawn)

    assert list(find(backend, draw_and_weigh)) == []
    (leak,) = find(backend, lambda x: library.Noise().weigh(x))
    assert leak.line.number == number_of("of the noise")


@pytest.mark.parametrize("name", ["PlacedSampler", "MovedSampler"])
def test_an_object_that_the_test_can_place_makes_inputs(backend, library, name):
    assert list(find(backend, lambda x: getattr(library, name)(3).choose(x))) == []


def test_what_the_test_takes_from_an_object_is_an_input(backend, library):
    with d2ldev.find_leaks("gpu:1", backend=backend) as leaks:
        data, net = library.Data(), library.Net()
        library.train_on(net, library.Pair(*data[0]))
        net(data[1][0])
        for x, y in torch.utils.data.DataLoader(data, batch_size=4):
            library.train_on(net, library.Pair(x, y))
        torch.testing.assert_close(library.Data().y, torch.ones(8, 3))
    assert list(leaks) == []
    (leak,) = find(backend, lambda x: library.create(library.Data()[2][1]))
    assert leak.line.number == number_of("create")


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_of_the_test_are_inputs(backend, library):
    leaks = Leaks()
    coo, csr = torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()
    with follow(backend, "gpu:1", Frames([__file__]), leaks) as place:
        place({"coo": coo, "csr": csr})  # which stay the same objects
        values = torch.ones(2, requires_grad=True)
        made = torch.sparse_coo_tensor([[0, 1], [1, 0]], values, (3, 3))
        for graph in (coo, csr, library.Graph().adjacency, made):
            loss = library.multiply(graph, torch.ones(3))
        loss.backward()
        assert values.grad.tolist() == [1, 1]
    assert list(leaks) == []


def test_what_an_object_keeps_is_known_in_the_next_block(backend, library):
    """As a test's is that gets an object from a fixture."""
    frames, leaks = Frames([__file__]), Leaks()
    with follow(backend, "gpu:1", frames, leaks):
        values = {"sampler": library.Sampler(3)}
    with follow(backend, "gpu:1", frames, leaks) as place:
        place(values)
        values["sampler"].choose(torch.ones(3))
    assert [leak.line.number for leak in leaks] == [number_of("kept")]


def test_a_test_may_ask_for_the_size_of_what_an_object_keeps(backend, library):
    def choose(x):
        sampler = library.Sampler(3)
        assert sampler.order.shape == (len(sampler.order),)
        return sampler.choose(x)

    (leak,) = find(backend, choose)
    assert leak.line.number == number_of("kept")


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    "name", [word.partition("(")[0] for word in LIBRARY.split() if word.startswith("good_")]
)
def test_right_functions_have_no_leaks(backend, library, name):
    assert list(find(backend, getattr(library, name))) == []


def test_a_backward_pass_may_begin_with_a_number_of_the_cpu(backend, library):
    assert list(find(backend, library.begin_with_number)) == []


def test_an_index_may_stay_on_the_cpu_in_a_backward_pass(backend, library):
    assert list(find(backend, lambda x: library.pick(x.requires_grad_()).sum().backward())) == []


def test_a_device_that_the_caller_gives_to_a_library_stands_for_the_tried_one(backend, library):
    device = torch.device("cpu")
    leaks = find(backend, lambda x: library.stay(x, device))
    assert list(leaks) == []


def test_a_name_that_the_caller_gives_to_a_library_stands_for_the_tried_one(backend, library):
    assert list(find(backend, lambda x: x + library.put(x, "cpu"))) == []
    assert list(find(backend, lambda x: x + library.Learner().learn(x))) == []
    (leak,) = find(backend, lambda x: library.Learner().learn_there(x))
    assert leak.line.number == number_of("there")
    leaks = find(backend, library.put_inside).find_failing()
    assert number_of("no device") in {leak.caller.number for leak in leaks}


def test_training_with_modules_buffers_and_loaders_has_no_leaks(backend, library):
    with d2ldev.find_leaks("gpu:1", backend=backend) as leaks:
        model = library.Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        data = torch.utils.data.TensorDataset(torch.rand(8, 3), torch.rand(8, 3))
        for x, y in torch.utils.data.DataLoader(data, batch_size=4, shuffle=True):
            loss = torch.nn.functional.mse_loss(torch.compile(model)(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        places = {str(x.device) for x in (*model.parameters(), *model.buffers(), loss)}
    assert places == {"vgpu:1"}
    assert list(leaks) == []


def test_tensors_that_the_caller_creates_are_on_the_device(backend, library):
    with d2ldev.find_leaks("gpu:1", backend=backend) as leaks:
        made = [
            torch.ones(3),
            torch.ones(3, device="cpu"),
            torch.Tensor([1, 2]),
            torch.from_numpy(np.ones(3)),
            torch.randn(3, generator=torch.Generator()),
            torch.eye(3).to("cpu"),
            torch.ones_like(torch.eye(3), device="cpu"),
            torch.eye(3).new_zeros(3, device="cpu"),
            torch.nn.Linear(3, 3).weight,
            torch.distributions.Normal(0.0, 1.0).sample(),
            library.make_input(np.ones(3)),
        ]
        read = [made[0].cpu().device.type, made[0].numpy().sum(), np.asarray(made[0]).sum()]
    assert {str(x.device) for x in made} == {"vgpu:1"}
    assert read == ["cpu", 3, 3]
    assert list(leaks) == []


def test_workers_of_a_loader_return_inputs(backend):
    with d2ldev.find_leaks("gpu:1", backend=backend) as leaks:
        data = torch.utils.data.TensorDataset(torch.ones(4, 3), torch.arange(4))
        loader = torch.utils.data.DataLoader(
            data, batch_size=2, num_workers=1, timeout=9, persistent_workers=True
        )
        for _ in range(2):
            devices = {x.device.type for batch in loader for x in batch}
            assert devices == {"vgpu"}
    assert (loader.num_workers, loader.timeout) == (1, 9)
    assert list(leaks) == []


def test_the_block_leaves_torch_as_it_was(backend):
    def look():
        return (
            *(torch.from_numpy, torch.compile, torch.autograd._engine_run_backward),
            torch.utils.data.DataLoader.__iter__,
            "__init__" in vars(torch.Tensor),
            torch.ones(3).device.type,
            len(modules._global_parameter_registration_hooks),
            torch._C._len_torch_function_stack(),
        )

    before = look()
    during = []
    with suppress(KeyError), d2ldev.find_leaks("gpu:1", backend=backend):
        during.append(look())
        raise KeyError
    assert during[0] != before == look()


def test_lines_and_functions_are_allowed(backend, library):
    allowed = [f"leaky_library.py:{number_of('create')}", "leaky_library.return_*"]
    for name, number in (("create", 0), ("return_it", 0), ("convert", 1)):
        assert len(find(backend, getattr(library, name), allow=allowed)) == number


FIRST_CELL = """
def add_one(x):
    return x + torch.ones(3)

with d2ldev.find_leaks("gpu:1", backend=backend) as leaks:
    x = torch.ones(3)
    library.create(x)
    library.create_by_made_up_function(x)
    library.good_factories(add_one(x))
"""
SECOND_CELL = """
with d2ldev.find_leaks("gpu:1", backend=backend) as more:
    library.create(add_one(torch.ones(3)))
"""


@pytest.mark.parametrize("file", ["/tmp/ipykernel_7/25{}.py", "<ipython-input-{}-f0>", "<string>"])
def test_the_cells_of_a_notebook_are_the_caller(backend, library, file):
    """IPython compiles each cell under a name of its own; all cells share their global names."""
    namespace = {"d2ldev": d2ldev, "torch": torch, "backend": backend, "library": library}
    for number, cell in enumerate((FIRST_CELL, SECOND_CELL), 1):
        exec(compile(cell, file.format(number), "exec"), namespace)
    lines = [number_of("create"), number_of("made up")]
    assert [leak.line.number for leak in namespace["leaks"]] == lines
    assert [leak.line.number for leak in namespace["more"]] == lines[:1]
    table = namespace["leaks"]._repr_html_()
    assert table.count("<tr>") == 3
    assert f"leaky_library.py:{lines[0]} creates on the CPU" in table


def test_a_block_without_inputs_says_so(backend, library):
    x = torch.ones(3)
    with d2ldev.find_leaks("gpu:1", backend=backend) as leaks:
        library.create(x)
    assert str(leaks) == (
        "no leaks, because no input was on the device: create the inputs in the block"
    )
    assert str(find(backend, library.good_factories)) == "no leaks"


def test_virtual_gpus_stand_for_cuda_devices_where_a_search_asks_for_it(backend, library):
    before, leaks = torch.cuda.is_available(), Leaks()
    with follow(backend, "gpu:1", Frames([__file__]), leaks, as_cuda=True):
        x = torch.ones(3)
        assert (x.device, torch.cuda.current_device()) == (torch.device("cuda:1"), 1)
        library.name_cuda(x)
        library.create(x)
    assert [leak.line.number for leak in leaks] == [number_of("create")]
    assert torch.cuda.is_available() is before


def test_the_cpu_is_refused(backend):
    with (
        pytest.raises(d2ldev.UnsupportedValueError, match="libraries create on the CPU by default"),
        d2ldev.find_leaks("cpu", backend=backend),
    ):
        pass
