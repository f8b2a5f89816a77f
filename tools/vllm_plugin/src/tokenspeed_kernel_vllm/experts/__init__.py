"""The MXFP4 experts of GPT-OSS. `config` selects the quantisation method of a layer; `method` is our method."""
