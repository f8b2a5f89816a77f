"""A package for the tests whose plugins do all that a plugin can do wrong."""
