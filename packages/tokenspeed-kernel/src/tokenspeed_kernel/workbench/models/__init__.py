"""Lists the operator calls of a model's decode steps and prefills from the model's configuration, without weights or a device."""

from tokenspeed_kernel.workbench.models.calls import DECODE_SIZES, PREFILL_SIZES, Call, Step, calls_of, steps_of, whole_layers_of
from tokenspeed_kernel.workbench.models.config import Experts, Latent, Model, ModelError, model_of
from tokenspeed_kernel.workbench.models.presets import PRESETS

__all__ = [
    "DECODE_SIZES",
    "PREFILL_SIZES",
    "PRESETS",
    "Call",
    "Experts",
    "Latent",
    "Model",
    "ModelError",
    "Step",
    "calls_of",
    "model_of",
    "steps_of",
    "whole_layers_of",
]
