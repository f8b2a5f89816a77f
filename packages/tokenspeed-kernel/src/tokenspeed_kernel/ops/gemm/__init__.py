"""gemm"""

__all__: list[str] = []
