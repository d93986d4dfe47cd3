"""The JAX tab of the chapter "GPUs" as it is printed, on the CPU and on two virtual GPUs."""

from book import BOOKS_BATCHES, BOOKS_RUN, BOOKS_TRAINER, run_chapter, run_tour

CHAPTER = """
def called(value):  # what JAX prints depends on its version
    return value if isinstance(value, int) else f'{value.platform}:{value.id}'

# 6.7.1 Computing Devices
from d2ldev.native import jax as d2l
from flax import linen as nn
import jax
from jax import numpy as jnp

# Of ``EXCEPTIONS``: in the place of the chapter's definitions.
cpu, gpu, num_gpus = d2l.cpu, d2l.gpu, d2l.num_gpus
try_gpu, try_all_gpus = d2l.try_gpu, d2l.try_all_gpus

if num_gpus() > 1:
    # JAX has no object for a GPU that is not there, so that this cell is an error in the book, too.
    show_as('named', cpu(), gpu(), gpu(1))
show_as('the number', num_gpus())
show_as('tried', try_gpu(), try_gpu(10), try_all_gpus())

# 6.7.2 Tensors and GPUs
x = jnp.array([1, 2, 3])
show_as('x', x.device)

X = jax.device_put(jnp.ones((2, 3)), try_gpu())
Y = jax.device_put(jax.random.uniform(jax.random.PRNGKey(0), (2, 3)),
                   try_gpu(1))
show_as('X and Y', X.device, Y.device)

Z = jax.device_put(X, try_gpu(1))
show_as('X and Z', X.device, Z.device, X.sum().item() == Z.sum().item() == 6)
show_as('Y + Z', (Y + Z).device, (Y + Z).tolist() == (jax.device_put(Y, cpu()) + 1).tolist())

Z2 = jax.device_put(Z, try_gpu(1))
show_as('Z2', Z2.device)

# 6.7.3 Neural Networks and GPUs
net = nn.Sequential([nn.Dense(1)])

key1, key2 = jax.random.split(jax.random.PRNGKey(0))
x = jax.random.normal(key1, (10,))  # Dummy input
params = net.init(key2, x)  # Initialization call

params = jax.device_put(params, try_gpu())
show_as('net(x)', net.apply(params, x).device, list(net.apply(params, x).shape))
show_as('net', *jax.tree.leaves(jax.tree_util.tree_map(lambda x: x.device, params)))

"""
CHAPTER += BOOKS_TRAINER + BOOKS_BATCHES
CHAPTER += """
import optax

class LinearRegression(d2l.Module):
    lr: float

    def setup(self):
        self.net = nn.Dense(1)

    def loss(self, params, X, y, state):
        return jnp.mean((state.apply_fn({'params': params}, *X) - y) ** 2)

    def configure_optimizers(self):
        return optax.sgd(self.lr)

as_tensor = jnp.array
"""
CHAPTER += BOOKS_RUN
CHAPTER += """
show_as('trained', *(leaf.device for leaf in jax.tree.leaves(trainer.state.params)))
trainer = d2l.Trainer(max_epochs=1, num_gpus=1)
X, y = trainer.prepare_batch([jnp.ones((2, 10)), jnp.ones((2, 1))])

def loss(params, X, y):
    return ((net.apply(params, X) - y) ** 2).mean()

l, grads = jax.value_and_grad(loss)(params, X, y)
show_as('trainer', X.device, y.device, l.device, *(g.device for g in jax.tree.leaves(grads)))
"""
CPU, FIRST, SECOND = "cpu:0", "cpu:1", "cpu:2"


def test_on_the_cpu_the_chapter_runs_as_printed():
    assert run_chapter(CHAPTER, virtual_gpus=0) == {
        "the number": [0],
        "tried": [CPU, CPU, [CPU]],
        "x": [CPU],
        "X and Y": [CPU, CPU],
        "X and Z": [CPU, CPU, True],
        "Y + Z": [CPU, True],
        "Z2": [CPU],
        "net(x)": [CPU, [1]],
        "net": [CPU, CPU],
        "fit": [True, 10],
        "trained": [CPU] * 2,
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
        "Z2": [SECOND],
        "net(x)": [FIRST, [1]],
        "net": [FIRST, FIRST],
        "fit": [True, 10],
        "trained": [FIRST] * 2,
        "trainer": [FIRST] * 5,
    }


def test_in_the_tour_every_result_is_where_its_cell_says():
    assert run_tour("jax") == [0, []]
