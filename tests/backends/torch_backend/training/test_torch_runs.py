"""Runs of ``Trainer`` on torch: loaders, what is resumed, and batches that are copied ahead."""

import tracemalloc
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from d2ldev_torch import streams as side_streams
from interrupted_runs import interrupt_run
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import data
from torch.utils.data import DataLoader, TensorDataset

from d2ldev import (
    CheckpointError,
    DeviceMismatchError,
    OutOfDeviceMemoryError,
    Schedule,
    Trainer,
    UnsupportedValueError,
    gpu,
)
from d2ldev.framework.testing import framework_of
from d2ldev.training.order import Order

EPOCHS = 3

# -- runs ------------------------------------------------------------------------------------------


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
    if isinstance(options.get("optimizer", "sgd"), str):  # an object has its own
        options["lr"] = 0.2
    history = trainer.fit(model, data, loss="cross_entropy", **options)
    return history, trainer.model


@pytest.mark.parametrize(
    ("options", "in_step"),
    [
        ("multiprocessing_context='spawn'", False),
        ("persistent_workers=True", False),
        ("persistent_workers=True", True),
    ],
)
def test_ctrl_c_that_reaches_workers_too_ends_the_run_after_the_step(tmp_path, options, in_step):
    """Those that persist were there before the run, and end by it."""
    made = f"""
        import torch
        from slow_data import Slow
        net = torch.nn.Linear(3, 1)
        loader = torch.utils.data.DataLoader(Slow(), 4, num_workers=2, {options})
        if loader.persistent_workers:
            next(iter(loader))
    """
    shown = interrupt_run("torch", made, tmp_path, in_step=in_step)
    assert shown == [{"loss": [], "lr": []}, 2, True]


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


# -- resumed runs ----------------------------------------------------------------------------------


def test_a_schedule_whose_state_the_user_has_kept_goes_on(virtual, dataset, path):
    """The rate that it has set is in the optimizer's groups; its count is the user's."""
    loader = DataLoader(dataset, 16)

    def run(epochs, kept=None, **options):
        model = classifier()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        if kept is not None:
            schedule.load_state_dict(kept)
        trainer = Trainer(epochs, 1, backend=virtual, callbacks=lambda *_: schedule.step())
        history = trainer.fit(model, loader, loss="cross_entropy", optimizer=optimizer, **options)
        return history, optimizer.param_groups[0]["lr"], schedule.state_dict()

    expected = run(5)
    *_, kept = run(3, checkpoint=path)
    assert run(5, kept, checkpoint=path, resume=True) == expected
    assert expected[1] == 0.025


@pytest.mark.parametrize("per", ["step", "epoch"])
@pytest.mark.parametrize("num_gpus", [0, 1])
def test_a_schedule_that_is_a_callback_goes_on_with_its_count(
    virtual, dataset, path, per, num_gpus
):
    loader = DataLoader(dataset, 16)
    epochs, steps = 4, 4 * len(loader)

    def run(epochs, **options):
        model = classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        total = steps if per == "step" else 4
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=total + 1)
        rates = []
        callbacks = [Schedule(schedule, per=per), lambda *_: rates.append(schedule.get_last_lr())]
        trainer = Trainer(epochs, num_gpus, backend=virtual, callbacks=callbacks)
        history = trainer.fit(model, loader, loss="cross_entropy", optimizer=optimizer, **options)
        return history, rates

    history, rates = run(epochs)
    assert len({rate for (rate,) in rates}) == epochs
    run(2, checkpoint=path)
    assert run(epochs, checkpoint=path, resume=True) == (history, rates[2:])


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("fused", [False, True])
def test_a_schedule_counts_no_step_that_float16_skips(torch_backend, fused, number):
    net = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4, fused=fused)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, float)
    # The gradients of the first steps are too large for float16.
    batch = torch.zeros(4, 2), torch.full((4, 1), 1e4)
    options = {"callbacks": Schedule(schedule, "step"), "accumulate_grad_batches": number}
    trainer = Trainer(1, precision="fp16", backend=torch_backend, **options)
    for _ in range(2):
        trainer.fit(net, [batch] * 20 * number, optimizer=optimizer)
    assert 0 < schedule.last_epoch < 40
    assert schedule.last_epoch == optimizer.state[net.bias]["step"]


