# The chapter "GPUs" (Dive into Deep Learning, section 6.7) as a notebook in the percent format.
# `d2ldev tour` runs it, and editors with `# %%` cells do, too.

# mypy: ignore-errors

# %% [markdown]
# # 6.7 GPUs
#
# A graphics processor multiplies matrices many times faster than a CPU, if the numbers are in its own memory. This chapter shows how to list devices, find the device of a tensor, and move tensors and models. Every cell is the same for every framework; `d2l` is the active backend.

# %%
from d2ldev import backend as d2l

d2l

# %% [markdown]
# ## 6.7.1 Computing Devices
#
# A device is a small value with a name. The CPU is one device, with all of its cores. Each GPU is a device, counted from 0. Naming a device does not check that it exists.

# %%
d2l.cpu(), d2l.gpu(), d2l.gpu(1)

# %%
print(d2l.gpu(1))
d2l.device("cuda:1") is d2l.gpu(1)

# %% [markdown]
# How many GPUs does the machine have, and what are they?

# %%
d2l.num_gpus()

# %%
for device in d2l.devices():
    print(device, "is", d2l.platform(device))

# %% [markdown]
# Portable code uses a GPU if there is one, and the CPU otherwise. `d2l.try_gpu(i)` chooses one device this way. `d2l.try_all_gpus()` returns all GPUs, or the CPU, so a loop over the list always runs.

# %%
print(d2l.try_gpu(), d2l.try_gpu(10))
d2l.try_all_gpus()

# %% [markdown]
# ## 6.7.2 Tensors and GPUs
#
# A tensor is made on the CPU by default. `d2l.device_of` returns the device of its bytes.

# %% x@d2l.cpu()
x = d2l.asarray([1, 2, 3])
d2l.device_of(x)

# %% [markdown]
# An operation runs on the device of its operands, so all of them have to be on one device. Only TensorFlow ignores the operands: it runs an operation on the device of the enclosing block. Outside of a block it uses the first real GPU, or the CPU. Therefore this chapter computes in blocks: of a device, or of `d2l.strict()`, in which TensorFlow follows the operands, too.
#
# ### 6.7.2.1 Storage on the GPU
#
# Name the device when you make a tensor. The tensor is made there, and never on the CPU first.

# %% X@d2l.try_gpu()
X = d2l.ones((2, 3), device=d2l.try_gpu())
X

# %% Y@d2l.try_gpu(1)
place = d2l.try_gpu(1)
Y = d2l.rand((2, 3), seed=1, device=place)
Y

# %% [markdown]
# In a `with` block, a device is the default for every new tensor. A device is a context manager itself; `d2l.on` also takes its name. After the block, the previous default is back.

# %% a@d2l.try_gpu() b@d2l.cpu()
with d2l.try_gpu():
    a = d2l.zeros(3)
with d2l.on("cpu"):
    b = d2l.zeros(3)
d2l.device_of(a), d2l.device_of(b)

# %% [markdown]
# A GPU's memory is smaller than the machine's. A tensor occupies memory as long as something refers to it. `None` is a number that the framework does not report.

# %%
d2l.memory(d2l.try_gpu())

# %% [markdown]
# Using a device that does not exist is an error, and never falls back to the CPU. The error lists the existing devices. (On a machine with a hundred GPUs, this cell fails.)

# %% raises-exception
d2l.zeros(3, device=d2l.gpu(99))

# %% [markdown]
# A negative index is invalid.

# %% raises-exception
d2l.gpu(-1)

# %% [markdown]
# ### 6.7.2.2 Copying
#
# `X` is on the first GPU, and `Y` on the second. One of them has to move before an addition. A framework that moves it by itself hides the most expensive part of the line. PyTorch, JAX and array-api-strict raise an error; TensorFlow copies silently, and MXNet does not check. In a `strict()` block all of them raise an error, which contains the fix. `D2LDEV_STRICT=1` puts the whole program into a block.

# %% gpus=2 raises-exception
with d2l.strict():
    X + Y

