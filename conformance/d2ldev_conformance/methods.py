"""Which methods a requirement is about, and what a report says of each method.

The beginning of an id tells it: ``copy.copy-`` is about ``Backend.copy``. The calls of a test do
not tell it: tests make tensors and look at them by other methods.

Held by ``tests/suite/test_methods.py``. Each method has a requirement, and each requirement has an
entry. The tests of a requirement use the methods of its entry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

_CREATE = ("asarray", "zeros", "ones", "full", "empty", "arange", "rand", "randn")
_LIKE = ("zeros_like", "ones_like", "full_like", "empty_like")

METHODS: dict[str, tuple[str, ...]] = {
    "bench.": (),
    "callbacks.": ("Trainer.fit",),
    "chapter.": ("strict",),
    "chapter.copy-": ("copy",),
    "chapter.net-": ("mlp", "place", "strict"),
    "chapter.two-gpus": ("try_gpu", "try_all_gpus"),
    "chapter.x-on-": ("ones",),
    "chapter.y-on-": ("rand",),
    "chapter.z-": ("to",),
    "containers.": ("to",),
    "containers.text-is-copied": ("copy",),
    "containers.walked-once": ("to", "prefetch"),
    "copy.": ("to", "copy"),
    "copy.copy-": ("copy",),
    "copy.noop-": ("to",),
    "copy.out-of-memory-": ("copy",),
    "copy.python-copies-": (),
    "copy.sum-stays": (),
    "copy.there-and-back": ("to",),
    "copy.ties-are-copied-once": ("copy",),
    "copy.to-": ("to",),
    "copy.to-leaves-the-default-device": ("to", "copy", "default_device"),
    "copy.views-move-whole": ("to",),
    "create.": _CREATE,
    "create.a-tensor-": ("asarray",),
    "create.arange": ("arange",),
    "create.arrays-": ("asarray",),
    "create.bad-global-seeds": ("seed",),
    "create.bad-shapes": ("zeros",),
    "create.bad-seeds": ("rand",),
    "create.conversion": ("asarray",),
    "create.copy-is-": ("asarray",),
    "create.default-complex-dtype": ("asarray", "full"),
    "create.default-dtype": ("asarray", "zeros", "full", "arange", "rand", "randn"),
    "create.default-integer-dtype": ("asarray", "full", "arange"),
    "create.device-as-a-context": (),
    "create.dtype-of-": ("dtype_of",),
    "create.empty": ("empty",),
    "create.empty-on-": _CREATE,
    "create.empty-ranges": ("arange",),
    "create.every-dtype": ("dtype", "dtype_of"),
    "create.from-": ("asarray",),
    "create.full": ("full",),
    "create.has-dtypes": (),
    "create.huge-integers-": ("asarray", "full"),
    "create.in-a-scope": (*_CREATE, "on"),
    "create.integers-": ("asarray", "full", "arange"),
    "create.large-integers": ("asarray",),
    "create.large-ranges": ("arange",),
    "create.like-another-tensor": _LIKE,
    "create.like-beats-": ("asarray", "ones", "arange", "rand"),
    "create.like-gives-": ("asarray", "zeros", "ones", "full", "arange", "rand"),
    "create.like-is-": ("zeros", "ones"),
    "create.native-dtype": ("dtype",),
    "create.never-aliases-": ("asarray",),
    "create.no-copy": ("asarray",),
    "create.numpy-dtype": ("dtype",),
    "create.numpy-layouts": ("asarray",),
    "create.own-calls-in-a-scope": ("on",),
    "create.rand-": ("rand",),
    "create.randn-": ("randn",),
    "create.random-integers": ("randn",),
    "create.ranges-": ("arange",),
    "create.refuses-": ("asarray",),
    "create.scope": ("on",),
    "create.scopes-end": ("on", "default_device"),
    "create.seeds-every-thread": ("rand", "seed"),
    "create.seeds-": ("rand", "randn"),
    "create.seeds-everything": ("seed", "rand", "randn"),
    "create.shapes": ("zeros", "rand"),
    "create.special-values": ("asarray",),
    "create.unknown-dtype": ("dtype",),
    "create.values-that-": ("asarray", "full"),
    "create.wide-numpy-data": ("asarray",),
    "create.zeros-and-ones": ("zeros", "ones"),
    "devices.": ("device",),
    "devices.all-gpus-": ("try_all_gpus",),
    "devices.bad-spellings": ("ones",),
    "devices.count": ("num_gpus",),
    "devices.cpu-": ("cpu",),
    "devices.foreign-objects": ("ones", "to"),
    "devices.gpu-": ("gpu",),
    "devices.gpus-are-distinct": ("gpu", "native"),
    "devices.index-": ("gpu",),
    "devices.list-": ("devices",),
    "devices.native-": ("native",),
    "devices.native-functions": ("cpu", "try_gpu", "try_all_gpus", "native"),
    "devices.platform-": ("platform",),
    "devices.try-gpu-": ("try_gpu",),
    "errors.": (),
    "files.": ("save",),
    "fit.": ("Trainer.fit",),
    "fit.too-many-gpus": ("Trainer",),
    "gpus.a-copy-": ("to", "copy", "rand"),
    "gpus.counting-": ("num_gpus", "devices"),
    "gpus.device-of-": ("device",),
    "gpus.hidden-": ("num_gpus",),
    "gpus.large-copies": ("to", "to_numpy"),
    "gpus.made-in-place": ("zeros",),
    "gpus.strict-": (),
    "gpus.synchronizing-": ("synchronize",),
    "hooks.": ("Trainer.fit",),
    "io.": ("save", "load"),
    "io.a-failing-save-": ("save",),
    "io.device-": ("load",),
    "io.finds-": ("load",),
    "io.gradients-are-not-saved": ("save",),
    "io.keeps-buffers": ("save", "load_into"),
    "io.keeps-states-": ("save", "load_into"),
    "io.keeps-what-": ("save", "load_into"),
    "io.load-into-": ("load_into",),
    "io.loads-": ("load",),
    "io.makes-": ("load", "load_into"),
    "io.matches-": ("save", "load_into"),
    "io.named-tensors-": ("named_tensors", "save"),
    "io.passes-over-": ("save", "load_into"),
    "io.refuses-": ("load",),
    "io.refuses-what-no-file-": ("save",),
    "io.training-goes-on": ("save", "load_into"),
    "labels.": ("learner",),
    "labels.accuracy-": ("accuracy",),
    "labels.fit-": ("Trainer.fit",),
    "labels.of-weight-zero": ("Trainer.fit",),
    "leaks.": ("find_leaks",),
    "log.": ("DeviceLog",),
    "memory.": ("memory",),
    "memory.empty-cache": ("empty_cache",),
    "memory.live-tensors": ("live_tensors",),
    "memory.missing-device": ("memory", "empty_cache", "live_tensors"),
    "mlp.": ("mlp",),
    "module.": ("Trainer.fit",),
    "module.counts-batches": ("Trainer.validate",),
    "place.": ("place",),
    "place.has-samples": (),
    "place.keeps-names": ("place", "placement"),
    "place.named-tensors": ("named_tensors",),
    "place.names-": ("place", "placement"),
    "precision.": ("matmul_precision",),
    "precision.curves-agree": ("Trainer.fit",),
    "precision.same-curve": ("Trainer.fit",),
    "prefetch.": ("prefetch",),
    "processes.": ("join_group", "Trainer.fit"),
    "processes.end-while-": ("Trainer.fit",),
    "processes.start-again": ("Trainer.fit",),
    "processes.train-on-two-machines": (),
    "query.address": ("address",),
    "query.backend-": ("backend_of",),
    "query.backend-is-one-object": ("get_backend",),
    "query.device-": ("device_of",),
    "query.dlpack-": ("from_dlpack",),
    "query.dtype-": ("dtype_of",),
    "query.dtype-and-address-": ("dtype_of", "address"),
    "query.native-type": (),
    "query.norm-": (),
    "query.own-calls-": (),
    "query.result-is-right": (),
    "query.result-is-where-": (),
    "query.to-numpy-": ("to_numpy",),
    "replicate.": ("replicate",),
    "runs.": ("Trainer.fit",),
    "runs.errors-name-the-call": ("Trainer.validate", "Trainer.predict"),
    "runs.measure-what-is-frozen": ("Trainer.validate", "Trainer.predict"),
    "runs.predict": ("Trainer.predict",),
    "runs.refuse-what-is-none": ("Trainer.validate", "Trainer.predict"),
    "runs.validate": ("Trainer.validate",),
    "runs.without-parameters": ("Trainer.validate", "Trainer.predict"),
    "scopes.": ("on",),
    "scopes.any-order": ("on", "strict"),
    "scopes.async-": ("on", "strict"),
    "scopes.devices-": (),
    "scopes.left-by-break": ("on", "strict"),
    "scopes.use-backend-": ("use_backend",),
    "several.": ("Trainer.fit",),
    "several.predict-": ("Trainer.validate", "Trainer.predict"),
    "several.refuse-": ("learner",),
    "split.": ("split",),
    "strict.": ("strict",),
    "show.": ("summarize",),
    "sync.": ("synchronize", "is_idle"),
    "sync.values-are-there": ("synchronize",),
    "threads.backend-": ("use_backend",),
    "threads.copies-": ("to", "copy"),
    "threads.first-use": (),
    "threads.models-": ("place", "mlp"),
    "threads.scopes-": ("on",),
    "time.": ("timeit",),
    "train.": ("learner",),
}
"""The beginning of an id -> the methods; the longest beginning counts.