@pytest.mark.parametrize("device", ["cpu", "gpu:0"])
def test_a_global_seed_decides_new_layers_and_dropout(virtual, device):
    def draw():
        virtual.seed(7)
        layer = torch.nn.Linear(3, 3, device=virtual.native(device))
        return virtual.to_numpy(torch.nn.functional.dropout(layer.weight.detach(), 0.5))

    assert draw().tobytes() == draw().tobytes()


def learner_that_has_stepped(backend, device="cpu"):
    learner = backend.learner(backend.place(classifier(), device), loss="cross_entropy")
    learner.step((torch.ones(4, 4, device=device),), torch.zeros(4, device=device).long())
    return learner


@pytest.mark.parametrize(
    "modes",
    [
        None,
        3,
        {},
        {"frozen": None, "evaluation": []},
        {"frozen": ["another"], "evaluation": []},
        {"frozen": [], "evaluation": [""]},
        {"frozen": [], "evaluation": [["1"]]},
    ],
)
def test_modes_of_another_model_are_refused(torch_backend, modes):
    with pytest.raises(CheckpointError, match="of another model"):
        learner_that_has_stepped(torch_backend).check_modes(modes)


@pytest.mark.parametrize(
    "state", [None, {}, {"cpu": None}, {"cpu": torch.zeros(3)}, {"cpu": torch.ones(5056).byte()}]
)
def test_an_invalid_random_state_is_refused(torch_backend, state):
    before = torch.get_rng_state()
    with pytest.raises(CheckpointError, match="of another generator"):
        framework_of(torch_backend).training.check_random_state(state, torch_backend.cpu())
    assert torch.equal(torch.get_rng_state(), before)


# -- the order of the batches ----------------------------------------------------------------------

SIZE = 10
DATASET = TensorDataset(torch.arange(SIZE).float()[:, None], torch.zeros(SIZE, 1))


class Augmented(data.Dataset):
    """A dataset that draws random numbers in the process that loads it."""

    def __len__(self):
        return SIZE

    def __getitem__(self, i):
        x, y = DATASET[i]
        return x + torch.rand(()), y


def seed_workers():
    return torch.Generator().manual_seed(3)


class OfNumPy:
    """A sampler with a generator of NumPy's and the methods that keep its state."""

    def __init__(self):
        self.generator = np.random.default_rng(3)

    def __len__(self):
        return SIZE

    def __iter__(self):
        return iter(self.generator.permutation(SIZE).tolist())

    def get_state(self):
        return self.generator.bit_generator.state

    def set_state(self, state):
        self.generator.bit_generator.state = state


LOADERS = {
    "a sampler with a state": lambda: DataLoader(DATASET, sampler=OfNumPy()),
    "torch's generator": lambda: DataLoader(DATASET, shuffle=True),
    "its own generator": lambda: DataLoader(DATASET, shuffle=True, generator=seed_workers()),
    "a sampler's": lambda: DataLoader(
        DATASET,
        sampler=data.WeightedRandomSampler(torch.ones(SIZE), SIZE, generator=seed_workers()),
    ),
    "that of a sampler of batches": lambda: DataLoader(
        DATASET,
        batch_sampler=data.BatchSampler(
            data.RandomSampler(DATASET, generator=seed_workers()), 4, False
        ),
    ),
    "loaded in bulk": lambda: DataLoader(
        DATASET, batch_size=None, sampler=data.BatchSampler(data.RandomSampler(DATASET), 3, False)
    ),
    "augmented": lambda: DataLoader(Augmented(), 4, shuffle=True, generator=seed_workers()),
    "workers": lambda: DataLoader(
        Augmented(), 4, shuffle=True, generator=seed_workers(), num_workers=1
    ),
    "numbered epochs": lambda: DataLoader(
        DATASET, sampler=data.DistributedSampler(DATASET, num_replicas=1, rank=0, seed=1)
    ),
    "numbered epochs of batches": lambda: DataLoader(
        DATASET,
        batch_sampler=data.BatchSampler(
            data.DistributedSampler(DATASET, num_replicas=1, rank=0, seed=1), 4, False
        ),
    ),
}