# %% [markdown]
# So we move `X` to the device of `Y`.

# %% X@d2l.try_gpu() Z@d2l.try_gpu(1)
Z = d2l.to(X, d2l.try_gpu(1))
d2l.device_of(X), d2l.device_of(Z)

# %% total@d2l.try_gpu(1)
with d2l.strict():
    total = Y + Z
total, d2l.device_of(total)

# %% [markdown]
# A tensor that is on the device already does not move. `d2l.to` then returns the same object, on every framework, and takes almost no time. So you can call it before every step.

# %%
d2l.to(Z, d2l.device_of(Z)) is Z

# %% [markdown]
# `d2l.copy` always returns a new tensor with memory of its own.

# %%
d2l.copy(Z) is Z

# %% [markdown]
# A batch is rarely one tensor. `d2l.to` moves dictionaries, lists and named tuples with all tensors that are nested in them. The result has the same types, and keeps all other values.

# %% moved@d2l.try_gpu()
from collections import namedtuple

Batch = namedtuple("Batch", ["x", "y"])
sizes = d2l.ones((4, 2))
batch = Batch(
    x={"sizes": sizes, "name": "cats"},
    y=d2l.arange(4),
)
moved = d2l.to(batch, d2l.try_gpu())
print(type(moved).__name__, moved.x["name"])
print(d2l.device_of(moved.x["sizes"]))

# %%
d2l.to(moved, d2l.try_gpu()) is moved

# %% [markdown]
# ### 6.7.2.3 Side Notes
#
# Three things make a program with GPUs slow.
#
# - Copying between devices takes far longer than computing on one of them. One large copy is better than many small ones.
# - A GPU works through a queue while Python prepares the next operations. Printing a value or turning it into NumPy makes Python wait until the queue is empty.
# - To measure the time of a computation, wait for the queue. Otherwise you measure how fast Python fills it.

# %% W@d2l.try_gpu(1)
with d2l.strict():
    W = Z @ d2l.ones((3, 2), like=Z)
d2l.synchronize(d2l.device_of(W))
d2l.to_numpy(W)

# %% [markdown]
# ## 6.7.3 Neural Networks and GPUs
#
# A model is on a device if all of its parameters are. `d2l.place` moves them and all other tensors of the model, once. Use the model that it returns: some frameworks move the model itself, others make a new one.

# %% y@d2l.try_gpu()
net = d2l.mlp([3, 4, 1])
net = d2l.place(net, d2l.try_gpu())
with d2l.strict():
    y = net(X)
y

# %% net@d2l.try_gpu()
for name, place in d2l.placement(net).items():
    print(name, "on", place)

# %% [markdown]
# A model on the first GPU refuses data on the second. One of them has to move, and you choose which.

# %% gpus=2 raises-exception
with d2l.strict():
    net(Z)

# %% gpus=2 net@d2l.gpu(1) y@d2l.gpu(1)
net = d2l.place(net, d2l.gpu(1))
with d2l.strict():
    y = net(Z)
d2l.device_of(y)

# %% [markdown]
# An optimizer has state of its own, such as momentum, which moves with the model. So a model can take one training step on each GPU in turn.

# %% gpus=2 learner.components@d2l.try_all_gpus()[-1]
net = d2l.mlp([2, 8, 1])
learner = d2l.learner(net, lr=0.1)
features = d2l.rand((8, 2), seed=0)
batch = features, features @ d2l.ones((2, 1))
for device in d2l.try_all_gpus():
    learner.sync()
    learner.replace(d2l.place(learner.components, device))
    x, y = d2l.to(batch, device)
    with d2l.strict():
        loss, _ = learner.step((x,), y)
    found = d2l.placement(learner.components)
    loss = float(d2l.to_numpy(loss))
    print(f"{loss:.3f}", *set(found.values()))

# %% [markdown]
# A training loop needs two lines about devices: one moves the model before training, and one moves each batch. For TensorFlow a third line opens the block in which it computes. The rest of the loop does not depend on the device.


