# The chapter "GPUs" (Dive into Deep Learning, section 6.7) as a notebook in the percent format:
# `d2ldev tour` runs it, and so does an editor that knows `# %%` cells.
# mypy: ignore-errors

# %% [markdown]
# # 6.7 GPUs
#
# A graphics processor multiplies matrices many times faster than a CPU, if the numbers are in its own memory. This chapter is about that "if": which devices there are, where a tensor is, how it gets somewhere else, and what a model needs. Every cell is the same for every framework; `d2l` stands for the backend that is active.

# %%
from d2ldev import backend as d2l

d2l

# %% [markdown]
# ## 6.7.1 Computing Devices
#
# A device is a small value with a name. The CPU is one device, however many cores it has. Each GPU is a device of its own, counted from 0. Naming a device does not ask whether it exists.

# %%
d2l.cpu(), d2l.gpu(), d2l.gpu(1)

# %%
print(d2l.gpu(1))
d2l.device("cuda:1") is d2l.gpu(1)

# %% [markdown]
# How many GPUs are there really, and what are they?

# %%
d2l.num_gpus()

# %%
for device in d2l.devices():
    print(device, "is", d2l.platform(device))

# %% [markdown]
# Code that shall run everywhere takes a GPU if there is one, and the CPU otherwise. `d2l.try_gpu(i)` chooses so for one device. `d2l.try_all_gpus()` gives a list that is never empty, so that a loop over it always has something to do.

# %%
print(d2l.try_gpu(), d2l.try_gpu(10))
d2l.try_all_gpus()

# %% [markdown]
# ## 6.7.2 Tensors and GPUs
#
# A tensor is made on the CPU unless you say otherwise. `d2l.device_of` tells where its bytes are.

# %% x@d2l.cpu()
x = d2l.asarray([1, 2, 3])
d2l.device_of(x)

# %% [markdown]
# An operation computes where its operands are, and so they all have to be in the same place. TensorFlow alone does not look at them: it computes on the device of the block that it is in, and on the CPU or the first real GPU outside of one. Therefore this chapter computes in blocks: of a device, or of `d2l.strict()`, in which TensorFlow does as the others.
#
# ### 6.7.2.1 Storage on the GPU
#
# Say the device when you make a tensor: it is made there, and never on the CPU first.

# %% X@d2l.try_gpu()
X = d2l.ones((2, 3), device=d2l.try_gpu())
X

# %% Y@d2l.try_gpu(1)
place = d2l.try_gpu(1)
Y = d2l.rand((2, 3), seed=1, device=place)
Y

# %% [markdown]
# In a `with` block a device is the place for everything that is made there without a word about the device. A device is such a block itself; `d2l.on` also takes its name. After the block it is as it was before.

# %% a@d2l.try_gpu() b@d2l.cpu()
with d2l.try_gpu():
    a = d2l.zeros(3)
with d2l.on("cpu"):
    b = d2l.zeros(3)
d2l.device_of(a), d2l.device_of(b)

# %% [markdown]
# A GPU's memory is smaller than the machine's, and tensors stay in it as long as something refers to them. `None` is a number that the framework cannot tell.

# %%
d2l.memory(d2l.try_gpu())

# %% [markdown]
# A device that does not exist is an error as soon as something is to be put there, and no reason to end up on the CPU unnoticed. The error names the devices that there are. (If your machine has a hundred GPUs, this cell disappoints.)

# %% raises-exception
d2l.zeros(3, device=d2l.gpu(99))

# %% [markdown]
# A negative index is not a device at all.

# %% raises-exception
d2l.gpu(-1)

# %% [markdown]
# ### 6.7.2.2 Copying
#
# `X` is on the first GPU and `Y` on the second. No chip can add them where they are, and a framework that moves one of them by itself hides the most expensive part of the line. PyTorch, JAX and array-api-strict refuse by themselves; TensorFlow copies without a word, and MXNet does not look. In a `strict()` block it is an error everywhere, which says what to write instead; `D2LDEV_STRICT=1` puts the whole program into one.

# %% gpus=2 raises-exception
with d2l.strict():
    X + Y

# %% [markdown]
# So we move `X` to where `Y` is, and say so.

# %% X@d2l.try_gpu() Z@d2l.try_gpu(1)
Z = d2l.to(X, d2l.try_gpu(1))
d2l.device_of(X), d2l.device_of(Z)

# %% total@d2l.try_gpu(1)
with d2l.strict():
    total = Y + Z
total, d2l.device_of(total)

# %% [markdown]
# What is there already does not move. `d2l.to` gives back the very same object then, on every framework, and costs next to nothing: it can stand in front of every step.

# %%
d2l.to(Z, d2l.device_of(Z)) is Z

# %% [markdown]
# Whoever wants a second tensor with memory of its own asks for a copy.

# %%
d2l.copy(Z) is Z

# %% [markdown]
# A batch is rarely one tensor. `d2l.to` moves dictionaries, lists, named tuples and what is nested in them as a whole, and leaves alone what is not a tensor. The result is of the same types.

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
# - A GPU works through a queue while Python already prepares what comes next. Printing a value or turning it into NumPy makes Python wait until the queue is empty.
# - Whoever reads the clock has to wait on purpose, or measures how fast the queue was filled.

