"""The workbench: tools that verify, time, tune, record and explain kernels. Calls of operators do not need it."""
