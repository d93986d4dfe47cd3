"""The format of a file: header, dtypes, checksums, and writing all of it or nothing."""
