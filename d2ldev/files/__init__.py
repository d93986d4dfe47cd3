"""Reading and writing parameters: one file for a nesting of tensors, models and numbers.

A file is a *safetensors* file that other programs can read, too. What the format does not say is
in its metadata: the nesting, the true dtypes, checksums, and how the layers of a model are laid
out. Nothing in a file is ever executed: there is no pickle, and no class is imported for it.

- ``dtypes.py``: how each dtype is stored.
- ``header.py``: the format's header, made and checked.
- ``nesting.py``: from a nesting to its description as JSON; ``restoring.py``: and back.
- ``checksums.py``: the checksum of each tensor, and the names of their algorithms.
- ``atomic.py``: a file that is either the old one or the new one.
- ``writing.py``, ``reading.py``, ``fitting.py``: ``save``, ``load`` and ``load_into``.
- ``matching.py``, ``remaking.py``, ``misfits.py``: the steps of ``load_into``.
- ``layouts.py``, ``layers.py``: the same layers in the layouts of another framework.

Source of the format: https://github.com/huggingface/safetensors#format; D2L, section 6.6,
"File I/O".
"""
