#!/bin/bash
# Needs about 40 s; ends itself after 50.
cd "$TRIAL"
export OMP_NUM_THREADS=2
timeout 53 python trial.py time 2>&1 | tee "$OUT/time.txt"
exit 0