class Recording(Trainer):
    """A trainer that notes its batches."""

    def prepare_batch(self, batch):
        self.seen.append(batch[0].flatten().tolist())
        return super().prepare_batch(batch)


def batches_of(backend, loader, path, epochs, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        trainer = Recording(epochs, backend=backend)
        trainer.seen = []
        trainer.fit(backend.mlp([1, 1]), loader, lr=1e-3, checkpoint=path, **options)
        return trainer.seen


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS.keys())
def test_the_order_of_a_data_loader_goes_on_in_another_process(torch_backend, path, make):
    """With a loader that is made anew, and torch's random numbers that begin anew."""
    unbroken = batches_of(torch_backend, make(), path.with_name("unbroken"), 3)
    before = batches_of(torch_backend, make(), path, 2)
    rest = batches_of(torch_backend, make(), path, 3, resume=True)
    assert before + rest == unbroken
    assert rest not in (before[: len(rest)], before[len(rest) :])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sharded_loader_reads_each_example_once_and_in_the_same_batches(torch_backend, workers):
    loader = DataLoader(TensorDataset(torch.arange(13)), 4, shuffle=True, num_workers=workers)

    def read(loader):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            return list(loader)

    shards = [
        read(framework_of(torch_backend).training.shard_loader(loader, i, 3)) for i in range(3)
    ]
    batches = [
        torch.cat([shard.operands[0][: shard.number] for shard in parts])
        for parts in zip(*shards, strict=True)
    ]
    assert [x.tolist() for x in batches] == [x.tolist() for (x,) in read(loader)]
    assert [shard.length for shard in shards[0]] == [4, 4, 4, 1]


def test_processes_that_read_other_examples_know_it(torch_backend):
    sharded = framework_of(torch_backend).training.shard_loader

    def contents(rank, seed):
        loader = DataLoader(DATASET, 4, shuffle=True, generator=torch.Generator())
        loader.generator.manual_seed(seed)
        return [shard.content for shard in sharded(loader, rank, 2)]

    assert contents(0, seed=1) == contents(1, seed=1)
    assert contents(0, seed=1)[0] != contents(1, seed=2)[0]


def test_the_sampler_of_a_sharded_loader_is_told_the_number_of_the_epoch(torch_backend):
    sampler = data.DistributedSampler(DATASET, num_replicas=1, rank=0)
    loader = DataLoader(DATASET, 4, sampler=sampler)
    training = framework_of(torch_backend).training
    for each in training.order_of(training.shard_loader(loader, 0, 2)):
        if hasattr(each, "set_epoch"):
            each.set_epoch(3)
    assert sampler.epoch == 3


class NumberedDataset:
    """Examples whose values depend on the number of the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, number):
        x = torch.tensor([number + 10.0 * self.epoch])
        return x, x

    def __len__(self):
        return 4


WORKERS = {"num_workers": 1, "persistent_workers": True}


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, WORKERS], ids=str)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_the_dataset_of_a_loader_is_told_the_number_of_the_epoch(
    torch_backend, options, is_sharded
):
    loader = DataLoader(NumberedDataset(), 2, **options)
    training = framework_of(torch_backend).training
    read = training.shard_loader(loader, 0, 1) if is_sharded else loader
    seen = []
    for epoch in range(3):
        for each in training.order_of(read):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
        seen += [x.flatten().tolist() for x, _ in (getattr(b, "operands", b) for b in read)]
    assert seen == [[10.0 * n + i, 10.0 * n + i + 1] for n in range(3) for i in (0, 2)]


class Counted(DataLoader):
    """A loader with an attribute, a length and a ``set_epoch`` of its own."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.scale, self.epoch = 10, None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return super().__len__() + self.scale


