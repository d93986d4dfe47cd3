"""A program of accelerate for one CUDA device. It knows nothing of d2ldev."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(precision, folder):
    set_seed(0)
    accelerator = Accelerator(mixed_precision=precision)
    assert accelerator.device.type == "cuda"
    x = torch.randn(64, 4)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    for _ in range(20):
        for xb, yb in data:
            assert xb.is_cuda
            assert xb.device.type == accelerator.device.type
            loss = nn.functional.mse_loss(model(xb), yb)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss).mean().item())
    torch.cuda.synchronize()
    accelerator.save_state(folder)
    accelerator.load_state(folder)
    assert losses[-1] < losses[0] / 5, losses


main(*sys.argv[1:])
