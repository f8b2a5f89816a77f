"""Splits of a tile that several workgroups compute: the last workgroup to arrive merges the partial results."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx950 import instructions_device as isa


@gluon.jit
def last_to_arrive(counter, count):
    """Arrives at ``counter``, and returns whether this workgroup is the last of ``count`` to arrive. The last workgroup sees
    everything that the others stored before they arrived. It must reset the counter to 0."""
    isa.wait_for_stores()
    gl.barrier()
    return gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1
