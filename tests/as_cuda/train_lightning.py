"""A program of Lightning for one CUDA device. It knows nothing of d2ldev."""

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
        self.losses = []

    def training_step(self, batch, index):
        x, y = batch
        assert x.is_cuda
        assert x.device == self.device
        loss = nn.functional.mse_loss(self.net(x).float(), y)
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        self.log("validation", nn.functional.mse_loss(self.net(batch[0]).float(), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main(precision, folder):
    lightning.seed_everything(0)
    x = torch.randn(64, 4)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    net = Net()
    trainer = lightning.Trainer(
        accelerator="gpu",
        devices=1,
        precision=precision,
        max_epochs=20,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        log_every_n_steps=1,
    )
    trainer.fit(net, data, data)
    assert trainer.strategy.root_device.type == "cuda"
    assert net.losses[-1] < net.losses[0] / 5, net.losses
    Net.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)


main(*sys.argv[1:])
