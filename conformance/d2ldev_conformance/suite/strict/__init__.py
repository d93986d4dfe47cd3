"""The requirements of the area ``strict``."""
