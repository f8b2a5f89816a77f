"""Device code in Gluon that the gfx950 kernels share: layouts, softmax, masks, paged caches, tiles of query rows."""
