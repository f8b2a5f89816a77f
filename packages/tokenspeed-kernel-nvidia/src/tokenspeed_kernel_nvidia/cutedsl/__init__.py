"""Building blocks of CuteDSL kernels of any architecture: helpers of launchers, mbarrier pipelines, schedulers, softmax, masks,
registers, and the layout of mxfp4 weights. An architecture's folder has what only its instructions can do.
"""