A name alone is a method of ``Backend``, or a function or class of ``d2ldev``. Empty for
requirements about operations of the framework, and about errors whatever method raises them.
"""


def find_methods(requirement: str) -> tuple[str, ...]:
    """Return the methods that a requirement is about.

    Args:
        requirement: its id.

    Raises:
        KeyError: if the table has no beginning of this id.

    >>> find_methods("copy.copy-is-new-memory")
    ('copy',)
    """
    beginnings = [each for each in METHODS if requirement.startswith(each)]
    if not beginnings:
        raise KeyError(f"no entry in METHODS is the beginning of {requirement}")
    return METHODS[max(beginnings, key=len)]


class Verdict(NamedTuple):
    """What a report says of a method.

    Args:
        outcome: ``'passed'``, ``'failed'``, ``'known gap'``, ``'cannot'``, ``'not begun'`` or
            ``'not run'``. A method has passed if each requirement that was tried has passed.
        passed: how many requirements have passed.
        total: how many there are.
        reasons: (outcome, requirement, reason) of each one that was tried and has not passed. One
            with several reasons has several entries.
    """

    outcome: str
    passed: int
    total: int
    reasons: tuple[tuple[str, str, str], ...]


# The worst first. A skipped requirement was not tried, as on a machine without the GPUs. Neither
# was one that the run did not come to.
_WORST_FIRST = ("failed", "not begun", "known gap", "cannot")


def judge_methods(
    document: Mapping[str, Any], requirements: Iterable[str]
) -> Iterator[tuple[str, Verdict]]:
    """Yield each method with the verdict of a report.

    Args:
        document: the report, as ``read_report`` returns it.
        requirements: the ids of all requirements; a report may be older than some of them.
    """
    rows = {row["requirement"]: row for row in document["requirements"]}
    # Some tests of a requirement may have been skipped, and their reasons stand beside the others.
    skipped = {x for row in rows.values() if row["outcome"] == "skipped" for x in row["reasons"]}
    for method, ids in list_methods(requirements).items():
        found = [rows[each] for each in ids if each in rows]
        counts = Counter(row["outcome"] for row in found)
        outcome = next((each for each in _WORST_FIRST if counts[each]), "passed")
        if not counts.keys() - {"skipped", "not run"}:
            outcome = "not run"
        reasons = tuple(
            (row["outcome"], row["requirement"], reason)
            for row in found
            if row["outcome"] in _WORST_FIRST
            for reason in [each for each in row["reasons"] if each not in skipped] or [""]
        )
        yield method, Verdict(outcome, counts["passed"], len(ids), reasons)


def list_methods(requirements: Iterable[str]) -> dict[str, list[str]]:
    """Return method -> the ids of the requirements about it, in the order of the ids.

    Args:
        requirements: the ids of all requirements.
    """
    found: dict[str, list[str]] = {}
    for each in sorted({*requirements}):
        for method in find_methods(each):
            found.setdefault(method, []).append(each)
    return found
