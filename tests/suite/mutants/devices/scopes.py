"""Mutants whose blocks are left wrongly, where they end in another order, thread or task."""

from __future__ import annotations

import threading

from reference_backend import NATIVE, ReferenceDevices

from d2ldev.contract import Strictness
from d2ldev.errors import ScopeError
from d2ldev.framework import CPU, Scopes
from d2ldev.registry import selection
from d2ldev.scopes import Contexts
from mutants import Mutant


class HasADefault(Mutant):
    """A sound backend whose framework has a default device, which each block puts back."""

    class Devices(ReferenceDevices):
        def __init__(self, virtual_gpus):
            super().__init__(virtual_gpus)
            self.local = threading.local()

        def default(self):
            return getattr(self.local, "default", None) or NATIVE[CPU]

        def scope(self, device):
            return Default(self.local, NATIVE[device])


class Default:
    """A block of the framework's own."""

    def __init__(self, local, native):
        self.local, self.native = local, native

    def __enter__(self):
        self.before = getattr(self.local, "default", None)
        self.local.default = self.native

    def __exit__(self, *error):
        if self.local.default is not self.native:
            raise RuntimeError("another block is in force")
        self.local.default = self.before


class Unordered(Contexts):
    """Each context is left by itself."""

    def leave(self, entered, attempted):
        entered.context.local.default = entered.context.before


class StrictOrder(Contexts):
    """Contexts that can only be left in their order."""

    def leave(self, entered, attempted):
        entered.context.__exit__(None, None, None)


class PutsBackWhatItFound(HasADefault, caught_by="scopes.any-order"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        self.state.contexts = Unordered()


class WantsTasksToEndInOrder(HasADefault, caught_by="scopes.tasks"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        self.state.contexts = StrictOrder()


class Unreachable(Scopes):
    """Blocks that can be left only where they were entered."""

    __slots__ = ()

    def leave(self, entry):
        if entry.leave_as_owner():
            super().leave(entry)


class OnlyItsOwnerLeaves(Mutant):
    """A backend whose blocks can be left only where they were entered."""

    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        self.state.scope = Unreachable(f"{self.name}_scope")


class StaysInTheBlockOfAGenerator(OnlyItsOwnerLeaves, caught_by="scopes.async-generators"):
    pass


class StaysInABlockThatIsLeftByBreak(OnlyItsOwnerLeaves, caught_by="scopes.left-by-break"):
    pass


class StaysInABlockThatIsClosedElsewhere(HasADefault, caught_by="scopes.other-threads"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        self.state.contexts = Unordered()


class KeepsADeviceThatIsLeftElsewhere(
    OnlyItsOwnerLeaves, caught_by="scopes.devices-in-other-threads"
):
    pass


class StaysActive(Mutant, caught_by="scopes.use-backend-in-other-threads"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        # Each mutant is given to the suite in a process of its own.
        selection.scoped.__class__ = Unreachable


class StaysStrict(Mutant, caught_by="strict.other-threads-close-it"):
    class Strictness(Strictness):
        def __init__(self, name, get_strict):
            super().__init__(name, get_strict)
            self._blocks = Deaf(f"{name}_strict")


class Deaf(Scopes):
    """Blocks of which a thread does not notice that they have ended elsewhere."""

    def is_in_force(self):
        return bool(self._entries.get())


class ForgetsBlocksOfTheFramework(HasADefault, caught_by="scopes.blocks-of-the-framework"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        self.state.contexts = GivesUp()


class GivesUp(Contexts):
    """Contexts that are tried once."""

    def leave(self, entered, attempted):
        try:
            super().leave(entered, attempted)
        except ScopeError:
            self._entered.remove(entered)
            raise
