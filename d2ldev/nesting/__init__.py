"""What is in a nesting of containers, and how one is made again."""