def test_a_loader_of_a_class_of_the_user_s_keeps_it_where_it_is_sharded(torch_backend):
    loader = Counted(torch.arange(13), 4)
    loader.note = ["mine"]
    shard = framework_of(torch_backend).training.shard_loader(loader, 0, 2)
    assert framework_of(torch_backend).training.order_of(shard)[0] is shard
    shard.set_epoch(3)
    assert isinstance(shard, Counted)
    assert shard.note is loader.note
    assert (shard.epoch, shard.batch_size, len(shard)) == (3, 4, 14)
    assert [x.tolist() for x in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12]]
    assert [part.operands.tolist() for part in shard] == [[0, 1], [4, 5], [8, 9], [12]]


class Repeating(DataLoader):
    """A loader that yields each batch twice."""

    def __iter__(self):
        for batch in super().__iter__():
            yield from (batch, batch)


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (lambda: Repeating(torch.arange(13), 4), "the __iter__ of Repeating is its own"),
        (lambda: DataLoader(torch.arange(13), 4, num_workers=2, in_order=False), "in_order=False"),
    ],
    ids=["iter", "order"],
)
def test_a_loader_that_may_yield_other_batches_is_not_sharded(torch_backend, loader, said):
    with pytest.raises(UnsupportedValueError, match=said) as caught:
        framework_of(torch_backend).training.shard_loader(loader(), 0, 2)
    assert "trainer.fit(net, data)" in caught.value.fix


def test_workers_that_persist_read_the_part_of_a_sharded_loader(torch_backend):
    loader = DataLoader(torch.arange(8), 4, num_workers=1, persistent_workers=True)
    assert [x.tolist() for x in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    shard = framework_of(torch_backend).training.shard_loader(loader, 1, 2)
    for _ in range(2):
        assert [part.operands.tolist() for part in shard] == [[2, 3], [6, 7]]


@pytest.mark.parametrize("options", [{"batch_size": None}, {"batch_size": 4}], ids=["bulk", "read"])
def test_a_loader_that_does_not_choose_by_number_is_not_sharded(torch_backend, options):
    class Stream(data.IterableDataset):
        def __iter__(self):
            return iter(range(3))

    with pytest.raises(UnsupportedValueError, match="nobody knows its examples"):
        framework_of(torch_backend).training.shard_loader(DataLoader(Stream(), **options), 0, 2)


def test_a_loader_with_fewer_generators_is_refused(torch_backend, path):
    batches_of(torch_backend, LOADERS["its own generator"](), path, 2)
    with pytest.raises(CheckpointError, match=r"of another loader: 1 of .* and 2 had one"):
        batches_of(torch_backend, LOADERS["torch's generator"](), path, 3, resume=True)


class WithoutSetter(OfNumPy):
    set_state = None


class WithKeys(OfNumPy):
    def get_state(self, key):
        raise AssertionError(key)


@pytest.mark.parametrize("cls", [WithoutSetter, WithKeys])
def test_a_sampler_whose_state_cannot_be_read_and_set_starts_again(torch_backend, path, cls):
    before = batches_of(torch_backend, DataLoader(DATASET, sampler=cls()), path, 1)
    loader = DataLoader(DATASET, sampler=cls())
    assert batches_of(torch_backend, loader, path, 2, resume=True) == before


def test_a_sampler_whose_state_no_file_holds_is_named(torch_backend, path):
    class Unsaved(OfNumPy):
        def get_state(self):
            return {3, 4}

    with pytest.raises(UnsupportedValueError, match=r"Unsaved.*\{3, 4\}") as caught:
        batches_of(torch_backend, DataLoader(DATASET, sampler=Unsaved()), path, 1)
    assert "get_state()" in caught.value.fix


class Refusing(data.BatchSampler):
    """Batches that refuse a state after their sampler has taken its own."""

    def get_state(self):
        return 3

    def set_state(self, state):
        if state != 3:
            raise ValueError("no such number")


def test_a_sampler_that_refuses_its_state_changes_no_other_one(torch_backend):
    def make():
        sampler = OfNumPy()
        return sampler, DataLoader(DATASET, batch_sampler=Refusing(sampler, 4, False))

    (moved, other), (sampler, loader) = make(), make()
    moved.generator.random()
    saved = Order(other).own_state()
    saved["state"] = [4 if each == 3 else each for each in saved["state"]]
    before = torch.get_rng_state(), sampler.get_state()
    with pytest.raises(CheckpointError, match="no such number") as caught:
        Order(loader).check_own(saved)()
    assert isinstance(caught.value.__cause__, ValueError)
    assert "the loader that the run began with" in caught.value.fix
    assert sampler.get_state() == before[1]
    assert torch.equal(torch.get_rng_state(), before[0])


# The first generator takes its state before the second one refuses another.
HALF = [torch.Generator().manual_seed(5).get_state().numpy().tobytes(), b"text"]


@pytest.mark.parametrize("state", [None, [], [3], [b"text"] * 2, [bytes(5056)] * 2, HALF])
def test_invalid_states_of_generators_are_refused(torch_backend, state):
    loader = LOADERS["its own generator"]()
    before = torch.get_rng_state(), loader.generator.get_state()
    with pytest.raises(CheckpointError, match=r"of another (loader|generator)"):
        Order(loader).check_own({"kind": "generators", "state": state})()
    after = torch.get_rng_state(), loader.generator.get_state()
    assert all(map(torch.equal, after, before))


def test_a_state_of_a_generator_takes_no_more_memory_than_its_bytes_twice(torch_backend):
    state = [bytes(10_000_000)]
    loader = LOADERS["torch's generator"]()
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="of another generator"):
            Order(loader).check_own({"kind": "generators", "state": state})()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(state[0])


