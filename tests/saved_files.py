"""What tests compare of tensors that were saved and loaded."""


def values(backend, x):
    """The values of a tensor as lists."""
    return backend.to_numpy(x).tolist()


def bits(backend, x):
    """All of a tensor: its bytes are the same for NaNs, too."""
    array = backend.to_numpy(x)
    return array.dtype.name, array.shape, array.tobytes()
