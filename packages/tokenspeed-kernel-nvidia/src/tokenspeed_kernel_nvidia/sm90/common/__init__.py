"""Code that Hopper's kernels share beyond `cutedsl`: wgmma, TMA tiles, bulk copies, clusters, and register
budgets of warpgroups.
"""
