"""Batches that are dicts: Gluon's blocks get their inputs by name; and Gluon's own metrics."""

import numpy as np
import pytest
from d2ldev_mxnet.framework import mx

from d2ldev import UnsupportedValueError
from d2ldev.training.trainer import Trainer

RANDOM = np.random.RandomState(0)
X, MASK, Y = (RANDOM.rand(8, 3).astype("float32") for _ in range(3))
ORDERS = [{"mask": MASK, "x": X, "y": Y}, {"y": Y, "x": X, "mask": MASK}]


@pytest.fixture(autouse=True)
def _numpy_arrays(set_np):
    """As a user of Gluon with NumPy arrays begins."""


class Masked(mx.gluon.Block):
    def __init__(self):
        super().__init__()
        self.dense = mx.gluon.nn.Dense(3, in_units=3)

    def forward(self, x, mask=None, scale=1):
        return self.dense(x) * mask * scale


class Hybrid(mx.gluon.HybridBlock):
    """With a parameter of its own, which Gluon gives to it."""

    def __init__(self):
        super().__init__()
        self.weight = self.params.get("weight", shape=(3, 3))

    def hybrid_forward(self, F, x, mask=None, scale=None, *, weight):  # noqa: N803
        return F.np.dot(x, weight) * mask


class Mixed(Hybrid):
    """As Gluon's own layers have it: the parameter among the inputs."""

    def hybrid_forward(self, F, x, weight, mask):  # noqa: N803
        return F.np.dot(x, weight) * mask


class Whatever(Masked):
    def forward(self, *inputs):
        return super().forward(*inputs)


def initialized(model):
    mx.random.seed(0)
    net = model()
    net.initialize()
    return net


def loss_of(net, *inputs):
    prediction = net(*map(mx.np.array, inputs)).asnumpy()
    return pytest.approx([np.mean((prediction - Y) ** 2)], rel=1e-5)


@pytest.mark.parametrize("num_gpus", [0, 1])
@pytest.mark.parametrize("batch", ORDERS, ids=lambda batch: "".join(batch))
@pytest.mark.parametrize("model", [Masked, Hybrid])
def test_a_dict_gives_inputs_by_name(backend, model, batch, num_gpus):
    net = initialized(model)
    expected = loss_of(net, X, MASK)
    history = Trainer(1, num_gpus, backend=backend).fit(net, [batch], [batch], lr=0.0)
    assert history["loss"] == expected
    assert history["val_loss"] == expected


def test_a_hybridized_block_has_the_same_names(backend):
    net = initialized(Hybrid)
    net.hybridize()
    assert backend.learner(net).input_names == ("x", "mask", "scale")


def test_a_block_s_own_parameters_are_no_inputs(backend):
    assert backend.learner(initialized(Mixed)).input_names == ("x", "mask")


def test_a_block_that_takes_anything_gets_inputs_in_their_order(backend):
    net = initialized(Whatever)
    expected = loss_of(net, MASK, X)
    assert Trainer(1, backend=backend).fit(net, [ORDERS[0]])["loss"] == expected


def test_a_gap_between_inputs_is_refused(backend):
    net = initialized(Masked)
    with pytest.raises(UnsupportedValueError, match="'mask' before 'scale'"):
        Trainer(1, backend=backend).fit(net, [{"x": X, "scale": MASK, "y": Y}])


def test_gluon_s_metrics_are_refused(backend):
    net = initialized(Masked)
    with pytest.raises(UnsupportedValueError, match="running value"):
        Trainer(1, backend=backend).fit(net, [ORDERS[0]], metrics=[mx.metric.MSE()])


def test_what_is_proposed_instead_of_them_is_a_metric(backend):
    net = initialized(Masked)
    with pytest.raises(UnsupportedValueError) as error:
        Trainer(1, backend=backend).fit(net, [ORDERS[0]], metrics=[mx.metric.MAE()])
    names = {}
    exec(error.value.fix.partition("a function: ")[2], names)
    history = Trainer(1, backend=backend).fit(net, [ORDERS[0]], metrics=[names["error"]])
    assert 0 < history["error"][0] < 10


def test_gluon_s_losses_are_called_with_the_prediction_first(backend):
    net = initialized(Masked)
    entropy = mx.gluon.loss.SigmoidBinaryCrossEntropyLoss()
    prediction = net(mx.np.array(X), mx.np.array(MASK))
    expected = entropy(prediction, mx.np.array(Y)).mean().item()
    trainer = Trainer(1, backend=backend)
    history = trainer.fit(net, [ORDERS[0]], loss=lambda p, y: entropy(p, y).mean())
    assert history["loss"] == pytest.approx([expected])
