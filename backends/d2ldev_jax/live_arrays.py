"""How much memory arrays hold, where JAX does not count it: on CPU devices, and so virtual GPUs.

What they hold now can be counted whenever it is asked for. How much it was before cannot.
"""

from __future__ import annotations

from contextlib import suppress

import jax


def bytes_held(native: jax.Device) -> int:
    """The bytes that this process's arrays hold on a device; what they share counts once."""
    held: dict[int, int] = {}
    for x in jax.live_arrays(native.platform):  # type: ignore[no-untyped-call]
        # Deleted, or not computed and in error: it holds nothing.
        with suppress(RuntimeError):
            # Its shards would do; but asked for once, they are kept, in a cycle.
            for part in x._arrays:
                if part.size and native in part.devices():
                    address = part.unsafe_buffer_pointer()
                    held[address] = max(held.get(address, 0), part.nbytes)
    return sum(held.values())