# %% W@d2l.try_gpu(1)
with d2l.strict():
    W = Z @ d2l.ones((3, 2), like=Z)
d2l.synchronize(d2l.device_of(W))
d2l.to_numpy(W)

# %% [markdown]
# ## 6.7.3 Neural Networks and GPUs
#
# A model is on a device if all of its parameters are. `d2l.place` moves them and everything else that the model keeps, once. Go on with what it returns: some frameworks move the model itself, others make a new one.

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
# A model on the first GPU does not take data of the second. Either of them has to move, and it is you who says which.

# %% gpus=2 raises-exception
with d2l.strict():
    net(Z)

# %% gpus=2 net@d2l.gpu(1) y@d2l.gpu(1)
net = d2l.place(net, d2l.gpu(1))
with d2l.strict():
    y = net(Z)
d2l.device_of(y)

# %% [markdown]
# An optimizer has a state of its own, such as momentum, which follows the model. So one step of training can be taken on each GPU in turn.

# %% gpus=2 learner.parts@d2l.try_all_gpus()[-1]
net = d2l.mlp([2, 8, 1])
learner = d2l.learner(net, lr=0.1)
features = d2l.rand((8, 2), seed=0)
batch = features, features @ d2l.ones((2, 1))
for device in d2l.try_all_gpus():
    learner.sync()
    parts = d2l.place(learner.parts, device)
    learner.replace(parts)
    x, y = d2l.to(batch, device)
    with d2l.strict():
        loss, _ = learner.step((x,), y)
    found = d2l.placement(learner.parts)
    loss = float(d2l.to_numpy(loss))
    print(f"{loss:.3f}", *set(found.values()))

# %% [markdown]
# A training loop needs two lines about devices: the model moves once, before anything else, and each batch moves when it enters. For TensorFlow there is a third: the block in which it computes. Nothing else has to know where it runs.


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
# - Tensors are made on the CPU unless a device is named, as an argument or by a `with` block.
# - What is combined has to be on one device. Moving is a line that you write; if nothing has to move, nothing is copied.
# - A model is moved once with `d2l.place`, its batches at the boundary with `d2l.to`.
# - Results go to the CPU as seldom as possible, since each time Python waits for the GPU.
#
# ## 6.7.5 Exercises
#
# **How long does a matrix product take, large and small, on the CPU and on a GPU?** Warm up, wait before the clock starts and before it stops, and take the median of several rounds. And ask the result where it is. On small matrices the GPU's overhead shows; a virtual GPU is no faster than the CPU that computes for it.

# %%
from statistics import median
from time import perf_counter


def timed(work, rounds=7):
    """Return milliseconds, and the result."""
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
# **How are the parameters of a model on a GPU read?** `d2l.named_tensors` finds them, wherever the framework keeps them, and `d2l.to_numpy` brings one over.

# %% net@d2l.try_gpu()
net = d2l.place(net, d2l.try_gpu())
tensors = d2l.named_tensors(net)
for name, tensor in tensors.items():
    values = d2l.to_numpy(tensor)
    print(name, values.shape, values.sum())

# %% [markdown]
# **What does it cost to bring over one number after each step?** We train for a hundred steps and log the loss of each: first by reading it at once, then with a `DeviceLog`, which keeps the losses where they are and brings them over together. On a GPU the first way waits a hundred times, the second way once; a virtual GPU has computed before the step returns, and there is nothing to wait for.

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
# **Do two GPUs finish two products earlier than one GPU?** They can, because Python only fills the queues and each GPU works through its own. Virtual GPUs share one CPU and gain nothing.

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
# Everything together: data of a line with a little noise, which a loader shuffles; a trainer that moves the model once and each batch when it enters; losses that stay on the device until an epoch is over. It is D2L's `Trainer`, with an optimizer by name, and the same numbers come out on every framework.

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
    # From the noise, 0.0001, to 100: 6 decades.
    length = round(3 * (np.log10(loss) + 4))
    bar = "#" * length
    print(f"{epoch} {loss:9.5f} {bar}")

# %% [markdown]
# ## 13.5 Training on Multiple GPUs
#
# Each GPU has the parameters and a part of the batch, and computes the gradients of its part. Added up, they are those of the whole batch. So every GPU takes the same step, and the parameters stay the same everywhere. `d2l.replicate` is the book's `get_params`, `d2l.split` its `split_batch`; `allreduce` is written out here.

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
# `Trainer(num_gpus=2)` does the same for any model: the data yields the whole batch, each GPU has a part of it, and what is learned is what one GPU learns, to rounding. PyTorch's engine for this has a process for each GPU, which `fit` starts.


# %% gpus=2
def losses(num_gpus):
    trainer = Trainer(4, num_gpus)
    net = d2l.mlp([2, 1], seed=0)
    history = trainer.fit(net, batches, lr=0.03)
    return history["loss"]


for one, two in zip(losses(1), losses(2)):
    print(f"one {one:.6f}  two {two:.6f}")
