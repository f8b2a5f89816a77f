"""The layout of mxfp4 expert weights, and their dequantisation in registers."""
