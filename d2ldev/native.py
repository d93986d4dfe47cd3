"""What the book's chapters take from ``d2l``, on any backend, with the framework's own devices.

>>> from d2ldev.native import reference as d2l
>>> d2l.try_gpu(1)
array_api_strict.Device('device2')

With ``from d2ldev.native import torch as d2l`` the cells of the chapter "GPUs" run on virtual GPUs
as well: ``torch.ones(2, 3, device=d2l.try_gpu(1))``, and ``@d2l.add_to_class(d2l.Trainer)``. Some
printed lines fail with today's frameworks; docs/d2l.md has a line for each. The framework's own
count of GPUs has no virtual ones. The book's models and data are in the book's package. Any known
backend is had by its name; importing this module imports none of them.

Held by ``tests/core/package/test_native.py`` and each backend's ``test_<framework>_chapter.py``,
which runs docs/d2l.md and the printed cells.

Source: D2L, sections 3.2, "Object-Oriented Design for Implementation", and 6.7, "GPUs".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from d2ldev._backend import Backend, backend_for, framework_of
from d2ldev.device import CPU, gpu
from d2ldev.options import nearest
from d2ldev.registry.discovery import ALIASES, choices, find_backends
from d2ldev.registry.selection import get_framework

Class = TypeVar("Class", bound=type)
Defined = TypeVar("Defined", bound=Callable[..., Any])

if TYPE_CHECKING:
    from d2ldev.training.trainer import Trainer

    jax: NativeDevices
    mxnet: NativeDevices
    reference: NativeDevices
    tensorflow: NativeDevices
    torch: NativeDevices


class NativeDevices:
    """The devices of one backend, by the book's functions, and the book's classes for it.

    A native device is ``torch.device('cuda:1')`` in PyTorch, a ``jax.Device`` in JAX and
    ``mx.gpu(1)`` in MXNet. In TensorFlow it is the name ``'/GPU:1'``, which is also a context, like
    ``tf.device``. Under virtual GPUs it is the framework's own object that stands for the GPU.

    ``Trainer`` and ``Module`` are classes of this object alone. So ``add_to_class`` does not change
    d2ldev's own classes.

    Args:
        backend: whose devices they are.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __repr__(self) -> str:
        return f"<the native devices of {self._backend.name}>"

    @staticmethod
    def add_to_class(cls: type) -> Callable[[Defined], Defined]:
        """Return a decorator that makes a function a method of a class, as the book's does.

        Source: D2L, section 3.2.1, "Utilities".

        """

        def add(defined: Defined) -> Defined:
            setattr(cls, defined.__name__, defined)
            return defined

        return add

    # -- the classes of section 3.2 -------------------------------------------------------

    @cached_property
    def Trainer(self) -> type[Trainer]:  # noqa: N802  # the book's name of a class
        """``d2ldev.Trainer``, which trains on this backend."""
        from d2ldev.training.trainer import Trainer  # most programs do not train

        made: type[Trainer] = type("Trainer", (Trainer,), {"backend": self._backend})
        return self._name_class(made)

    @cached_property
    def Module(self) -> type:  # noqa: N802
        """The book's ``Module``: the framework's own class of models with the book's methods.

        Raises:
            UnsupportedValueError: if the framework has none.
        """
        from d2ldev.training.book import ModuleMethods

        return self._name_class(framework_of(self._backend).training.module_class(ModuleMethods))

    @cached_property
    def DataModule(self) -> type:  # noqa: N802
        """The book's ``DataModule``, to be derived from."""
        from d2ldev.training.book import DataModule

        return self._name_class(type("DataModule", (DataModule,), {}))

    @cached_property
    def HyperParameters(self) -> type:  # noqa: N802
        """The book's ``HyperParameters``, with ``save_hyperparameters``."""
        from d2ldev.training.book import HyperParameters

        return self._name_class(type("HyperParameters", (HyperParameters,), {}))

    def _name_class(self, made: Class) -> Class:
        """Return a class by whose name ``pickle`` finds it again, in another process as well."""
        made.__module__, made.__qualname__ = __name__, f"{self._backend.name}.{made.__name__}"
        return made

    def __getattr__(self, name: str) -> Any:
        there = ", ".join(each for each in dir(type(self)) if not each.startswith("_"))
        raise AttributeError(
            f"d2ldev.native has no {name!r}. It has {there}; all else is in the book's own package "
            "(pip install d2l), see docs/d2l.md"
        )

    # -- the functions of section 6.7 -----------------------------------------------------

    def to(self, x: Any, device: Any) -> Any:
        """Return a tensor, or a nesting of tensors, on a device; see ``Backend.to``."""
        return self._backend.to(x, device)

    def cpu(self) -> Any:
        """Return the CPU."""
        return self._backend.native(CPU)

    def gpu(self, i: int = 0) -> Any:
        """Return the GPU of index ``i``, whether or not it exists.

        Raises:
            InvalidDeviceError: if ``i`` is negative, or not an integer.
            DeviceUnavailableError: if it does not exist, and the framework has no object for a
                missing GPU. JAX has no such object, and virtual GPUs have none either.
        """
        device = gpu(i)
        if device.index >= self.num_gpus():
            native = framework_of(self._backend).devices.native_of_missing(device)
            if native is not None:
                return native
        return self._backend.native(device)

    def num_gpus(self) -> int:
        """Return how many GPUs there are; 0 if none. See ``Backend.num_gpus``."""
        return self._backend.num_gpus()

    def try_gpu(self, i: int = 0) -> Any:
        """Return ``gpu(i)`` if it exists, else the CPU."""
        return self._backend.native(self._backend.try_gpu(i))

    def try_all_gpus(self) -> list[Any]:
        """Return all GPUs, or ``[cpu()]`` if there is none: never empty."""
        return [self._backend.native(device) for device in self._backend.try_all_gpus()]


def __getattr__(name: str) -> NativeDevices:
    """Return the devices of any known backend by its name.

    Raises:
        UnknownBackendError: if it is nearly the name of one. Of an ``AttributeError`` the statement
            ``from d2ldev.native import torhc`` makes an ``ImportError`` without the choices.
        AttributeError: for other names. ``pickle`` asks each module for the names that it needs.
        BackendNotInstalledError: as ``d2ldev.get_backend``.
    """
    if nearest(name, [*find_backends(), *ALIASES]):
        backend = backend_for(get_framework(name))
        # The same object each time, so that its classes are the same.
        return _handed_out.setdefault(backend, NativeDevices(backend))
    raise AttributeError(f"module 'd2ldev.native' has no backend {name!r}; {choices()}")


def __dir__() -> list[str]:
    """Return the public names, without the backends, as ``d2ldev``."""
    return ["NativeDevices"]


_handed_out: dict[Backend, NativeDevices] = {}
