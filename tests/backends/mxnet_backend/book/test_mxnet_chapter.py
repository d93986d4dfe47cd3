"""The MXNet tab of the chapter "GPUs" as it is printed, on the CPU and on two virtual GPUs."""

from book import BOOKS_BATCHES, BOOKS_RUN, BOOKS_TRAINER, run_chapter, run_tour

CHAPTER = """
# 6.7.1 Computing Devices
from d2ldev.native import mxnet as d2l
from mxnet import autograd, gluon, np, npx
from mxnet.gluon import nn
npx.set_np()

# Of ``EXCEPTIONS``: in the place of the chapter's definitions.
cpu, gpu, num_gpus = d2l.cpu, d2l.gpu, d2l.num_gpus
try_gpu, try_all_gpus = d2l.try_gpu, d2l.try_all_gpus

show_as('named', cpu(), gpu(), gpu(1))
show_as('the number', num_gpus())
show_as('tried', try_gpu(), try_gpu(10), try_all_gpus())

# 6.7.2 Tensors and GPUs
x = np.array([1, 2, 3])
show_as('x', x.ctx)

X = np.ones((2, 3), ctx=try_gpu())
Y = np.random.uniform(size=(2, 3), ctx=try_gpu(1))
show_as('X and Y', X.ctx, Y.ctx)

Z = X.copyto(try_gpu(1))
show_as('X and Z', X.ctx, Z.ctx, X.sum().item() == Z.sum().item() == 6)
show_as('Y + Z', (Y + Z).ctx, (Y + Z).tolist() == (Y.copyto(cpu()) + 1).tolist())
show_as('Z.as_in_ctx is Z', Z.as_in_ctx(try_gpu(1)) is Z)

# 6.7.3 Neural Networks and GPUs
net = nn.Sequential()
net.add(nn.Dense(1))
net.initialize(ctx=try_gpu())

show_as('net(X)', net(X).ctx, list(net(X).shape))
show_as('net', net[0].weight.data().ctx)

@d2l.add_to_class(d2l.Module)
def set_scratch_params_device(self, device):
    for attr in dir(self):
        a = getattr(self, attr)
        if isinstance(a, np.ndarray):
            with autograd.record():
                setattr(self, attr, a.as_in_ctx(device))
            getattr(self, attr).attach_grad()
        if isinstance(a, d2l.Module):
            a.set_scratch_params_device(device)
        if isinstance(a, list):
            for elem in a:
                elem.set_scratch_params_device(device)

"""
CHAPTER += BOOKS_TRAINER + BOOKS_BATCHES
CHAPTER += """
@d2l.add_to_class(d2l.Trainer)
def prepare_model(self, model):
    model.trainer = self
    model.board.xlim = [0, self.max_epochs]
    if self.gpus:
        model.collect_params().reset_ctx(self.gpus[0])
        model.set_scratch_params_device(self.gpus[0])
    self.model = model

class LinearRegression(d2l.Module):
    def __init__(self, lr):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Dense(1)
        self.net.initialize()

    def loss(self, y_hat, y):
        return ((y_hat - y) ** 2).mean()

    def configure_optimizers(self):
        return gluon.Trainer(self.collect_params(), 'sgd', {'learning_rate': self.lr})

as_tensor = np.array
"""
CHAPTER += BOOKS_RUN
CHAPTER += """
show_as('trained', model.net.weight.data().ctx)

class Model(d2l.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Dense(1, in_units=3)
        self.net.initialize()
        self.w = np.ones((3, 1))

    def forward(self, X):
        return self.net(X) + np.dot(X, self.w)

model = Model()
trainer = d2l.Trainer(max_epochs=1, num_gpus=1)
trainer.prepare_model(model)
X, y = trainer.prepare_batch([np.ones((2, 3)), np.ones((2, 1))])
model.w.attach_grad()
with autograd.record():
    loss = ((trainer.model(X) - y) ** 2).mean()
loss.backward()
gradients = model.w.grad, model.net.weight.grad()
show_as('trainer', X.ctx, y.ctx, loss.ctx, *(gradient.ctx for gradient in gradients))
"""
CPU, FIRST, SECOND = "cpu(0)", "cpu(1)", "cpu(2)"


def test_on_the_cpu_the_chapter_runs_as_printed():
    assert run_chapter(CHAPTER, virtual_gpus=0) == {
        "named": [CPU, "gpu(0)", "gpu(1)"],
        "the number": [0],
        "tried": [CPU, CPU, [CPU]],
        "x": [CPU],
        "X and Y": [CPU, CPU],
        "X and Z": [CPU, CPU, True],
        "Y + Z": [CPU, True],
        "Z.as_in_ctx is Z": [True],
        "net(X)": [CPU, [2, 1]],
        "net": [CPU],
        "fit": [True, 10],
        "trained": [CPU],
        "trainer": [CPU] * 5,
    }


def test_on_two_virtual_gpus_the_chapter_runs_as_printed():
    assert run_chapter(CHAPTER, virtual_gpus=2) == {
        "named": [CPU, FIRST, SECOND],
        "the number": [2],
        "tried": [FIRST, CPU, [FIRST, SECOND]],
        "x": [CPU],
        "X and Y": [FIRST, SECOND],
        "X and Z": [FIRST, SECOND, True],
        "Y + Z": [SECOND, True],
        "Z.as_in_ctx is Z": [True],
        "net(X)": [FIRST, [2, 1]],
        "net": [FIRST],
        "fit": [True, 10],
        "trained": [FIRST],
        "trainer": [FIRST] * 5,
    }


def test_in_the_tour_every_result_is_where_its_cell_says():
    assert run_tour("mxnet") == [0, []]
