"""Communication between the processes of a group."""
