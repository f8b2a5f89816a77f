"""quantization"""

__all__: list[str] = []
