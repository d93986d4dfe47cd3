"""The requirements of the area ``models``."""