# -- copies beside the work of a GPU ---------------------------------------------------------------


class Stream:
    """A stream that writes down what happens in it, and what it waits for."""

    def __init__(self, log, name):
        self.log, self.name = log, name
        self.events = 0

    def record_event(self):
        self.events += 1
        event = f"event {self.events} of {self.name}"
        self.log.append(f"record {event}")
        return event

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")


class Driver:
    """The functions of ``torch.cuda`` that are called for streams."""

    def __init__(self):
        self.log = []
        self.current = Stream(self.log, "computing")
        self.made_on = []

    def Stream(self, device):  # noqa: N802
        self.made_on.append(device)
        return Stream(self.log, "copying")

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def current_stream(self, device):
        return self.current


@pytest.fixture
def driver(devices):
    devices.streams = Driver()
    return devices.streams


@pytest.fixture
def backend(ledger, copies, driver, monkeypatch):
    """Two GPUs with streams, whose memory is the CPU's, where pinning is a copy.

    Every batch is copied as if it were a large one.
    """
    monkeypatch.setattr(side_streams, "LARGE", 0)

    class Pinned:
        def __init__(self, x):
            self.x = x.clone()

        def to(self, native, non_blocking):
            where = f"in {driver.current.name}, waiting: {not non_blocking}"
            driver.log.append(f"copy {self.x.tolist()} {where}")
            return copies.copy(self.x, native)

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: Pinned(x))
    monkeypatch.setattr(
        torch.Tensor,
        "record_stream",
        lambda x, stream: driver.log.append(f"{x.tolist()} is used in {stream.name}"),
    )
    return ledger


def values(batches):
    return [x.tolist() for x in batches]


def test_they_are_on_the_gpu(backend):
    batch = (torch.ones(1), {"y": np.ones(1)})
    ((x, rest),) = backend.prefetch([batch], "gpu:1")
    assert (backend.device_of(x), backend.device_of(rest["y"])) == (gpu(1), gpu(1))


def test_copies_are_made_in_a_stream_of_their_own_and_not_waited_for(backend, driver):
    next(backend.prefetch([torch.ones(1), torch.zeros(1)], "gpu:1"))
    copies = [line for line in driver.log if line.startswith("copy")]
    assert copies == [f"copy {x} in copying, waiting: False" for x in ([1.0], [0.0])]
    assert driver.made_on == [torch.device("cuda:1")]


