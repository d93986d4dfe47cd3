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
            for shard in x.addressable_shards:
                if shard.device == native and shard.data.size:
                    address = shard.data.unsafe_buffer_pointer()
                    held[address] = max(held.get(address, 0), shard.data.nbytes)
    return sum(held.values())
