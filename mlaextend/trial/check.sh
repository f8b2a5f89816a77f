#!/bin/bash
# compiles 16 programs in 8 processes, and the Triton kernels meanwhile
timeout 105 python $TRIAL/check.py 2>&1 | grep -v Warning | tee $OUT/check.txt | tail -60
