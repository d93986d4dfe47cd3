"""``Backend``: the abstract base class that is the specification.

Design rules, as in einops' backends:

- Native tensors go in and come out. A backend wraps nothing.
- What an author writes is in ``primitives.py`` and ``model_primitives.py``, and nowhere else: the
  abstract methods, and a few hooks with a default. Everything a user calls is derived from them,
  once: ``resolution.py`` (devices), ``creation.py``, ``moving.py``, ``saving.py``, and here models
  and the machine.
- A copy happens only where the user wrote one, and never by way of another device.
- No framework's state is changed that the user did not ask to change.

The conformance suite (``d2ldev conformance NAME``) says when a backend is done.

Source: D2L, section 6.7, "GPUs".
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from d2ldev.device import Device
from d2ldev.errors import DeviceMismatchError
from d2ldev.operations.placing import named_tensors, place
from d2ldev.operations.prefetching import check_depth, check_source
from d2ldev.operations.strictness import translate_uncaught
from d2ldev.primitives import DeviceLike, DType, Memory, Shape, Tensor
from d2ldev.saving import Saving
from d2ldev.training.learner import Learner, Loss, Settings

__all__ = ["Backend", "DType", "DeviceLike", "Memory", "Shape", "Tensor"]


class Backend(Saving):
    """One framework behind the contract.

    Args:
        virtual_gpus: how many GPUs to make out of nothing, ``None`` for the hardware's.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # A model that keeps its backend is copied and sent to other processes; the backend is
        # found there by its name.
        from d2ldev.registry.selection import get_backend

        return get_backend, (self.name,)

    # -- models: the contract -------------------------------------------------------------

    def place(self, obj: Any, device: DeviceLike) -> Any:
        """Move a model, an optimizer or a parameter pytree to a device, all of it, once.

        Args:
            obj: a model (its parameters with their gradients, its buffers, and the tensors
                in its plain attributes), an optimizer with its state, or any nesting of
                them and of tensors. What they share with each other stays shared.
            device: where to.

        Returns:
            What to use from then on: ``obj`` itself where the framework moves in place.

        Raises:
            DeviceUnavailableError, OutOfDeviceMemoryError, UnsupportedValueError: as ``to``;
                everything is where it was then.
        """
        target = self._existing(device, "place a model")[0]
        return place(self, obj, target, f"place {type(obj).__name__} on {target}")

    def placement(self, obj: Any) -> Mapping[str, Device]:
        """Where everything is that ``place`` looks after: name -> device.

        >>> backend.placement(net)                                         # doctest: +SKIP
        {'0.weight': Device('gpu', 0), '0.bias': Device('gpu', 0)}
        """
        return {name: self.device_of(x) for name, x in named_tensors(self, obj)}

    def named_tensors(self, obj: Any) -> Mapping[str, Tensor]:
        """The tensors that ``place`` looks after: name -> tensor."""
        return dict(named_tensors(self, obj))

    # -- training: the contract -----------------------------------------------------------

    def learner(
        self,
        model: Any,
        *,
        loss: Loss = "mse",
        optimizer: Any = "sgd",
        lr: float = 0.01,
        gradient_clip_val: float = 0.0,
    ) -> Learner:
        """A model that is trained step by step, on the device where it is.

        ``d2ldev.Trainer`` is the loop around it.

        Args:
            model: one of the framework's, placed already.
            loss: ``'mse'``, ``'cross_entropy'``, or ``(prediction, y) -> scalar tensor``.
            optimizer: ``'sgd'``, ``'momentum'``, ``'adam'``, ``'adagrad'``, or the framework's own.
            lr: the learning rate of one that is built here.
            gradient_clip_val: the largest global norm of the gradients; 0 is no clipping.

        Raises:
            UnsupportedValueError: if the framework cannot train with it.

        >>> learner = backend.learner(net, optimizer='adam')               # doctest: +SKIP
        >>> loss, prediction = learner.step((X,), y)                       # doctest: +SKIP
        """
        return self._learner(model, Settings(loss, optimizer, lr, gradient_clip_val).checked())

    def accuracy(self, prediction: Tensor, y: Tensor) -> Tensor:
        """The share of labels that are those of the largest logits; it stays on the device.

        Args:
            prediction: logits of shape ``(n, ..., classes)``.
            y: labels of shape ``(n, ...)`` and any integer dtype, on the same device.

        Returns:
            The mean over all labels, a scalar in float32.

        Raises:
            UnsupportedValueError: if they are no tensors of this backend, if there is not one label
                for each row of logits, or if labels are no integers.

        >>> backend.accuracy(net(X), y)                                    # doctest: +SKIP
        tensor(0.8750)
        """
        for x in (prediction, y):
            self._require_tensor(x, "measure the accuracy of a prediction")
        self._check_labels(prediction, y)
        return self._accuracy(prediction, y)

    def prefetch(
        self, batches: Iterable[Any], device: DeviceLike, depth: int = 2
    ) -> Generator[Any, None, None]:
        """Move batches to a device ahead of their use, while it computes with the one before.

        Args:
            batches: any iterable of them: tensors, NumPy arrays, or nestings of them. It must not
                write into a tensor that it has yielded; an array it may use again.
            device: where to.
            depth: how many batches are on their way besides the one in use; 0 moves each when it
                is asked for.

        Returns:
            A generator of the same batches in the same order, which begins with the first of them
            that is asked for. An exception of ``batches`` comes in the place of the batch that it
            belongs to. Closing it closes ``batches``, if that is a generator.

        Raises:
            DeviceUnavailableError: if this machine does not have the device.
            UnsupportedValueError: if ``batches`` is no iterable, or ``depth`` no such number.

        >>> for X, y in backend.prefetch(loader, 'gpu:0'):                 # doctest: +SKIP
        ...     loss, prediction = learner.step((X,), y)
        """
        target = self._existing(device, "prefetch batches")[0]
        check_source(batches)
        return self._prefetch(batches, target, check_depth(depth))

    # -- strictness: the contract ---------------------------------------------------------

    @contextmanager
    def strict(self) -> Iterator[None]:
        """Have an operation whose tensor operands are on different devices raise, in a block.

        Operations whose operands agree run where their operands are, also in TensorFlow. Python
        numbers, and the 0-dim tensors of the host where the framework lets them mix (torch), are
        no operands. It is in force in this thread or asyncio task, and in tasks started in it; a
        thread that is started in it has blocks of its own. ``D2LDEV_STRICT=1`` puts the whole
        process under it, every thread. Source: D2L, section 6.7.2.2.

        >>> with backend.strict():                                         # doctest: +SKIP
        ...     backend.ones(2, device='gpu:0') + backend.ones(2, device='gpu:1')
        DeviceMismatchError: cannot run add: its operands are on different devices: ...

        Raises:
            DeviceMismatchError: from the operation, where d2ldev or the framework has a place for
                it, and at the latest when the framework's own error, which stays chained as its
                cause, leaves the block.
        """
        with self._strictness.block(), self._strict_scope(everywhere=False):
            try:
                yield
            except DeviceMismatchError:
                raise
            except Exception as error:
                found = self._mismatch(error)
                if found is None:
                    raise
                raise found from error

    def _be_strict(self) -> None:
        """Put the whole process under ``strict()``, for good."""
        self._strictness.everywhere()
        self._strict_scope(everywhere=True).__enter__()
        translate_uncaught(self._mismatch)

    # -- the machine: the contract --------------------------------------------------------

    def synchronize(self, device: DeviceLike = None) -> None:
        """Return when all work queued on a device (None: on every device) is done."""
        if device is not None:
            self._synchronize(self._existing(device, "synchronize")[0])
            return
        for every_device in self.devices():
            self._synchronize(every_device)

    def is_idle(self, device: DeviceLike = None) -> bool:
        """Whether no work queued on a device (None: on any) is unfinished.

        Always so unless a backend says otherwise: one that computes before it returns is idle.
        """
        if device is not None:
            self._existing(device, "ask whether there is work")
        return True

    def memory(self, device: DeviceLike) -> Memory:
        """The memory of a device, in bytes; None where the framework cannot say."""
        return self._memory(self._existing(device, "ask for the memory")[0])
