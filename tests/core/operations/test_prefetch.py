"""``prefetch``: what the conformance suite does not ask of every backend."""

import gc
import threading
import weakref

import numpy as np
import pytest

import d2ldev
from d2ldev import ArrayLoader, Trainer, UnsupportedValueError
from d2ldev.framework.testing import framework_of
from d2ldev.operations.moving import flatten_on_host
from d2ldev.operations.prefetching import device_batches
from d2ldev.training import feed


class Loader:
    """Batches from any object that can begin again."""

    def __init__(self, batches):
        self.batches = batches
        self.begun = 0

    def __iter__(self):
        self.begun += 1
        return iter(self.batches)


class Indexed:
    """Batches by number, as Python's oldest protocol has them."""

    def __getitem__(self, number):
        if number == 3:
            raise IndexError
        return np.full(1, number)


def test_shards_of_batches_are_refused_with_the_line_that_takes_them_apart(reference):
    data = ArrayLoader(np.arange(8.0), batch_size=4).shard(1, 2)
    with pytest.raises(UnsupportedValueError, match="shard of a batch, which only fit") as caught:
        next(reference.prefetch(data, "gpu:0"))
    line = caught.value.fix.removeprefix("its operands: ")
    ((first,), (second,)) = eval(line, {"backend": reference, "data": data, "device": "gpu:0"})
    assert reference.to_numpy(first).tolist() == [2, 3]
    assert reference.to_numpy(second).tolist() == [6, 7]


def test_a_training_without_a_launch_refuses_a_shard(reference):
    data = ArrayLoader(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"), batch_size=4)
    trainer = Trainer(max_epochs=1, num_gpus=0, backend=reference)
    with pytest.raises(
        UnsupportedValueError, match="which only fit takes, in a process of a launch"
    ):
        trainer.fit(reference.mlp([2, 1]), data.shard(1, 2))


def test_an_object_with_only_getitem_is_iterated(reference):
    found = [float(x[0]) for x in reference.prefetch(Indexed(), "cpu")]
    assert found == [0.0, 1.0, 2.0]


def test_it_starts_no_thread(reference):
    batches = reference.prefetch([np.ones(1)] * 5, "gpu:0")
    next(batches)
    assert threading.active_count() == 1


def test_an_iterator_that_is_not_a_generator_stays_open(reference):
    source = iter([np.zeros(1), np.ones(1), np.ones(1)])
    batches = reference.prefetch(source, "cpu", depth=0)
    next(batches)
    batches.close()
    assert len(list(source)) == 2


class Batch(dict):
    """A dict with weak references."""


@pytest.mark.parametrize("depth", [0, 2])
def test_a_batch_that_was_handed_over_is_not_kept(reference, depth):
    batches = reference.prefetch((Batch(number=i) for i in range(9)), "cpu", depth)
    reference_to_first = weakref.ref(next(batches))
    gc.collect()
    assert reference_to_first() is None


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_error_that_is_kept_keeps_no_batch(reference, depth):
    def source():
        yield from (Batch(number=i) for i in range(3))
        raise OSError("the disk is gone")

    batches, references = reference.prefetch(source(), "cpu", depth), []
    with pytest.raises(OSError, match="the disk is gone") as caught:
        references.extend(map(weakref.ref, batches))
    assert caught.value.__traceback__ is not None
    assert [each() for each in references] == [None] * 3


def test_every_batch_may_be_ahead(reference):
    batches = reference.prefetch([np.full(1, i) for i in range(3)], "cpu", depth=2**63)
    assert [float(x[0]) for x in batches] == [0.0, 1.0, 2.0]


def test_an_interrupt_of_the_source_comes_at_once(reference):
    def source():
        yield np.ones(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(reference.prefetch(source(), "cpu"))


def test_a_stop_while_moving_is_an_error_and_not_the_end(reference, monkeypatch):
    def stop(*given, **_):
        raise StopIteration

    monkeypatch.setattr(framework_of(reference).tensors, "transfer", stop)
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(reference.prefetch([reference.ones(1)], "gpu:0"))


def test_the_handle_prefetches_to_the_active_backends_devices(reference):
    with d2ldev.use_backend(reference):
        (x,) = d2ldev.backend.prefetch([np.ones(1)], "gpu:1")
    assert str(reference.device_of(x)) == "gpu:1"


def test_a_batch_without_a_device_is_made_of_tensors_where_they_are(reference):
    there = reference.ones(1, device="gpu:1")
    with reference.on("gpu:0"):
        flat = flatten_on_host(framework_of(reference), (there, {"y": np.ones(1)}), "split")
    brought = flat.unflatten({})
    assert brought[0] is there
    assert reference.device_of(brought[1]["y"]) is reference.cpu()


@pytest.mark.parametrize(("platform", "made_on"), [("virtual", "gpu:1"), ("cuda", "cpu")])
def test_arrays_go_by_way_of_the_hosts_tensors_where_that_saves_waiting(
    reference, monkeypatch, platform, made_on
):
    framework, made = framework_of(reference), []
    from_data = framework.tensors.from_data

    def note(obj, dtype, native):
        made.append(str(reference.device(native)))
        return from_data(obj, dtype, native)

    monkeypatch.setattr(framework.tensors, "from_data", note)
    monkeypatch.setattr(framework.devices, "platform", lambda device: platform)
    (x,) = reference.prefetch([np.ones(1)], "gpu:1")
    assert (made, str(reference.device_of(x))) == ([made_on], "gpu:1")


# -- in the trainer ---------------------------------------------------------------------------


@pytest.fixture
def prefetched(monkeypatch):
    """The devices to which the trainer moved batches ahead."""
    devices = []

    def note(framework, data, device, depth, **options):
        if depth:
            devices.append(str(device))
        return device_batches(framework, data, device, depth, **options)

    monkeypatch.setattr(feed, "device_batches", note)
    return devices


def fit(trainer):
    x = np.ones((4, 2), "float32")
    return trainer.fit(trainer.backend.mlp([2, 1]), [(x, x[:, :1])], [(x, x[:, :1])])


def test_on_a_gpu_the_trainer_prefetches_what_it_trains_on_and_what_it_evaluates(
    reference, prefetched
):
    fit(Trainer(1, num_gpus=1, backend=reference))
    assert prefetched == ["gpu:0", "gpu:0"]


def test_on_the_cpu_there_is_nothing_to_prefetch(reference, prefetched):
    fit(Trainer(1, backend=reference))
    assert prefetched == []


def test_batches_that_the_user_prepares_are_not_prefetched(reference, prefetched):
    class Own(Trainer):
        def prepare_batch(self, batch):
            return super().prepare_batch(batch)

    fit(Own(1, num_gpus=1, backend=reference))
    assert prefetched == []


def test_batches_that_a_function_on_the_trainer_prepares_are_not_prefetched(reference, prefetched):
    trainer = Trainer(1, num_gpus=1, backend=reference)
    trainer.prepare_batch = lambda batch: reference.to(batch, "gpu:0")
    fit(trainer)
    assert prefetched == []


def test_an_error_in_training_closes_the_data(reference):
    is_closed = []

    def source():
        try:
            while True:
                yield (np.ones((2, 3), "float32"),)
        finally:
            is_closed.append(True)

    with pytest.raises(UnsupportedValueError) as caught:
        Trainer(1, num_gpus=1, backend=reference).fit(reference.mlp([2, 1]), source())
    assert (is_closed, caught.value.__traceback__ is None) == ([True], False)
