"""The bytes of a file: header, dtypes, checksums, and writing at once or not at all."""
