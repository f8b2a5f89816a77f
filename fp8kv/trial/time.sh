#!/bin/bash
# About 40 s.
cd "$TRIAL"
timeout 54 python time_all.py > "$OUT/time.txt" 2>&1
grep -v "^ \|Traceback" "$OUT/time.txt" | tail -25
