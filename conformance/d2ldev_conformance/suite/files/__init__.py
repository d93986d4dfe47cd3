"""The requirements of the area ``files``."""
