"""What tests compare of tensors that were saved and loaded."""


def values(backend, x):
    """Return the values of a tensor as lists."""
    return backend.to_numpy(x).tolist()


def bits(backend, x):
    """Return a tensor's dtype, shape and bytes, which are the same for NaNs, too."""
    array = backend.to_numpy(x)
    return array.dtype.name, array.shape, array.tobytes()
