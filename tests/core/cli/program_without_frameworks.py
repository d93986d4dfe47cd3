"""``d2ldev`` where no framework is installed, whatever is installed here."""

import runpy
import sys

if __name__ == "__main__":
    sys.modules.update(dict.fromkeys(("torch", "jax", "tensorflow", "mxnet")))
    runpy.run_module("d2ldev", run_name="__main__", alter_sys=True)