def test_a_batch_waits_for_its_own_copies_and_not_for_those_of_the_next(backend, driver):
    batches = backend.prefetch([torch.ones(1), torch.zeros(1)], "gpu:0", depth=1)
    next(batches)
    first = "computing waits for event 1 of copying"
    assert driver.log.index(first) > driver.log.index("record event 2 of copying")
    assert "computing waits for event 2 of copying" not in driver.log
    next(batches)
    assert "computing waits for event 2 of copying" in driver.log


def test_the_memory_of_a_batch_is_known_to_be_used_where_it_is_computed_with(backend, driver):
    next(backend.prefetch([(torch.ones(1), torch.zeros(1))], "gpu:0"))
    assert driver.log[-2:] == ["[1.0] is used in computing", "[0.0] is used in computing"]


def test_gradients_flow_back_through_a_batch(backend):
    x = torch.ones(1, requires_grad=True)
    (moved,) = backend.prefetch([x], "gpu:0")
    (2 * moved).sum().backward()
    assert x.grad.tolist() == [2.0]


def test_ties_stay_ties_and_are_copied_once(backend, driver):
    x = torch.ones(1)
    ((a, b),) = backend.prefetch([(x, x)], "gpu:0")
    assert a is b
    assert sum(line.startswith("copy") for line in driver.log) == 1


def test_too_little_memory_is_the_error_of_the_batch_that_does_not_fit(backend, copies):
    def before_copy(number):
        if number == 1:
            raise torch.OutOfMemoryError("full")

    copies.before_copy = before_copy
    batches = backend.prefetch([torch.ones(1), torch.ones(1)], "gpu:0")
    next(batches)
    with pytest.raises(OutOfDeviceMemoryError, match="gpu:0"):
        next(batches)


def test_without_depth_nothing_is_copied_aside(backend, driver):
    assert values(backend.prefetch([torch.ones(1)], "gpu:0", depth=0)) == [[1.0]]
    assert driver.log == []


def test_what_is_on_the_gpu_comes_back_itself_and_asks_no_driver(ledger, driver):
    there = ledger.to((torch.ones(1), [torch.zeros(1)]), "gpu:0")
    assert next(ledger.prefetch([there], "gpu:0")) is there
    assert (driver.log, driver.made_on) == ([], [])


def test_to_the_cpu_nothing_is_copied_aside(backend, driver):
    assert values(backend.prefetch([torch.ones(1)], "cpu")) == [[1.0]]
    assert driver.log == []


@pytest.mark.parametrize(
    "x",
    [torch.ones(1, requires_grad=True), torch.ones(1).to_sparse()],
    ids=["with gradients", "sparse"],
)
def test_what_is_not_dense_or_has_gradients_keeps_its_place_in_the_queue(torch_backend, driver, x):
    tensors = framework_of(torch_backend).tensors
    (copy,) = side_streams.SideStream(tensors, driver, torch.device("cpu")).begin([x])()
    assert copy.to_dense().tolist() == [1.0]
    assert not [line for line in driver.log if line.startswith("copy")]


# -- copies of small batches -----------------------------------------------------------------------


class Calls(TorchFunctionMode):
    """Counts what a program asks torch's driver for, and what makes Python wait for a GPU."""

    names = frozenset(
        {"to", "pin_memory", "is_pinned", "record_stream", "cpu", "item", "tolist", "numpy"}
        | {"__bool__", "__float__", "__int__", "clone", "copy_"}
    )

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function.__name__ in self.names:
            self.counts[function.__name__] += 1
        return function(*args, **(kwargs or {}))


