"""Batches that are dicts: torch's modules get their inputs by name."""

import pytest
import torch
from torch import nn

from d2ldev import UnsupportedValueError
from d2ldev.training.trainer import Trainer

torch.manual_seed(0)
X, MASK, Y = torch.randn(8, 3), torch.rand(8, 3), torch.randn(8, 3)
ORDERS = [{"mask": MASK, "x": X, "y": Y}, {"y": Y, "x": X, "mask": MASK}]


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, mask=None, scale=1):
        return self.linear(x) * mask * scale


class Typed(Masked):
    """As TorchScript wants it."""

    def forward(self, x, mask, scale: int = 1):
        return self.linear(x) * mask * scale


class Whatever(Masked):
    def forward(self, *inputs):
        return super().forward(*inputs)


@pytest.mark.parametrize("num_gpus", [0, 1])
@pytest.mark.parametrize("batch", ORDERS, ids=lambda batch: "".join(batch))
def test_a_dict_gives_inputs_by_name(virtual, batch, num_gpus):
    net = Masked()
    expected = nn.functional.mse_loss(net(X, MASK), Y).item()
    history = Trainer(1, num_gpus, backend=virtual).fit(net, [batch], [batch], lr=0.0)
    assert history["loss"] == pytest.approx([expected])
    assert history["val_loss"] == pytest.approx([expected])


def test_a_module_that_takes_anything_gets_inputs_in_their_order(torch_backend):
    net = Whatever()
    expected = nn.functional.mse_loss(net(MASK, X), Y).item()
    history = Trainer(1, backend=torch_backend).fit(net, [ORDERS[0]])
    assert history["loss"] == pytest.approx([expected])


def test_a_gap_between_inputs_is_refused(torch_backend):
    with pytest.raises(UnsupportedValueError, match="'mask' before 'scale'"):
        Trainer(1, backend=torch_backend).fit(Masked(), [{"x": X, "scale": MASK, "y": Y}])


@pytest.mark.parametrize(
    "made",
    [lambda net: torch.compile(net, backend="eager"), torch.jit.script],
    ids=["compiled", "scripted"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_compiled_has_the_names_of_its_module(torch_backend, made):
    assert torch_backend.learner(made(Typed())).input_names == ("x", "mask", "scale")


def test_torch_s_losses_are_called_with_the_prediction_first(torch_backend):
    net = Masked()
    loss, classes = nn.BCEWithLogitsLoss(), (Y > 0).float()
    expected = loss(net(X, MASK), classes).item()
    history = Trainer(1, backend=torch_backend).fit(net, [(X, MASK, classes)], loss=loss)
    assert history["loss"] == pytest.approx([expected])
