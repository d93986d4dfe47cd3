"""Write parameters into files and read them: one file for a nesting of tensors, models and numbers.

A file is a *safetensors* file that other programs can read, too. Its metadata holds what the format
lacks: the nesting, the true dtypes, checksums, and the layouts of a model's layers. Nothing in a
file is ever executed: there is no pickle, and no class is imported.

- ``save.py``, ``load.py``, ``load_into.py``: the three calls.
- ``match.py``: which tensor of a file belongs to which of an object.
- ``structure.py``: the description of a nesting in a file.
- ``tensors_by_name.py``: a mapping in memory, in the place of a file.
- ``format/``: the parts of the format that the ``safetensors`` library does not have.

Source of the format: https://github.com/huggingface/safetensors#format; D2L, section 6.6,
"File I/O".
"""
