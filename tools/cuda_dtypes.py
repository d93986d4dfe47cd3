"""Write the tables of the dtypes that only the CPU's or only CUDA's kernels compute.

PyTorch's own table of operators has the dtypes of each on the CPU and on CUDA. This program runs
the operators on the CPU, and finds the kernels that make the difference. It leaves out what a build
for the CPU cannot tell: half precision that only the CPU seems to compute. It needs PyTorch for the
CPU, and ``expecttest``::

    python tools/cuda_dtypes.py
"""

import warnings
from collections import defaultdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

OUTPUT = Path(__file__).parents[1] / "backends/d2ldev_torch/virtual/cuda_dtypes.py"
WIDER = {
    torch.bool: torch.uint8,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
# Kernels that only cards have, and operators that have one entry for each way to compute.
LEFT_OUT = ("_flash_attention", "_efficient_attention", "_scaled_mm", "batch_norm", "jiterator")
SAMPLES = 12
TEXT = '''"""The dtypes of operators that only the CPU's or only CUDA's kernels compute.

``tools/cuda_dtypes.py`` wrote these tables with torch {version}. Each has the names of dtypes by
the name of an operator. The rules are in ``dtypes.py``.
"""

ONLY_ON_CPU = {cpu}

ONLY_ON_CUDA = {cuda}
'''

Table = dict[str, set[str]]


class Recorder(TorchDispatchMode):
    """Notes the kernels that are called, with the dtypes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor) and is_kernel(op):
                self.calls.add((name_of(op), x.dtype))
        return op(*args, **(kwargs or {}))


class Narrower(TorchDispatchMode):
    """Tries each kernel with a narrower dtype, and notes those that fail with it."""

    def __init__(self, narrow: torch.dtype) -> None:
        super().__init__()
        self.narrow, self.wide = narrow, WIDER[narrow]
        self.failed: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def change(value: Any) -> Any:
            is_wide = isinstance(value, torch.Tensor) and value.dtype is self.wide
            return value.to(self.narrow) if is_wide else value

        if is_kernel(op):
            new, named = tree_map(change, (args, kwargs or {}))
            try:
                op(*new, **named)
            except RuntimeError:
                self.failed.add(name_of(op))
        return op(*args, **(kwargs or {}))


def is_kernel(op: Any) -> bool:
    """Return whether an operator computes something, and makes no view."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = ("CPU", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    return torch.Tag.inplace_view not in op.tags and any(has(op.name(), key) for key in keys)


def name_of(op: Any) -> str:
    """Return an operator's name, the same for the operator in place."""
    return str(op._schema.name).removeprefix("aten::").removesuffix("_")


def samples_of(entry: Any, dtype: torch.dtype, *, has_gradient: bool = False) -> list[Any]:
    """Return an operator's first samples; none if it has none for the dtype."""
    try:
        found = entry.sample_inputs("cpu", dtype, requires_grad=has_gradient)
        return list(islice(found, SAMPLES))
    except (RuntimeError, ValueError, TypeError):
        return []


def run(entry: Any, sample: Any) -> None:
    """Call an operator, and compute gradients where there are some."""
    results = tree_leaves(entry(sample.input, *sample.args, **sample.kwargs))
    totals = [x.abs().sum() for x in results if isinstance(x, torch.Tensor) and x.requires_grad]
    if totals:
        sum(totals).backward()  # type: ignore[union-attr]


def record(entry: Any, dtype: torch.dtype) -> set[tuple[str, torch.dtype]]:
    """Return the kernels that an operator's samples call."""
    recorder = Recorder()
    for sample in samples_of(entry, dtype):
        try:
            with recorder:
                run(entry, sample)
        except (RuntimeError, ValueError, TypeError):
            continue
    return {call for call in recorder.calls if call[1] is dtype}


def list_only_on_cpu(entry: Any) -> set[torch.dtype]:
    """Return the dtypes that CUDA refuses, and not the CPU.

    The table names one integer for some operators whose kernels take several, such as convolutions.
    Where CUDA computes no integer, it refuses all of them.
    """
    found: set[torch.dtype] = entry.dtypes - entry.dtypesIfCUDA
    if found & INTEGERS and not entry.dtypesIfCUDA & INTEGERS:
        found |= INTEGERS
    return {dtype for dtype in found - set(WIDER) if "float8" not in str(dtype)}


def find_only_on_cpu(entries: list[Any]) -> Table:
    """Return the kernels that CUDA has not for a dtype."""
    pairs = [(entry, dtype) for entry in entries for dtype in list_only_on_cpu(entry)]
    dtypes = {dtype for _, dtype in pairs}
    common: set[tuple[str, torch.dtype]] = set()
    for entry in entries:
        for dtype in entry.dtypes & entry.dtypesIfCUDA & dtypes:
            common |= record(entry, dtype)
    found: Table = defaultdict(set)
    for entry, dtype in pairs:
        for name, _ in record(entry, dtype) - common:
            found[name].add(str(dtype).removeprefix("torch."))
    return found


def find_only_on_cuda(entries: list[Any]) -> Table:
    """Return the kernels that the CPU has not for a dtype."""
    found: Table = defaultdict(set)
    for entry in entries:
        for dtype in entry.dtypesIfCUDA - entry.dtypes:
            if dtype not in WIDER:
                continue
            narrower = Narrower(dtype)
            has_gradient = dtype is not torch.bool and dtype in entry.backward_dtypesIfCUDA
            for sample in samples_of(entry, WIDER[dtype], has_gradient=has_gradient):
                try:
                    with narrower:
                        run(entry, sample)
                except RuntimeError:  # the CPU has no kernel for the wider dtype either
                    break
            names = narrower.failed | ({entry.aten_name} if refuses(entry, dtype) else set())
            for name in names:
                found[name].add(str(dtype).removeprefix("torch."))
    return found


def refuses(entry: Any, dtype: torch.dtype) -> bool:
    """Return whether an operator itself refuses a dtype, before it calls a kernel."""
    for sample in samples_of(entry, WIDER[dtype]):
        x, args, kwargs = tree_map(
            lambda value: value.to(dtype) if isinstance(value, torch.Tensor) else value,
            (sample.input, sample.args, sample.kwargs),
        )
        recorder = Recorder()
        try:
            with recorder:
                entry(x, *args, **kwargs)
        except RuntimeError:
            return not recorder.calls
    return False


def format_table(table: Table) -> str:
    """Return a table as the text of a dict, in the order of the names."""
    rows = (f"    {name!r}: {' '.join(sorted(table[name]))!r},\n" for name in sorted(table))
    return "{\n" + "".join(rows).replace("'", '"') + "}"


def main() -> None:
    """Write the tables."""
    warnings.simplefilter("ignore")
    entries = [entry for entry in op_db if not any(name in entry.name for name in LEFT_OUT)]
    tables = {
        "cpu": format_table(find_only_on_cpu(entries)),
        "cuda": format_table(find_only_on_cuda(entries)),
    }
    version = torch.__version__.partition("+")[0]
    OUTPUT.write_text(TEXT.format(version=version, **tables), encoding="utf-8")


if __name__ == "__main__":
    main()