# %%
class Trainer:
    def __init__(self, device):
        self.device = device

    def prepare_model(self, model):
        model = d2l.place(model, self.device)
        self.model = model

    def prepare_batch(self, batch):
        return d2l.to(batch, self.device)

    def errors(self, batches):
        for batch in batches:
            X, y = self.prepare_batch(batch)
            with self.device:
                error = self.model(X) - y
            yield error


# %% error@d2l.try_gpu()
trainer = Trainer(d2l.try_gpu())
trainer.prepare_model(d2l.mlp([3, 4, 1]))
batches = []
for i in range(3):
    features = d2l.rand((2, 3), seed=i)
    batches.append((features, d2l.ones((2, 1))))
for error in trainer.errors(batches):
    square = d2l.to_numpy(error * error)
    place = d2l.device_of(error)
    print(f"{square.mean():.3f} on {place}")

# %% [markdown]
# ## 6.7.4 Summary
#
# - Tensors are made on the CPU unless an argument or a `with` block names a device.
# - The operands of an operation have to be on one device. You move them with a line of code. It copies only tensors on other devices.
# - Move a model once with `d2l.place`, and each batch with `d2l.to`.
# - Copy results to the CPU rarely: each time Python waits for the GPU.
#
# ## 6.7.5 Exercises
#
# **How long does a matrix product take, large and small, on the CPU and on a GPU?** Warm up, wait before the clock starts and before it stops, and take the median of several rounds. Check the device of the result. On small matrices the GPU's overhead dominates. A virtual GPU is as fast as the CPU that computes for it.

# %%
from statistics import median
from time import perf_counter


def timed(work, rounds=7):
    """Return the median time in milliseconds, and the result."""
    result = work()  # sets everything up
    times = []
    for _ in range(rounds):
        d2l.synchronize()
        start = perf_counter()
        work()
        d2l.synchronize()
        times.append(perf_counter() - start)
    return 1000 * median(times), result


# %% product@d2l.devices()[-1]
for n in (16, 512):
    for place in d2l.devices():
        A = d2l.rand((n, n), device=place)
        with place:
            time, product = timed(lambda: A @ A)
        place = d2l.device_of(product)
        print(f"{n} x {n} on {place}:", end=" ")
        print(f"{time:.3f} ms")

# %% [markdown]
# **How do you read the parameters of a model on a GPU?** `d2l.named_tensors` finds them on every framework, and `d2l.to_numpy` copies one to the CPU.

# %% net@d2l.try_gpu()
net = d2l.place(net, d2l.try_gpu())
tensors = d2l.named_tensors(net)
for name, tensor in tensors.items():
    values = d2l.to_numpy(tensor)
    print(name, values.shape, values.sum())

# %% [markdown]
# **How much time does it take to read one number after each step?** We train for a hundred steps and log the loss of each. First we read it at once. Then we use a `DeviceLog`, which keeps the losses on the device and copies them together. On a GPU the first way waits a hundred times, and the second way waits once. A virtual GPU computes before the step returns, so neither way waits.

# %% net@place X@place y@place
from d2ldev import DeviceLog

place = d2l.try_gpu()
net = d2l.mlp([20, 64, 1], device=place)
learner = d2l.learner(net)
X = d2l.rand((64, 20), seed=1, device=place)
y = d2l.ones((64, 1), device=place)


def one_at_a_time():
    for _ in range(100):
        loss, _ = learner.step((X,), y)
        float(d2l.to_numpy(loss))


def all_in_the_end():
    log = DeviceLog(d2l, place)
    for _ in range(100):
        loss, _ = learner.step((X,), y)
        log.add(loss=loss)
    return log.flush()


# %%
for way in (one_at_a_time, all_in_the_end):
    time, _ = timed(way)
    print(f"{way.__name__}: {time:.2f} ms")

# %% [markdown]
# **Do two GPUs compute two products faster than one GPU?** They can: Python only fills the queues, and each GPU works through its own. Virtual GPUs share one CPU, and are not faster.

