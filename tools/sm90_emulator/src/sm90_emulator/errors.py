"""The emulator's errors."""


class EmulationError(RuntimeError):
    """A kernel cannot be emulated, or violated a rule of the hardware.

    Attributes:
        kind: ``"out-of-bounds"``, ``"uninitialised"``, ``"misaligned"``, ``"overlap"``, ``"deadlock"``, or ``"error"``.
        kernel: the kernel's name.
        instruction: the faulty PTX instruction, or None.
    """

    def __init__(self, message: str, kind: str = "error", kernel: str = "", instruction: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.kernel = kernel
        self.instruction = instruction


class UnknownInstruction(EmulationError):
    """PTX that the emulator does not implement. Raised at the kernel's first launch, not when the instruction is reached."""
