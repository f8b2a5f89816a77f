"""Collective communication between the processes of a group."""
