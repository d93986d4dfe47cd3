"""What one framework must say of models, files and training: the second half of the primitives.

Most have a default: what a framework has nothing of its own for is not written.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from d2ldev.device import Device
from d2ldev.primitives import DeviceLike, Primitives, Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from d2ldev.files.layouts import Layout
    from d2ldev.operations.placing import Part
    from d2ldev.training.learner import Learner, Settings


class ModelPrimitives(Primitives):
    """One framework's models, as far as they have to be said by hand."""

    loader_types: ClassVar[tuple[type, ...]] = ()
    """The classes of its loaders that ``_loader_state`` knows."""

    # -- models ---------------------------------------------------------------------------

    @abstractmethod
    def mlp(
        self,
        sizes: Sequence[int],
        *,
        activation: str = "relu",
        device: DeviceLike = None,
        seed: int = 0,
    ) -> Any:
        """A multilayer perceptron of the framework's own dense layers, callable as ``net(x)``.

        Args:
            sizes: the number of features of the input, of each hidden layer, and of the
                output: ``[20, 64, 1]``.
            activation: between the layers: ``'relu'``, ``'tanh'`` or ``'sigmoid'``.
            device: where its parameters are made.
            seed: of the initial parameters; the framework's own random state is left alone.

        Returns:
            A model in float32; ``net(x)`` maps ``(n, sizes[0])`` to ``(n, sizes[-1])``.

        Raises:
            UnsupportedValueError: for fewer than two sizes, or another activation.
        """

    def _parts(self, obj: Any) -> Iterator[Part]:
        """What one of ``object_types`` keeps: each tensor, nesting or object, for ``place``."""
        return iter(())

    def _attached(self, x: Tensor) -> Iterable[Part]:
        """What hangs on a tensor and has to be where it is, such as its gradient."""
        return ()

    def _is_refilled(self, x: Tensor) -> bool:
        """Whether ``place`` gives a tensor other memory instead of replacing the object.

        So that whoever else holds a parameter, such as an optimizer, still holds it afterwards.
        """
        return False

    def _refill(self, x: Tensor, new: Tensor) -> None:
        """Give ``x`` the memory of ``new``; called only where ``_is_refilled(x)``."""

    def _finish(self, obj: Any) -> None:
        """Called for each of ``object_types`` when its parts have moved. It must not fail."""

    def samples(self) -> Mapping[str, Callable[[Device], Any]]:
        """Builders of small objects of every kind that ``place`` looks after, by name.

        The conformance suite places each of them; each is made on the device that is given.
        """
        return {"mlp": lambda device: self.mlp([3, 4, 1], device=device)}

    # -- files ----------------------------------------------------------------------------

    def _borrow(self, x: Tensor) -> NDArray[Any]:
        """The values in a NumPy array that is only read, and soon: a framework may lend its own."""
        return self._to_numpy(x)

    def _adopt(self, array: NDArray[Any], dtype: Any, native: Any) -> Tensor:
        """A tensor with the values of an array that nobody else has: a framework may keep it."""
        return self._from_data(array, dtype, native)

    def _numbers_dtype(self, dtype: str) -> str | None:
        """The dtype of the numbers that stand for tensors of a dtype without any.

        None but for JAX's random keys.
        """
        return None

    def _from_numbers(self, x: Tensor, dtype: str) -> Tensor:
        """The tensor of a dtype without numbers that these numbers stand for."""
        return x

    def _is_gradient(self, obj: Any, part: Part) -> bool:
        """Whether a part of one of ``object_types`` is a gradient, which is not saved."""
        return False

    def _layouts(self, obj: Any) -> Mapping[str, Layout] | None:
        """How each tensor of a model is laid out, by its name; None if that is not known.

        It is asked of every object and container that is saved, and known of dense and convolution
        layers in one sequence. With it a model takes over the parameters of the same layers in
        another framework.
        """
        return None

    def _state(self, optimizer: Any) -> Mapping[Any, Any] | None:
        """What an optimizer has learned, without the parameters, as a nesting that is saved.

        None for what is saved as the tensors that ``place`` looks after, such as a model, and an
        optimizer all of whose state are such tensors.
        """
        return None

    def _state_put(self, optimizer: Any, state: Any) -> Callable[[], None]:
        """What gives an optimizer a state; it cannot fail. Nothing is changed before.

        Args:
            optimizer: one of which ``_state`` is a nesting.
            state: such a nesting, with tensors on the CPU that nobody else has.

        Raises:
            ValueError: if the state is no such optimizer's, with the reason.
        """
        raise ValueError(f"a {type(optimizer).__name__} takes no state")

    def _write(self, x: Tensor, new: Tensor) -> None:
        """Give ``x``, of which ``_is_refilled`` is true, the values of ``new``, on its device."""
        self._refill(x, new)

    # -- training -------------------------------------------------------------------------

    @abstractmethod
    def _learner(self, model: Any, settings: Settings) -> Learner:
        """A model that is placed, with its loss and optimizer; the settings are checked.

        Raises:
            UnsupportedValueError: for a model or an optimizer that is none of the framework's.
        """

    def _check_labels(self, prediction: Tensor, y: Tensor) -> None:
        """See that there is one label for each row of logits, and that labels are integers.

        To be overridden where a tensor may have a shape that is not known yet.

        Raises:
            UnsupportedValueError: if they are not.
        """
        from d2ldev.training.learner import check_labels

        check_labels(prediction.shape, y.shape, self.dtype_of(y))

    @abstractmethod
    def _accuracy(self, prediction: Tensor, y: Tensor) -> Tensor:
        """The share of labels that are those of the largest logits; it stays on the device.

        Args:
            prediction: of shape ``(n, ..., classes)``.
            y: integers of any width, of shape ``(n, ...)``.

        Returns:
            A scalar in float32.
        """

    def _prefetch(
        self, batches: Iterable[Any], device: Device, depth: int
    ) -> Generator[Any, None, None]:
        """Batches that are moved ``depth`` batches before they are asked for.

        This is all that a framework needs whose copies are asynchronous; to be overridden where
        one has something better. A generator: nothing happens before the first batch is asked for.
        """
        from d2ldev.operations.batches import bring
        from d2ldev.operations.prefetching import moved_ahead

        # By way of tensors of the host: what goes from tensor to tensor is not waited for, and goes
        # together. Where nothing is waited for, it would only be one more copy.
        is_real = self._platform(device) not in ("cpu", "virtual")

        def start(batch: Any) -> Any:
            if is_real:
                batch = bring(self, batch, None)  # type: ignore[arg-type]
            return bring(self, batch, device)  # type: ignore[arg-type]

        return moved_ahead(batches, depth, start)

    def _loader_state(self, loader: Any) -> Any:
        """What the order of the next epoch of one of ``loader_types`` depends on, as a nesting.

        Besides the random numbers of Python and NumPy. None if that cannot be read: the loader is
        gone through then, to bring it to where it was.
        """
        return None

    def _checked_loader_state(self, loader: Any, state: Any) -> Callable[[], None]:
        """What gives a loader a state that ``_loader_state`` returned; nothing is changed before.

        Raises:
            CheckpointError: if it is none of such a loader. Nothing has to be done here where that
                state says only that the order depends on nothing else.
        """
        return lambda: None

    def _detached(self, x: Tensor) -> Tensor:
        """A scalar to be kept for long, without a copy of it where one can be avoided.

        For a framework whose tensors hold what they were computed from, or a larger tensor that
        they are a view of, which would stay in the memory with it; or whose variables are tensors,
        and do not keep their value.
        """
        return x

    @abstractmethod
    def _stack(self, xs: Sequence[Tensor]) -> Tensor:
        """Tensors of one shape, dtype and device as one tensor with a first axis more."""
