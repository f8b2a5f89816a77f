"""The MXFP4 experts of GPT-OSS: `config` selects a layer's method, `method` is ours."""
