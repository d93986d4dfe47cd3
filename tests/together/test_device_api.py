"""The device API stands alone: its calls import nothing of training and of the tools."""

import pytest
from processes import run_python

ABOVE = ("d2ldev.training", "d2ldev.distributed", "d2ldev.leaks", "d2ldev.bench", "d2ldev.cli")


@pytest.mark.parametrize("name", ["reference", "torch", "jax", "tensorflow", "mxnet"])
def test_calls_of_the_device_api_import_nothing_above_it(name, tmp_path):
    code = f"""
        import sys
        import numpy as np
        from d2ldev import backend
        X, path = backend.ones((4, 2), device="gpu:0"), {str(tmp_path / "file")!r}
        backend.copy(backend.to({{"x": X, "y": np.ones(4)}}, "gpu:1"))
        net = backend.place(backend.mlp([2, 1]), "gpu:0")
        backend.placement(net), backend.named_tensors(net), backend.summarize(net)
        backend.save(net, path)
        backend.load_into(net, path)
        backend.split(X, ["gpu:0", "gpu:1"]), backend.replicate(net, ["gpu:0", "gpu:1"])
        list(backend.prefetch([np.ones(2)], "gpu:1"))
        with backend.strict(), backend.on("gpu:0"):
            backend.synchronize()
        show(sorted(each for each in sys.modules if each.startswith({ABOVE!r})))
    """
    variables = {"D2LDEV_BACKEND": name, "D2LDEV_VIRTUAL_GPUS": "2"}
    assert run_python(code, hide=(), environment=variables)[-1] == []
