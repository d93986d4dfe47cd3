"""``Trainer`` on torch: ``torch.utils.data.DataLoader``, arrays, and runs that are resumed."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from d2ldev.training.trainer import Trainer

EPOCHS = 3


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
    )


@pytest.fixture
def dataset():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(70, 4, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def fit(backend, num_gpus, data, model=None, epochs=EPOCHS, **options):
    trainer = Trainer(epochs, num_gpus, gradient_clip_val=1.0, backend=backend)
    model = classifier() if model is None else model
    history = trainer.fit(model, data, loss="cross_entropy", lr=0.2, **options)
    return history, trainer.model


@pytest.mark.parametrize("num_gpus", [0, 1])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_gives_the_hand_written_loop(virtual, dataset, num_gpus, workers):
    def loader():
        return DataLoader(dataset, 16, shuffle=True, num_workers=workers)

    net = classifier()
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.2), []
    for _ in range(EPOCHS):
        total = 0.0
        for x, y in loader():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            total += len(y) * loss.item()
        losses.append(total / len(dataset))
    history, model = fit(virtual, num_gpus, loader())
    assert history["loss"] == losses
    expected = net.state_dict()
    found = model.state_dict()
    assert all(torch.equal(found[name].cpu(), x) for name, x in expected.items())
    device = virtual.gpu(0) if num_gpus else virtual.cpu()
    assert set(virtual.placement(model).values()) == {device}


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_arrays_tensors_and_dicts_are_the_same_data(virtual, dataset, num_gpus):
    tensors = list(DataLoader(dataset, 16))
    arrays = [(x.numpy(), y.numpy()) for x, y in tensors]
    named = [{"X": x, "y": y} for x, y in arrays]
    expected, _ = fit(virtual, num_gpus, tensors)
    assert fit(virtual, num_gpus, arrays)[0] == expected
    assert fit(virtual, num_gpus, named)[0] == expected


def test_evaluation_is_of_the_model_as_it_is_used(virtual, dataset):
    loader = DataLoader(dataset, len(dataset))
    history, model = fit(virtual, 1, loader, val_data=loader, metrics=["accuracy"])
    x, y = (x.to("vgpu:0") for x in dataset.tensors)
    with torch.no_grad():
        prediction = model.eval()(x)
    assert history["val_loss"][-1] == nn.functional.cross_entropy(prediction, y).item()
    accuracy = (prediction.argmax(1) == y).float().mean().item()
    np.testing.assert_allclose(history["val_accuracy"][-1], accuracy, rtol=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_fit_leaves_the_mode_as_it_found_it(virtual, dataset, training):
    loader = DataLoader(dataset, 16)
    model = classifier().train(training)
    seen = []
    trainer = Trainer(2, backend=virtual, callback=lambda *_: seen.append(model.training))
    trainer.fit(model, loader, loader, loss="cross_entropy")
    assert [*seen, model.training] == [training] * 3


@pytest.mark.parametrize("num_gpus", [0, 1])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adagrad"])
def test_a_resumed_run_ends_where_an_unbroken_one_does(
    virtual, dataset, num_gpus, optimizer, tmp_path
):
    """With the order of the batches and the dropout that it would have had."""
    loader = DataLoader(dataset, 16, shuffle=True)
    expected, unbroken = fit(virtual, num_gpus, loader, optimizer=optimizer)
    path = tmp_path / "run.safetensors"
    fit(virtual, num_gpus, loader, epochs=1, optimizer=optimizer, checkpoint=path)
    torch.manual_seed(99)
    history, resumed = fit(
        virtual, num_gpus, loader, optimizer=optimizer, checkpoint=path, resume=True
    )
    assert history == expected
    values = unbroken.state_dict()
    assert all(torch.equal(x, values[name]) for name, x in resumed.state_dict().items())


def test_a_run_with_an_optimizer_of_the_users_own_is_resumed(virtual, dataset, tmp_path):
    loader = DataLoader(dataset, 16, shuffle=True)

    def run(epochs, **options):
        model = classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, amsgrad=True)
        return fit(virtual, 1, loader, model, epochs, optimizer=optimizer, **options)[0]

    expected = run(EPOCHS)
    path = tmp_path / "run.safetensors"
    run(2, checkpoint=path)
    assert run(EPOCHS, checkpoint=path, resume=True) == expected


def test_what_a_callback_has_frozen_stays_frozen_in_a_resumed_run(virtual, dataset, tmp_path):
    """As from the first epoch on, and thawed after the third."""

    def run(epochs, path, **options):
        net = classifier()

        def freeze(epoch, history):
            net[0].requires_grad_(epoch == 2)

        trainer = Trainer(epochs, 1, backend=virtual, callback=freeze)
        trainer.fit(
            net, batches, loss="cross_entropy", optimizer="adam", checkpoint=path, **options
        )
        return {name: x.cpu() for name, x in net.state_dict().items()}

    batches = list(DataLoader(dataset, 16))
    expected = run(4, tmp_path / "unbroken")
    run(2, tmp_path / "run")
    found = run(4, tmp_path / "run", resume=True)
    assert all(torch.equal(x, expected[name]) for name, x in found.items())


@pytest.mark.parametrize("training", [True, False])
def test_what_a_callback_has_put_into_evaluation_mode_stays_in_it_in_a_resumed_run(
    virtual, dataset, training, tmp_path
):
    """From the second epoch to the fourth, in a run that is killed in between."""

    def run(epochs, path, **options):
        net = classifier().train(training)

        def freeze(epoch, history):
            net.train()
            net[1].train(not 1 <= epoch < 4)

        trainer = Trainer(epochs, 1, backend=virtual, callback=freeze)
        trainer.fit(net, batches, batches, loss="cross_entropy", checkpoint=path, **options)
        return {name: x.cpu() for name, x in net.state_dict().items()}

    batches = list(DataLoader(dataset, 16))
    torch.manual_seed(0)
    expected = run(6, tmp_path / "unbroken")
    run(3, tmp_path / "run")
    found = run(6, tmp_path / "run", resume=True)
    assert all(torch.equal(x, expected[name]) for name, x in found.items())
    assert found["1.num_batches_tracked"] == 3 * len(batches)
