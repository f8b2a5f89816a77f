"""The MXFP4 experts of GPT-OSS: `config` decides who serves a layer, `method` serves it."""
