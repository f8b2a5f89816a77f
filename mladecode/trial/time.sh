#!/bin/bash
# Needs about 35 s.
cd "$TRIAL" && python measure.py 2>&1 | tee "$OUT/time.txt"
