"""Between JAX and NumPy: copies in both directions.

``jax.device_put`` takes over an aligned NumPy array's memory, also if it is told not to, and what
is written to the array then shows in JAX's: https://github.com/jax-ml/jax/issues/37830
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from d2ldev.interface import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray


def from_data(
    obj: Any, dtype: np.dtype[Any] | None, native: jax.Device, narrow: Callable[[str], str]
) -> Tensor:
    """A new array with the values of a number, nested lists, or a NumPy array.

    Args:
        obj: the data.
        dtype: None for JAX's own choice.
        native: where to.
        narrow: the name of the dtype that JAX gives to NumPy data of a dtype.
    """
    if isinstance(obj, np.ndarray):
        if dtype is None and (name := narrow(obj.dtype.name)) != obj.dtype.name:
            dtype = np.dtype(name)
        # A copy that nobody else knows: JAX may share its memory as it likes.
        return jax.device_put(obj.astype(obj.dtype if dtype is None else dtype), native)
    with jax.default_device(native):
        made = jnp.array(obj, dtype=dtype)
    # No copy, unless the arrays in a list were elsewhere: it is committed by this.
    return jax.device_put(made, native)


def to_numpy(x: Tensor) -> NDArray[Any]:
    """The values of an array, wherever it is, in an array of NumPy's; those of random keys too."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.array(x)
