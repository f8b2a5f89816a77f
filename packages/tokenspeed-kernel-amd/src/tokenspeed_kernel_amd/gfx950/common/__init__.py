"""What kernels for gfx950 share: layouts, softmax, masks, paged caches, tiles of query rows. All of it is device code, in Gluon."""
