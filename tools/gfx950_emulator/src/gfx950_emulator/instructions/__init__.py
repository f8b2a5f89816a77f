"""The instruction set, one module per family. Importing this package registers every binder."""

from gfx950_emulator.instructions import (  # noqa: F401
    compare,
    control,
    convert,
    division,
    dma,
    flat,
    float_alu,
    format_memory,
    integer_alu,
    lane,
    lds,
    matrix,
    packed,
    scalar_alu,
    scalar_alu64,
    scalar_memory,
    scalar_stores,
    scratch,
    transcendental,
    vector_memory,
)
