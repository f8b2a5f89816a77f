#!/bin/bash
# Every program that time.sh uses is compiled, and its results compared with the portable kernel's. About 80 s on eight cores.
cd "$TRIAL"
one() { timeout 106 python one.py "$2" "$3" > "$OUT/check_$1.txt" 2>&1; }
export -f one
# Extends first, whose programs take longest, then what is served, then variants.
python -c '
from shapes import ALL, EXTEND, VARIANTS
jobs = [(list(ALL).index(n), "") for n in [*EXTEND, *(n for n in ALL if n not in EXTEND)] if "gemma3-12b" not in n and "16x8192" not in n]
jobs += [(list(ALL).index(n), v) for n, vs in VARIANTS.items() if "gemma3-12b" not in n for v in vs]
for i, (n, v) in enumerate(jobs): print(i, n, v.replace(" ", "_") or "-", sep=chr(10))
' | tr '_' ' ' | xargs -d '\n' -n 3 -P 8 bash -c 'one "$0" "$1" "$2"'
grep -h "WRONG\|ok\|Error" "$OUT"/check_*.txt | tail -80
