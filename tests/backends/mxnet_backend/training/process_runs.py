"""Runs of training whose results do not depend on how many processes make them.

As a program it makes some of them, and keeps what this process has found in the folder that its
first argument names.
"""

import os
import pickle
import sys

import numpy as np
from d2ldev_mxnet.framework import mx
from d2ldev_mxnet.models import initialise
from several_gpus import CLASSES, FEATURES, PAIR, flat_batches, train

import d2ldev

nn = mx.gluon.nn
BATCHES = [*flat_batches(14, 5), *flat_batches(1, 1)]
"""Of 5, 5, 4 and 1 examples."""


def initialise_all(net):
    mx.random.seed(0)
    net.initialize(mx.init.Xavier())
    return net


def mlp():
    net = nn.HybridSequential()
    net.add(nn.Dense(8, "tanh", in_units=FEATURES), nn.Dense(CLASSES, in_units=8))
    return initialise_all(net)


def unbuilt():
    """Return a model without shapes, whose values each process would make differently."""
    value = 0.1 + int(os.environ.get("RANK", "0"))
    net = nn.HybridSequential()
    net.add(nn.Dense(CLASSES, weight_initializer=mx.init.Constant(value)))
    return initialise_all(net)


def freeze_layer():
    net = mlp()
    net[0].collect_params().setattr("grad_req", "null")
    return net


def add_layers():
    net = mlp()
    net.collect_params().setattr("grad_req", "add")
    return net


def double():
    net = mlp()
    net.cast("float64")
    return net


class Branches(nn.Block):
    """A model that uses a part only for some examples, and another part never."""

    def __init__(self):
        super().__init__()
        self.common, self.rare, self.never = (nn.Dense(3, in_units=FEATURES) for _ in range(3))
        for each in (self.common, self.rare, self.never):
            self.register_child(each)
        initialise_all(self)

    def forward(self, x):
        is_rare = x[:, :1] > 1
        if not is_rare.any():
            return self.common(x)
        return mx.np.where(is_rare, self.rare(x), self.common(x))


class Own(nn.Block):
    """A model that gives its loss itself."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def training_step(self, batch):
        return mx.gluon.loss.SoftmaxCrossEntropyLoss()(self.net(batch[0]), batch[1]).mean()

    validation_step = training_step


def of_trainer(optimizer, options=None, **more):
    return lambda net: mx.gluon.Trainer(net.collect_params(), optimizer, options, **more)


def of_trainer_by_rank(net):
    """Return a trainer that has another rate, schedule and number of steps in each process."""
    rank = int(os.environ.get("RANK", "0"))
    options = {
        "learning_rate": 0.1 / (1 + rank),
        "lr_scheduler": mx.lr_scheduler.FactorScheduler(step=2 + rank, factor=0.5 / (1 + rank)),
        "wd": 0.01 * rank,
        "begin_num_update": 5 * rank,
    }
    trainer = mx.gluon.Trainer(net.collect_params(), "adam", options)
    for _ in range(3 * rank):
        trainer.optimizer._update_count(0)
    return trainer


class Scaled(nn.Block):
    """A model that has a parameter of shape ()."""

    def __init__(self):
        super().__init__()
        self.net, self.scale = mlp(), self.params.get("scale", shape=())
        initialise(self.scale, mx.np.ones(()))

    def forward(self, x):
        return self.net(x) * self.scale.data(x.ctx)


class Thawed(nn.Block):
    """A model with a bias that every other step trains, whose gradient is then another array."""

    def __init__(self):
        super().__init__()
        self.net, self.steps = mlp(), 0

    def forward(self, x):
        if mx.autograd.is_training():
            self.net[0].bias.grad_req = "write" if self.steps % 2 else "null"
            self.steps += 1
        return self.net(x)


def normalize():
    net = nn.HybridSequential()
    net.add(nn.BatchNorm(in_channels=FEATURES, momentum=0), nn.Dense(CLASSES, in_units=FEATURES))
    return initialise_all(net)


def loader():
    """Return a shuffled loader, which would have another order in each process."""
    np.random.seed(int(os.environ.get("RANK", "0")))
    ((x, y),) = flat_batches(13, 13)
    return mx.gluon.data.DataLoader(mx.gluon.data.ArrayDataset(x, y), 5, shuffle=True)


def drop_some():
    net = nn.HybridSequential()
    net.add(nn.Dropout(0.5), nn.Dense(2, use_bias=False, in_units=32))
    net.initialize(mx.init.Zero())
    return net


def own_output(prediction, y):
    """Return a loss by which each of two examples trains weights of its own."""
    return mx.npx.pick(prediction, y).mean()


CROSS = {"loss": "cross_entropy", "lr": 0.1}
CASES = {
    "adamw": (mlp, BATCHES, {"optimizer": "adamw"}),
    "adagrad": (mlp, BATCHES, {"optimizer": "adagrad"}),
    "unbuilt": (unbuilt, BATCHES, {"optimizer": "adam"}),
    "scaled": (Scaled, BATCHES, {}),
    "frozen": (freeze_layer, BATCHES, {"optimizer": "momentum"}),
    "thawed": (Thawed, BATCHES, {"optimizer": "momentum"}),
    "adding": (add_layers, BATCHES, {}),
    "double": (double, [(x.astype("float64"), y) for x, y in BATCHES], {}),
    "branches": (Branches, BATCHES, {"optimizer": "momentum", "gradient_clip_val": 0.3}),
    "branches, accumulated": (
        Branches,
        BATCHES,
        {"optimizer": "adam", "accumulate_grad_batches": 2},
    ),
    "own step": (Own, BATCHES, {"loss": None}),
    "optimizer": (mlp, BATCHES, {"optimizer": lambda _: mx.optimizer.Nadam(learning_rate=0.01)}),
    "trainer": (mlp, BATCHES, {"optimizer": of_trainer("sgd", {"momentum": 0.9}), "fits": 2}),
    "a trainer by rank": (mlp, BATCHES, {"optimizer": of_trainer_by_rank}),
    "without a store": (mlp, BATCHES, {"optimizer": of_trainer("adam", kvstore=None)}),
    "a loader": (mlp, loader, {"metrics": ["accuracy"]}),
    "a part of a loader": (mlp, loader, {"metrics": ["accuracy"], "reads_shard": True}),
}


# Each process normalizes with the statistics of its own examples.
OTHERS = {
    "dropped": (drop_some, PAIR, {"loss": own_output}),
    "normalized": (normalize, BATCHES[:2], {"metrics": ["accuracy"]}),
}


def run(case, num_gpus):
    """Return what a case ends with: the values of the parameters, in their order, and a history."""
    make, data, options = {**CASES, **OTHERS}[case]
    options = {**CROSS, **options}
    if callable(options.get("optimizer")):
        del options["lr"]
    if options["loss"] is None:
        del options["loss"]
    data = data() if callable(data) else data
    values, history = train(d2ldev.get_backend("mxnet"), make, data, num_gpus, **options)
    return list(values.values()), history


if __name__ == "__main__":
    mx.npx.set_np()
    folder, num_gpus, *cases = sys.argv[1:]
    found = {case: run(case, int(num_gpus)) for case in cases}
    with open(f"{folder}/{os.environ['RANK']}", "wb") as file:
        pickle.dump(found, file)