class CountedDriver(Driver):
    """A driver that counts what it is asked for."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def stream(self, stream):
        self.counts["stream"] += 1
        return super().stream(stream)

    def current_stream(self, device):
        self.counts["current_stream"] += 1
        return super().current_stream(device)


def calls_of_steps(train, steps=10):
    """What so many steps more of training call."""
    counts = []
    for number in (2, 2 + steps):
        with Calls() as calls:
            train(number, calls.counts)
        counts.append(calls.counts)
    few, many = counts
    many.subtract(few)
    return {name: count / steps for name, count in many.items() if count}


def small_batches(number, inputs):
    return [(torch.ones(2, inputs), torch.zeros(2, dtype=torch.int64)) for _ in range(number)]


def calls_by_hand(backend, inputs):
    native = backend.native("gpu:0")

    def train(number, _):
        net = nn.Linear(inputs, 3).to(native)
        optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
        for x, y in small_batches(number, inputs):
            x, y = x.to(native, non_blocking=True), y.to(native, non_blocking=True)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.stack(losses).mean().item()

    return calls_of_steps(train)


def take_for_a_card(framework, monkeypatch, streams):
    """Let batches go to virtual GPUs as they go to a card with streams."""
    monkeypatch.setattr(framework.devices, "streams", streams)
    monkeypatch.setattr(framework.tensors, "side_streams", {})
    monkeypatch.setattr(framework.devices, "platform", lambda device: "cuda")


def calls_of_trainer(backend, monkeypatch, inputs):
    def train(number, counts):
        take_for_a_card(framework_of(backend), monkeypatch, CountedDriver(counts))
        trainer = Trainer(1, num_gpus=1, backend=backend)
        trainer.fit(
            nn.Linear(inputs, 3), small_batches(number, inputs), loss="cross_entropy", lr=0.1
        )

    return calls_of_steps(train)


def test_a_step_on_a_small_batch_calls_the_driver_as_a_loop_by_hand_does(virtual, monkeypatch):
    by_hand = calls_by_hand(virtual, 4)
    assert by_hand == {"to": 2}
    assert calls_of_trainer(virtual, monkeypatch, 4) == by_hand


def test_a_larger_tensor_is_pinned_before_it_is_copied_in_its_turn(virtual, monkeypatch):
    monkeypatch.setattr(side_streams, "PINNED", 32)
    assert calls_of_trainer(virtual, monkeypatch, 4) == {"to": 2, "pin_memory": 1}


def test_a_large_batch_is_copied_beside_with_one_event(virtual, monkeypatch):
    monkeypatch.setattr(side_streams, "LARGE", 48)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: None)
    found = calls_of_trainer(virtual, monkeypatch, 4)
    assert found == {"to": 2, "pin_memory": 2, "stream": 1, "current_stream": 1}


@pytest.fixture
def streams(virtual, monkeypatch):
    """Two virtual GPUs with streams, to which small batches are copied in their turn."""
    take_for_a_card(framework_of(virtual), monkeypatch, Driver())
    return virtual


def test_a_small_pair_that_is_on_the_gpu_comes_back_itself(streams):
    there = streams.to((torch.ones(1), torch.zeros(1)), "gpu:0")
    (found,) = streams.prefetch([there], "gpu:0")
    assert found is there


def test_a_tensor_of_a_small_pair_that_is_on_the_gpu_stays_itself(streams):
    there = streams.to(torch.ones(1), "gpu:0")
    ((x, y),) = streams.prefetch([(there, torch.zeros(1))], "gpu:0")
    assert x is there
    assert streams.device_of(y) is gpu(0)


def test_a_small_pair_of_one_tensor_stays_tied(streams):
    x = torch.ones(1)
    ((a, b),) = streams.prefetch([(x, x)], "gpu:0")
    assert a is b


def test_gradients_flow_back_through_a_small_pair(streams):
    x = torch.ones(1, requires_grad=True)
    ((moved, _),) = streams.prefetch([(x, torch.zeros(1))], "gpu:0")
    (2 * moved).sum().backward()
    assert x.grad.tolist() == [2.0]


# -- models without parameters ---------------------------------------------------------------------


class Products(nn.Module):
    """Products of the rows of the input."""

    def forward(self, x):
        return x @ x.T


@pytest.mark.parametrize("num_gpus", [0, 1])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_model_without_parameters_computes_in_fewer_bits(virtual, precision, num_gpus):
    x = virtual.rand((3, 5), seed=1)
    trainer = Trainer(1, num_gpus, precision=precision, backend=virtual)
    (found,) = trainer.predict(Products(), [x])
    narrow = x.to({"bf16": torch.bfloat16, "fp16": torch.float16}[precision])
    assert virtual.device_of(found) is trainer.device
    assert torch.equal(found.cpu(), (narrow @ narrow.T).float())
    loss = trainer.validate(Products(), [(x, found.cpu())])["loss"]
    assert loss == 0


class WithLengths(nn.Module):
    """Takes lengths of sequences, too, which are on the CPU wherever the model is."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.dtypes = []

    def forward(self, lengths, x):
        y = self.layer(x)
        self.dtypes.append((lengths.device.type, y.dtype))
        return y


