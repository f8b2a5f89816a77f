"""Tuning: finds the fastest kernel and configuration for a kind of call. `workbench.tuned` stores the results."""

from tokenspeed_kernel.workbench.tuning.autotune import autotune
from tokenspeed_kernel.workbench.tuning.pick import Outcome
from tokenspeed_kernel.workbench.tuning.search import Candidate, Trial, TrialStatus, search
from tokenspeed_kernel.workbench.tuning.tune import tune_case

__all__ = ["Candidate", "Outcome", "Trial", "TrialStatus", "autotune", "search", "tune_case"]
