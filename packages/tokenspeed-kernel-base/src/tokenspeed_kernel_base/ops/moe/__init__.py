"""Mixture of experts."""

from tokenspeed_kernel_base.ops.moe.moe_apply import moe_apply
from tokenspeed_kernel_base.ops.moe.moe_topk import moe_topk
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan, moe_plan
from tokenspeed_kernel_base.ops.moe.process import moe_process_weights
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights

__all__ = ["MoEPlan", "MoEWeights", "moe_apply", "moe_plan", "moe_process_weights", "moe_topk"]
