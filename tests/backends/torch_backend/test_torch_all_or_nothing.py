"""``place`` moves everything or nothing, and what is there already is not touched at all."""

import pytest
import torch
from torch import nn, optim

from d2ldev import OutOfDeviceMemoryError, cpu, gpu


def trained():
    """A model with buffers, gradients, a plain tensor and an optimizer with state."""
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    net.table = [torch.ones(2)]
    optimizer = optim.Adam(net.parameters())
    net(torch.rand(4, 2)).sum().backward()
    optimizer.step()
    return net, optimizer


def everything(net, optimizer):
    """Each tensor, with what must not change: who it is, its memory, version and values."""
    tensors = [*net.parameters(), *net.buffers(), *net.table]
    tensors += [parameter.grad for parameter in net.parameters()]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    return [(id(x), x.data_ptr(), x._version, x.tolist()) for x in tensors]


def copies_needed(ledger):
    net, optimizer = trained()
    ledger.place((net, optimizer), gpu())
    return len(ledger.copied)


def test_there_is_enough_to_copy_for_the_failures_below(ledger):
    assert copies_needed(ledger) == 6 + 3 + 1 + 6 + 12


@pytest.mark.parametrize("n", range(28))
def test_when_one_copy_fails_nothing_has_moved(ledger, n):
    def run_out(number):
        if number == n:
            raise torch.OutOfMemoryError("CUDA out of memory")

    net, optimizer = trained()
    before = everything(net, optimizer)
    ledger.before_copy = run_out
    with pytest.raises(OutOfDeviceMemoryError, match="gpu:1 has too little free memory"):
        ledger.place((net, optimizer), gpu(1))
    assert everything(net, optimizer) == before
    assert set(ledger.placement((net, optimizer)).values()) == {cpu()}


def test_after_a_failure_the_same_model_can_be_placed(ledger):
    def run_out(number):
        raise torch.OutOfMemoryError("CUDA out of memory")

    net, optimizer = trained()
    ledger.before_copy = run_out
    with pytest.raises(OutOfDeviceMemoryError):
        ledger.place((net, optimizer), gpu())
    ledger.before_copy = lambda number: None
    ledger.place((net, optimizer), gpu())
    assert set(ledger.placement((net,)).values()) == {gpu()}


def test_an_interruption_leaves_everything_where_it_was(ledger):
    def interrupt(number):
        if number == 5:
            raise KeyboardInterrupt

    net, optimizer = trained()
    before = everything(net, optimizer)
    ledger.before_copy = interrupt
    with pytest.raises(KeyboardInterrupt):
        ledger.place((net, optimizer), gpu())
    assert everything(net, optimizer) == before


def test_another_error_of_torch_comes_through_as_it_is(ledger):
    def fail(number):
        raise RuntimeError("an illegal memory access")

    net, optimizer = trained()
    ledger.before_copy = fail
    with pytest.raises(RuntimeError, match=r"^an illegal memory access$"):
        ledger.place((net, optimizer), gpu())


def test_a_device_that_does_not_exist_is_refused_before_anything_moves(ledger):
    net, optimizer = trained()
    before = everything(net, optimizer)
    with pytest.raises(RuntimeError, match=r"gpu:2.*\n.*cpu, gpu:0, gpu:1"):
        ledger.place((net, optimizer), gpu(2))
    assert everything(net, optimizer) == before


def test_an_attribute_that_cannot_be_made_again_leaves_everything_where_it_was(ledger):
    class Table(dict):
        def __copy__(self):
            raise RuntimeError("one of a kind")

    net, optimizer = trained()
    net.kept = Table(x=torch.ones(1))
    before = everything(net, optimizer)
    with pytest.raises(TypeError, match="one of a kind"):
        ledger.place((net, optimizer), gpu())
    assert everything(net, optimizer) == before


def test_what_is_there_is_not_touched(torch_backend):
    net, optimizer = trained()
    before = everything(net, optimizer)
    torch_backend.place((net, optimizer), "cpu")
    assert everything(net, optimizer) == before


def test_what_is_there_comes_back_itself(torch_backend):
    pair = trained()
    assert torch_backend.place(pair, "cpu") is pair


def test_placing_twice_copies_once(ledger):
    net, optimizer = trained()
    ledger.place((net, optimizer), gpu())
    ledger.copied.clear()
    ledger.place(net, gpu())
    assert ledger.copied == []


def test_only_what_is_elsewhere_is_copied(ledger):
    net = ledger.place(nn.Linear(2, 3), gpu())
    net.table = torch.ones(2)
    ledger.copied.clear()
    ledger.place(net, gpu())
    assert [x.shape for x in ledger.copied] == [(2,)]


def test_a_list_without_tensors_stays_the_same_object(ledger):
    net = nn.Linear(1, 1)
    net.names = names = ["a", "b"]
    ledger.place(net, gpu())
    assert net.names is names


def test_the_gradient_mode_is_left_as_it_was(ledger):
    with torch.no_grad():
        ledger.place(nn.Linear(1, 1), gpu())
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()


def test_a_model_placed_without_gradients_trains_afterwards(ledger):
    net = nn.Linear(1, 1)
    with torch.no_grad():
        ledger.place(net, gpu())
    net(torch.ones(1, 1)).sum().backward()
    assert net.bias.grad.tolist() == [1]


def test_a_model_placed_in_inference_mode_trains_afterwards(ledger):
    net = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2))
    optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.rand(4, 1)).sum().backward()
    optimizer.step()
    with torch.inference_mode():
        ledger.place((net, optimizer), gpu())
    before = net[1].num_batches_tracked.item()
    net(torch.rand(4, 1)).sum().backward()
    optimizer.step()
    assert net[1].num_batches_tracked.item() == before + 1


def test_a_model_made_in_inference_mode_moves(ledger):
    with torch.inference_mode():
        net = nn.Linear(2, 1)
        before = net.weight.tolist()
    ledger.place(net, gpu())
    assert net.weight.tolist() == before
    assert ledger.device_of(net.weight) is gpu()
