"""What the emulator raises."""


class EmulationError(RuntimeError):
    """A kernel cannot be emulated, or did what hardware would not allow.

    Attributes:
        kind: ``"out-of-bounds"``, ``"uninitialised"``, ``"misaligned"``, ``"overlap"``, ``"deadlock"``, or ``"error"``.
        kernel: the kernel's name.
        instruction: the PTX instruction, if one is to blame.
    """

    def __init__(self, message: str, kind: str = "error", kernel: str = "", instruction: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.kernel = kernel
        self.instruction = instruction


class UnknownInstruction(EmulationError):
    """PTX that the emulator does not know. Raised when the kernel is first launched, not when the instruction is reached."""
