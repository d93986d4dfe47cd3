"""PyTorch with shard='parameters': what each GPU holds, and what FSDP cannot split."""

import threading
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from d2ldev_torch import TorchFramework
from d2ldev_torch.training.plain_attributes import PlainAttributes
from d2ldev_torch.training.sharded import TorchShardLearner
from d2ldev_torch.virtual import patches
from processes_program import Plain, ScaledLoss, batches, mlp
from several_gpus import SeenMemory

from d2ldev import Backend, Trainer, UnsupportedValueError
from d2ldev._backend import framework_of
from d2ldev.framework import TrainingSettings

LOSS = "cross_entropy"


@pytest.fixture
def sharing(virtual):
    """A torch backend with two virtual GPUs that can share the parameters of a model."""
    cannot = framework_of(virtual).cannot.get("train with sharded parameters")
    if cannot is not None:
        pytest.skip(cannot)
    return virtual


def test_each_gpu_holds_its_part_and_computes_in_as_few_bits_as_one(sharing):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 2000), torch.nn.Linear(2000, 4))
    whole = sum(4 * x.numel() for x in net.parameters())
    options = {"backend": sharing, "precision": "bf16"}
    (loss,) = Trainer(1, 1, **options).fit(deepcopy(net), batches((6,)), loss=LOSS)["loss"]
    trainer = Trainer(2, 2, shard="parameters", **options)
    seen = trainer.callbacks = SeenMemory(sharing, trainer)
    history = trainer.fit(net, batches((6,)), loss=LOSS, optimizer="adam")
    assert history["loss"][0] == pytest.approx(loss, rel=1e-6)
    # Parameters, gradients, and two tensors of the optimizer.
    assert 0.5 * 4 * whole < max(seen.used) < 0.52 * 4 * whole
    assert set(sharing.placement(net).values()) == {sharing.cpu()}


def test_a_torch_whose_storages_keep_their_memory_is_refused_on_virtual_gpus(monkeypatch):
    monkeypatch.setitem(patches.CANNOT, "train with sharded parameters", "of an older torch")
    older = Backend(TorchFramework(virtual_gpus=2))
    with pytest.raises(UnsupportedValueError, match="of an older torch"):
        Trainer(1, 2, backend=older, shard="parameters").fit(mlp(), batches((6,)), loss=LOSS)
    assert "train with sharded parameters" not in TorchFramework().cannot


def _with_scalar():
    net = mlp()
    net.factor = torch.nn.Parameter(torch.ones(()))
    return net


def _with_more():
    net = mlp()
    parameters = [*net.parameters(), *ScaledLoss().parameters()]
    return net, torch.optim.SGD(parameters, lr=0.1)


def _with_closure():
    net = mlp()
    return net, torch.optim.LBFGS(net.parameters())


def _with_adafactor():
    net = mlp()
    return net, torch.optim.Adafactor(net.parameters())


@pytest.mark.parametrize(
    ("make", "precision", "fix"),
    [
        (lambda: (torch.compile(mlp(), backend="eager"), "sgd"), "model", r"net\[0\].compile"),
        (lambda: (mlp(), "sgd"), "fp16", "precision='bf16'"),
        (lambda: (_with_scalar(), "sgd"), "model", r"of shape \(1,\)"),
        (_with_more, "model", "optimizer='adam'"),
        (_with_closure, "model", "optimizer='adam'"),
        (_with_adafactor, "model", "optimizer='adam'"),
    ],
    ids=["compiled", "fp16", "scalar", "more", "closure", "adafactor"],
)
def test_a_model_that_fsdp_cannot_split_is_refused(virtual, make, precision, fix):
    net, optimizer = make()
    settings = TrainingSettings(optimizer=optimizer, precision=precision, shard="parameters")
    with pytest.raises(UnsupportedValueError, match=fix):
        TorchShardLearner(framework_of(virtual), net, settings, SimpleNamespace(size=2))


# -- plain attributes of the model -----------------------------------------------------------------


class Calls:
    """Has what was learned gathered after each epoch."""

    def on_epoch_end(self, epoch, history):
        """Do nothing else."""


def test_layers_methods_tensors_and_numbers_in_plain_attributes_are_those_of_the_parts(sharing):
    histories = [
        Trainer(3, number, backend=sharing, callbacks=Calls(), **options).fit(
            Plain(), batches((4, 4)), loss=LOSS, lr=0.5
        )
        for number, options in ((1, {}), (2, {"shard": "parameters"}))
    ]
    one, two = histories
    assert one["loss"][2] < one["loss"][0]
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)


def _with_parameter():
    net = Plain()
    net.weights = {"first": [net.a.weight]}
    return net


def test_a_parameter_in_a_plain_attribute_is_refused():
    with pytest.raises(UnsupportedValueError, match=r"Plain\.weights holds a parameter"):
        PlainAttributes(_with_parameter())


def test_what_forward_bound_anew_comes_back_as_the_model_s_own():
    net = Plain()
    net.handle, net.kept = threading.Lock(), []
    attributes = PlainAttributes(net)
    copy = attributes.copy_to(torch.device("cpu"))
    attributes.begin()
    copy.kept.append(1)
    copy.calls, copy.chosen, copy.output = 3, [copy.b], torch.ones(2)
    attributes.bring_back()
    assert copy.steps[0] is copy.a is not net.a
    assert net.steps[0] is net.a
    assert (net.kept, net.calls, net.chosen) == ([1], 3, [net.b])
    assert net.output.tolist() == [1, 1]
    assert copy.handle is net.handle


# -- batch normalization ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "here", "elsewhere", "fix"),
    [
        (torch.nn.BatchNorm1d, "local", "global", "convert_sync_batchnorm"),
        (torch.nn.SyncBatchNorm, "global", "local", "torch.nn.BatchNorm2d"),
    ],
)
def test_statistics_that_a_layer_has_not_are_refused(virtual, layer, here, elsewhere, fix):
    parallel = framework_of(virtual).parallel
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), layer(4))
    parallel.check_batch_norm(net, here)
    with pytest.raises(UnsupportedValueError, match=f"(?s)1 has those of.*{fix}"):
        parallel.check_batch_norm(net, elsewhere)
