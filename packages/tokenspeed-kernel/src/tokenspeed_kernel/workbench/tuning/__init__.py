"""Measuring which kernel, with which configuration, serves a kind of call best. What is found goes to `workbench.tuned`."""

from tokenspeed_kernel.workbench.tuning.autotune import autotune
from tokenspeed_kernel.workbench.tuning.pick import Outcome
from tokenspeed_kernel.workbench.tuning.search import Candidate, Trial, TrialStatus, search
from tokenspeed_kernel.workbench.tuning.tune import tune_case

__all__ = ["Candidate", "Outcome", "Trial", "TrialStatus", "autotune", "search", "tune_case"]
