"""``torch.nn.DataParallel`` on virtual GPUs: each computes its piece of the batch."""

import pytest
import torch
from torch import nn
from torch.nn import parallel

DEVICES = ["vgpu:0", "vgpu:1"]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def test_it_computes_what_the_cpu_computes_of_each_piece(virtual):
    x = torch.randn(5, 3)
    expected = torch.cat([net()(piece) for piece in x.chunk(2)])
    result = nn.DataParallel(net().to("vgpu:0"), device_ids=[0, 1])(x.to("vgpu:0"))
    assert str(result.device) == DEVICES[0]
    assert torch.equal(result.cpu(), expected)


def test_its_gradients_are_the_sums_of_all_pieces(virtual):
    x, model = torch.randn(6, 3), net().to("vgpu:0")
    nn.DataParallel(model)(x.to("vgpu:0")).square().sum().backward()
    pieces = [net(), net()]
    for one, piece in zip(pieces, x.chunk(2), strict=True):
        one(piece).square().sum().backward()
    for ours, *theirs in zip(model.parameters(), *(p.parameters() for p in pieces), strict=True):
        assert str(ours.grad.device) == DEVICES[0]
        assert torch.equal(ours.grad.cpu(), theirs[0].grad + theirs[1].grad)


def test_each_piece_is_computed_on_its_own_device(virtual):
    seen = set()

    class Noted(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x):
            seen.update({str(x.device), str(self.inner.weight.device)})
            return self.inner(x)

    nn.DataParallel(Noted().to("vgpu:0"))(torch.ones(4, 3, device="vgpu:0"))
    assert seen == set(DEVICES)


def test_batches_come_from_the_host_and_results_go_where_they_are_wanted(virtual):
    model = nn.DataParallel(net().to("vgpu:0"), device_ids=[0, 1], output_device=1)
    assert str(model(torch.ones(4, 3)).device) == DEVICES[1]


def test_one_device_is_enough(virtual):
    model = nn.DataParallel(net().to("vgpu:1"), device_ids=[1])
    assert str(model(torch.ones(4, 3, device="vgpu:1")).device) == DEVICES[1]


def test_a_model_elsewhere_is_refused(virtual):
    with pytest.raises(RuntimeError, match=r"on device vgpu:0 \(device_ids\[0\]\)"):
        nn.DataParallel(net())(torch.ones(4, 3))


def test_tensors_are_scattered_gathered_and_broadcast(virtual):
    x = torch.arange(4.0)
    pieces = parallel.scatter(x, [0, 1])
    assert [(str(piece.device), piece.tolist()) for piece in pieces] == [
        (DEVICES[0], [0, 1]),
        (DEVICES[1], [2, 3]),
    ]
    assert torch.equal(parallel.gather(pieces, "cpu"), x)
    copies = parallel.comm.broadcast(pieces[1], [0, 1])
    assert [str(copy.device) for copy in copies] == DEVICES
    assert [copy.tolist() for copy in parallel.comm.scatter(x, [1, 0], [1, 3])] == [[0], [1, 2, 3]]
