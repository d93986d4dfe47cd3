"""Write parameters into files and read them: one file for a nesting of tensors, models and numbers.

A file is a *safetensors* file that other programs can read, too. Its metadata holds what the format
lacks: the nesting, the true dtypes, checksums, and how the layers of a model are laid out. Nothing
in a file is ever executed: there is no pickle, and no class is imported.

- ``save.py``, ``load.py``, ``load_into.py``: the three calls.
- ``description.py``: from a nesting to its description as JSON, and back.
- ``tensors_by_name.py``: a mapping in memory, in the place of a file.
- ``layouts.py``: the same layers in the layouts of another framework.
- ``format/``: the header, checksums, dtypes, and a file that is either the old or the new one.

Source of the format: https://github.com/huggingface/safetensors#format; D2L, section 6.6,
"File I/O".
"""
