"""The requirements of the area ``tensors``."""