# %% gpus=2 one[1]@d2l.gpu(0) two[1][0]@d2l.gpu(0) two[1][1]@d2l.gpu(1)
n = 512
a = d2l.rand((n, n), seed=0, device=d2l.gpu(0))
b = d2l.rand((n, n), seed=0, device=d2l.gpu(1))
with d2l.strict():
    one = timed(lambda: (a @ a, a @ a))
    two = timed(lambda: (a @ a, b @ b))
for time, products in (one, two):
    places = map(d2l.device_of, products)
    print(*places, f"{time:.2f} ms")

# %% [markdown]
# ## A training run
#
# We now combine these parts. The data are a line with a little noise, and a loader shuffles them. A trainer moves the model once, and then each batch. The losses stay on the device until the epoch ends. It is D2L's `Trainer`, with an optimizer by name, and gives the same numbers on every framework.

# %%
import numpy as np

from d2ldev import ArrayLoader, Trainer

rng = np.random.default_rng(0)
inputs = rng.normal(size=(512, 2))
noise = 0.01 * rng.normal(size=(512, 1))
targets = inputs @ [[2.0], [-3.4]] + 4.2 + noise
data = ArrayLoader(
    inputs.astype("float32"),
    targets.astype("float32"),
    batch_size=32,
    shuffle=True,
)

# %% trainer.model@trainer.device
has_gpu = d2l.num_gpus() > 0
trainer = Trainer(8, num_gpus=int(has_gpu))
net = d2l.mlp([2, 1])
history = trainer.fit(net, data, lr=0.03)
print("on", trainer.device)

# %%
for epoch, loss in enumerate(history["loss"]):
    # From 0.0001, the noise, to 100: six decades.
    length = round(3 * (np.log10(loss) + 4))
    bar = "#" * length
    print(f"{epoch} {loss:9.5f} {bar}")

# %% [markdown]
# ## 13.5 Training on Multiple GPUs
#
# Each GPU has the parameters and a part of the batch, and computes the gradients of its part. Their sum is the gradient of the whole batch. So every GPU takes the same step, and the parameters stay the same on all GPUs. `d2l.replicate` is the book's `get_params`, and `d2l.split` is its `split_batch`. The cell below defines `allreduce`.

# %% gpus=2 params[0]@d2l.gpu(0) params[1]@d2l.gpu(1)
gpus = [d2l.gpu(0), d2l.gpu(1)]
params = d2l.replicate(d2l.zeros((1, 2)), gpus)


def gradient(w, part):
    X, y = part
    place = d2l.device_of(w)
    column = d2l.ones((2, 1), device=place)
    n = X.shape[0]
    row = d2l.ones((1, n), device=place)
    error = (X * w) @ column - y
    return row @ (X * error)


def allreduce(first, second):
    total = first + d2l.to(second, gpus[0])
    return [total, d2l.to(total, gpus[1])]


def step(w, total):
    return w - 0.1 / 32 * total


targets = inputs @ [[2.0], [-3.4]]
X = inputs.astype("float32")
y = targets.astype("float32")
batches = ArrayLoader(X, y, batch_size=32)
with d2l.strict():
    for X, y in batches:
        parts = d2l.split((X, y), gpus)
        grads = map(gradient, params, parts)
        total = allreduce(*grads)
        params = list(map(step, params, total))
for w in params:
    print(d2l.device_of(w), d2l.to_numpy(w))

# %% [markdown]
# ## 13.6 Concise Implementation for Multiple GPUs
#
# `Trainer(num_gpus=2)` does the same for any model. The data yield whole batches, and each GPU gets a part of them. The result is the same as on one GPU, to rounding. In PyTorch, `fit` starts a process for each GPU.


# %% gpus=2
def losses(num_gpus):
    trainer = Trainer(4, num_gpus)
    net = d2l.mlp([2, 1], seed=0)
    history = trainer.fit(net, batches, lr=0.03)
    return history["loss"]


for one, two in zip(losses(1), losses(2)):
    print(f"one {one:.6f}  two {two:.6f}")
