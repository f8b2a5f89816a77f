"""A package for tests. Each of its plugins has one mistake."""
