"""sampling"""

__all__: list[str] = []
