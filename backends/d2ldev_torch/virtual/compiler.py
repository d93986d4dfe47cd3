"""``torch.compile`` for virtual GPUs: a refusal that says what to do instead.

Its default compiler writes code for the devices that it knows. When it begins, it asks the module
of the ``PrivateUse1`` device for classes that write code for that one; what it gets here says no.
"""

from __future__ import annotations

from typing import Any, NoReturn

from d2ldev.errors import UnsupportedValueError
from d2ldev_torch.virtual.labels import NAME

_CLASSES = ("Scheduling", "PythonWrapperCodegen", "CppWrapperCodegen", "WrapperFxCodegen")


class _Refusal:
    """What is asked to write code, and raises."""

    def __getattr__(self, name: str) -> NoReturn:
        raise UnsupportedValueError(
            "compile a function for virtual GPUs",
            "torch's compiler writes no code for them",
            "torch.compile(f, backend='eager'), or compile for the CPU",
        )

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        self.__getattr__("__call__")


def attribute_of_module(name: str) -> Any:
    """What ``torch.vgpu`` has besides its functions, for the compiler."""
    if name not in _CLASSES:
        raise AttributeError(f"torch.{NAME} has no attribute {name!r}")
    from torch._inductor.codegen import common

    common.register_device_op_overrides(NAME, _Refusal())  # type: ignore[arg-type]
    return _Refusal()
