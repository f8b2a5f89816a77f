"""The workbench: verifying, measuring, tuning, recording and explaining kernels; nothing that a call needs."""
