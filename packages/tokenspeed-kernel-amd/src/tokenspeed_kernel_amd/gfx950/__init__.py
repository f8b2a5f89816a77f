"""Kernels for gfx950 (CDNA4: AMD Instinct MI350X, MI355X), in Gluon."""
