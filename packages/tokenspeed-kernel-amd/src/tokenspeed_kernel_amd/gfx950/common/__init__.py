"""Code that the attention kernels for gfx950 share beyond `gluon`: MFMA and LDS layouts, MFMAs, and paged caches copied to LDS."""
