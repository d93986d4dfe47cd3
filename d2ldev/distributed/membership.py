"""Join the other processes of a launch, which train one model with one framework."""

from __future__ import annotations

import sys
from contextlib import suppress

from d2ldev.contract import Framework
from d2ldev.contract.abilities import require
from d2ldev.contract.group import Group
from d2ldev.errors import UnsupportedValueError
from d2ldev.settings import peer_timeout, peers


def join_group(framework: Framework) -> Group | None:
    """Return the processes that train together, with a running engine; None without a launch.

    Raises:
        PeerLostError: if the others do not connect.
        UnsupportedValueError: if the framework trains in one process only, or the processes run
            different programs. If only the framework's own engine or launcher knows of the others.
    """
    if (launched := peers()) is None:
        _check_alone(framework)
        return None
    require(
        framework,
        "train in several processes",
        f"train in {launched.world_size} processes",
        "unset WORLD_SIZE for a process of its own",
    )
    from d2ldev.distributed.join import find_group, join  # only a launch needs it

    is_new = find_group() is None
    if is_new and framework.parallel.find_launch():
        # The program has started the engine itself, which may listen at this port.
        launched = launched._replace(port=launched.port + 1)
    group = join(launched, list_versions(framework), peer_timeout())
    if is_new:
        with group.work():
            framework.parallel.join(group)
    return group


def list_versions(framework: Framework) -> dict[str, str]:
    """Return the versions that have to be the same in all processes of a launch."""
    from importlib.metadata import PackageNotFoundError, version  # only a launch needs it

    found = {}
    for name in ("d2ldev", *framework.distributions):
        with suppress(PackageNotFoundError):
            # The first on the path, as of what is imported: there may be several.
            found[name] = version(name)
    return {**found, "backend": framework.name, "python": sys.version.split()[0]}


def _check_alone(framework: Framework) -> None:
    """Check that this process is not one of several, which would each train its own model."""
    if found := framework.parallel.find_launch():
        raise UnsupportedValueError(
            "train in one process of several",
            f"by {found} this process may be one of several, but RANK and WORLD_SIZE are not set",
            "d2ldev launch, or torchrun's variables before the backend's first use; or leave "
            f"{found} out, for a model in each process",
        )
