"""Code for Hopper that kernels share, in addition to `cutedsl`: wgmma, TMA tiles, bulk copies, clusters, and register budgets of
warpgroups.
"""
