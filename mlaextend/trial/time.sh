#!/bin/bash
# needs about 30 s
timeout 53 python $TRIAL/measure.py 2>&1 | grep -v Warning | tee $OUT/time.txt | tail -22
