"""Position embedding."""
