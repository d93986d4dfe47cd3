"""What a type checker says of ``d2ldev.typing.Array``, for the tensors of each framework.

pyright reads it, and ``test_arrays.py`` has mypy read it with the annotations of JAX and of
TensorFlow. For the mypy of ``tox -e types`` both are ``Any``, as MXNet always is. Nothing is run.
"""

from __future__ import annotations

from typing import Any, TypeVar, assert_type

import array_api_strict
import jax
import numpy as np
import numpy.typing as npt
import tensorflow as tf
import torch

from d2ldev import ArrayLoader, Backend, backend_of
from d2ldev.typing import Array

ArrayT = TypeVar("ArrayT", bound=Array)


def use_operators(x: ArrayT, y: ArrayT) -> ArrayT:
    x = 1 - x + 1
    x = 2 * x / 3 * 2
    x = (1 / x) ** 2 @ x
    x = -x[0][:, None]
    mask = (x == y) & (x != y) | (x < 3) & (x <= 4) | (x > 5) & (x >= 6)
    print(abs(x) + y)  # for mypy it is an Array
    assert_type(x.dtype, Any)
    assert_type(x.shape, Any)
    assert_type(bool(x), bool)
    assert_type(int(x), int)
    assert_type(x & x, ArrayT)
    assert_type(x | x, ArrayT)
    return x[mask]


def check_torch(x: torch.Tensor) -> None:
    assert_type(use_operators(x, x), torch.Tensor)


def check_jax(x: jax.Array) -> None:
    assert_type(use_operators(x, x), jax.Array)


def check_tensorflow(x: tf.Tensor) -> None:
    assert_type(use_operators(x, x), tf.Tensor)


def check_the_reference() -> None:
    x = array_api_strict.ones(2)
    use_operators(x, x)


def check_numpy(x: npt.NDArray[np.float32], y: npt.NDArray[np.int64], z: npt.NDArray[Any]) -> None:
    assert_type(use_operators(x, x), npt.NDArray[np.float32])
    assert_type(use_operators(y, y), npt.NDArray[np.int64])
    assert_type(use_operators(z, z), npt.NDArray[Any])
    use_operators(np.ones((2, 2)), np.ones((2, 2)))


def check_others(x: Array, parameter: torch.nn.Parameter, variable: tf.Variable) -> None:
    print(x.device)  # type: ignore[attr-defined]
    print(x // 2)  # type: ignore[operator]
    print(2**x)  # type: ignore[operator]
    print(+x)  # type: ignore[operator]
    print(len(x))  # type: ignore[arg-type]
    x[0] = 1  # type: ignore[index]
    use_operators(3, 3)  # type: ignore[type-var]
    use_operators(parameter, parameter)  # type: ignore[type-var]
    assert_type(backend_of(parameter), Backend[Any, Any])
    assert_type(backend_of(variable), Backend[Any, Any])
    ArrayLoader(parameter, variable, batch_size=2)
