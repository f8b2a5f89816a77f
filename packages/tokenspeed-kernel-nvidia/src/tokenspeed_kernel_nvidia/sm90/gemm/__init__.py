"""GEMMs on Hopper."""
