"""The requirements of the area ``devices``."""
