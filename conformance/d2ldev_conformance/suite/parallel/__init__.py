"""Several devices that work together."""
