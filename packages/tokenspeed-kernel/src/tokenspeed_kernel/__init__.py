"""tokenspeed-kernel: operators for LLM inference, and the kernel that serves each best on the machine at hand."""

from tokenspeed_kernel.ops.activation import *
from tokenspeed_kernel.ops.attention import *
from tokenspeed_kernel.ops.embedding import *
from tokenspeed_kernel.ops.gemm import *
from tokenspeed_kernel.ops.kvcache import *
from tokenspeed_kernel.ops.moe import *
from tokenspeed_kernel.ops.norm import *
from tokenspeed_kernel.ops.quantization import *
from tokenspeed_kernel.ops.sampling import *
from tokenspeed_kernel.version import __version__
