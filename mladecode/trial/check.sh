#!/bin/bash
# Compiles 19 programs side by side and checks them; about 60 s.
cd "$TRIAL" && python check.py 2>&1 | tee "$OUT/check.txt"
