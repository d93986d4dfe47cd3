"""What is installed, waiting for devices, and their memory."""

from __future__ import annotations

import threading
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import tensorflow as tf
from tensorflow.python.eager.context import async_wait

from d2ldev.interface import Memory
from d2ldev_tensorflow import nvml

# How long a device may take to answer that it is idle, in seconds.
_PATIENCE = 0.05


def distribution() -> str:
    """The distribution that ``tensorflow`` was installed from, of which there are several."""
    for name in ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly"):
        with suppress(PackageNotFoundError):
            version(name)
            return name
    return "tensorflow"


def wait_for(native: str) -> None:
    """Return when the work that is queued on a device is done."""
    with tf.init_scope(), tf.device(native):
        tf.raw_ops.SyncDevice()
    # For ``tf.config.experimental.set_synchronous_execution(False)``; after the other, which is
    # queued too then.
    async_wait()


def answers_at_once(native: str) -> bool:
    """Whether a device has nothing to finish.

    TensorFlow can only be waited for: a thread does, and is given little time. Also on the CPU,
    because asking TensorFlow whether it computes before it returns waits for all that is queued.
    """
    waiting = threading.Thread(target=wait_for, args=(native,), daemon=True)
    waiting.start()
    waiting.join(_PATIENCE)
    return not waiting.is_alive()


def memory_of_gpu(index: int, started: bool) -> Memory:
    """What TensorFlow's allocator holds for tensors, and the size of the card, in bytes."""
    total = nvml.memory_of(index) if tf.test.is_built_with_cuda() else None
    if not started:  # and asking would start it
        return Memory(0, 0, total)
    held = tf.config.experimental.get_memory_info(f"GPU:{index}")
    return Memory(int(held["current"]), int(held["peak"]), total)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an exception says that memory ran out."""
    if isinstance(error, (tf.errors.ResourceExhaustedError, MemoryError)):
        return True
    # Sizes that no address reaches.
    words = "would have more than 2**63 - 1 elements"
    return isinstance(error, tf.errors.InvalidArgumentError) and words in str(error)
