"""A package for tests, with one plugin for each mistake that a plugin can make."""
