"""Building blocks of CuteDSL kernels of any architecture: helpers of launchers, mbarrier pipelines, schedulers, softmax, masks,
registers, and the layout of mxfp4 weights. An architecture's own folder has only the code that depends on its instructions.
"""
