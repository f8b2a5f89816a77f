"""Building blocks of Gluon kernels for any CDNA architecture: arguments of paged attention, tiles of query rows, masks, softmax,
and the choice of experts. They use buffer loads and stores, which every CDNA architecture has. They use neither MFMA nor copies to
LDS.
"""