def test_an_input_that_stays_on_the_cpu_does_not_choose_the_precision(virtual):
    class Mine(Trainer):
        def prepare_batch(self, batch):
            lengths, x, y = batch
            return lengths, *virtual.to((x, y), "gpu:0")

    model = WithLengths()
    batch = torch.tensor([1, 2, 3]), torch.ones(3, 4), torch.zeros(3, 2)
    Mine(1, 1, precision="bf16", backend=virtual).fit(model, [batch])
    assert model.dtypes == [("cpu", torch.bfloat16)]


@pytest.mark.parametrize("options", [{}, {"generator": "own"}, {"num_workers": 1}], ids=str)
@pytest.mark.parametrize("call", ["fit", "within", "validate", "predict", "prefetch"])
def test_a_shuffling_loader_works_in_a_block(virtual, tmp_path, options, call):
    if "generator" in options:
        options = {"generator": seed_workers()}
    loader = DataLoader(DATASET, 4, shuffle=True, **options)
    net, trainer = virtual.mlp([1, 1]), Trainer(1, 1, backend=virtual)
    with virtual.on("gpu:0"):
        if call == "prefetch":
            assert len(list(virtual.prefetch(loader, "gpu:0"))) == len(loader)
        elif call in ("fit", "within"):
            every = {"checkpoint": tmp_path / "run", "checkpoint_every": 1}
            assert trainer.fit(net, loader, loader, **(every if call == "within" else {}))
        else:
            assert getattr(trainer, call)(net, loader)


def test_a_loader_that_shuffles_in_a_block_by_hand_is_refused_with_the_way_out(virtual):
    with (
        virtual.on("gpu:0"),
        pytest.raises(DeviceMismatchError, match=r"prefetch\(loader, 'gpu:0'\)"),
    ):
        list(DataLoader(DATASET, 4, shuffle=True))


@pytest.mark.parametrize("per", ["step", "epoch"])
def test_the_history_has_the_rate_that_a_schedule_sets(virtual, dataset, per):
    loader, model = DataLoader(dataset, 16), classifier()
    groups = [{"params": model[0].parameters()}, {"params": model[4].parameters(), "lr": 7.0}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    trainer = Trainer(3, 1, backend=virtual, callbacks=Schedule(schedule, per=per))
    history = trainer.fit(model, loader, loss="cross_entropy", optimizer=optimizer)
    steps = len(loader) if per == "step" else 1
    begun = steps if per == "step" else 0  # a schedule per epoch steps after the record
    assert history["lr"] == [0.5 ** (begun + steps * epoch) for epoch in range(3)]


def test_the_rate_may_be_a_tensor_or_missing(virtual, dataset):
    class Nameless(torch.optim.SGD):
        """An optimizer whose groups call the rate by another name."""

        def __init__(self, parameters):
            super().__init__(parameters, lr=0.5)
            self.param_groups[0]["eta"] = self.param_groups[0].pop("lr")

        def step(self, closure=None):
            """Leave the parameters as they are."""

    for make, expected in (
        (lambda p: torch.optim.SGD(p, lr=torch.tensor(0.5)), [0.5]),
        (Nameless, None),
    ):
        model = classifier()
        options = {"loss": "cross_entropy", "optimizer": make(model.parameters())}
        history = Trainer(1, backend=virtual).fit(model, DataLoader(dataset, 16), **options)
        assert history.get("lr") == expected
