"""Take nestings of containers apart, and make them again."""
