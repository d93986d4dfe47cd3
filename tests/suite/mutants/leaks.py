"""Mutants that follow what their framework makes, and miss the leaks of a library."""

from __future__ import annotations

import sys
from contextlib import contextmanager

import array_api_strict as xp
from reference_backend import ReferenceStrict

from d2ldev import DeviceMismatchError
from d2ldev.framework import CPU, replace
from mutants import Mutant

MAKERS = ("ones", "asarray")


class Following(Mutant):
    """The sound base of those that follow what functions of array-api-strict make."""

    class Strict(ReferenceStrict):
        @contextmanager
        def follow(self, watch):
            native = self.framework.devices.native(watch.device)
            makers = [(xp, name, self.show(watch, name, native)) for name in MAKERS]
            with watch.be_strict():
                array = type(xp.zeros(0))
                add = self.go_on(watch, vars(array)["__add__"], native)
                restore = self.replace([*makers, (array, "__add__", add)])
                try:
                    yield lambda values: None
                finally:
                    restore()

        def replace(self, replacements):
            return replace(replacements)

        def show(self, watch, name, native):
            """Return what shows an array to the watch after a function has made it."""
            function = vars(xp)[name]

            def make(*args, **kwargs):
                frame = watch.frames.nearest(sys._getframe(1))
                is_test = watch.frames.is_test(frame)
                if is_test and name == "ones":
                    kwargs["device"] = native
                made = function(*args, **kwargs)
                if made.device == native:
                    watch.has_inputs = True
                elif not is_test:
                    self.note(watch, made, frame)
                return made

            return make

        def note(self, watch, made, frame):
            watch.note_stray(made, frame, "moves")

        def go_on(self, watch, add, native):
            """Return what adds two arrays after it has reported the one that is elsewhere."""

            def run(x, y):
                try:
                    return add(x, y)
                except DeviceMismatchError as error:
                    self.report(watch, y, error)
                    return add(x, self.move(y, native))

            return run

        def report(self, watch, y, error):
            watch.report("mix", watch.find_stray(y), CPU, error.attempted, None)

        def move(self, y, native):
            (moved,) = self.framework.tensors.transfer([y], native, copy=True)
            return moved


class FollowsNothing(Following, caught_by="leaks.a-line-that-leaves-the-device-is-named"):
    class Strict(Following.Strict):
        def note(self, watch, made, frame):
            watch.strays.clear()

        def report(self, watch, y, error):
            pass


class LeavesInputsWhereTheyAre(Following, caught_by="leaks.inputs-are-on-the-device"):
    class Strict(Following.Strict):
        @contextmanager
        def follow(self, watch):
            yield lambda values: None


class TakesEveryTensorForALeak(Following, caught_by="leaks.staying-on-the-device-is-right"):
    class Strict(Following.Strict):
        @contextmanager
        def follow(self, watch):
            with super().follow(watch) as place:
                yield place
                watch.report("mix", None, CPU, "add", None)


class StopsAtTheFirstLeak(Following, caught_by="leaks.one-run-finds-all"):
    class Strict(Following.Strict):
        def move(self, y, native):
            return y


class TakesEveryMoveForALeak(Following, caught_by="leaks.a-hand-over-to-numpy-fails-no-test"):
    class Strict(Following.Strict):
        def note(self, watch, made, frame):
            watch.note_stray(made, frame, "moves")
            watch.report("move", watch.find_stray(made), CPU, "asarray", frame)


class FollowsForEver(Following, caught_by="leaks.end-with-the-block"):
    class Strict(Following.Strict):
        def replace(self, replacements):
            replace(replacements)
            return lambda: None
