"""The workbench: tools that verify, time, tune, record and explain kernels. No call of an operator needs it."""
