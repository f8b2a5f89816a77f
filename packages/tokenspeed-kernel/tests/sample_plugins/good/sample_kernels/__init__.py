"""A plugin package for the tests."""
