#!/bin/bash
# Compiles every program that time.sh uses, six at a time, and holds results against float32. Wants about 80 s on six cores.
cd "$TRIAL"
export OMP_NUM_THREADS=2
timeout 105 python trial.py check 2>&1 | tee "$OUT/check.txt"
exit 0
