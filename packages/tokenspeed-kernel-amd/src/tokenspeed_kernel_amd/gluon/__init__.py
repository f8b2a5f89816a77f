"""Building blocks of Gluon kernels for any CDNA architecture: arguments of paged attention, tiles of query rows, masks, softmax,
and MoE routing. These modules use buffer loads and stores, which every CDNA architecture has. They use neither MFMAs nor copies to
LDS.
"""
