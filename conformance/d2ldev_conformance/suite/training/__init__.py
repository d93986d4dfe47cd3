"""The requirements of the area ``training``."""
