#!/usr/bin/env bash
# Needs about 40 s, stops by itself at 50.
timeout -k 2 53 python3 "$TRIAL/trial.py" 2>"$OUT/time.err" | tee "$OUT/time.log" | sed -n '/^-- us/,$p'
tail -n 2 "$OUT/time.err"
