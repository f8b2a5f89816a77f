"""activation"""

__all__: list[str] = []
