#!/bin/bash
# Compiles what time.sh measures; checks rows of all kinds against the reference; runs the operator's cases as far as time allows.
cd "$(pwd)"
timeout 105 python $TRIAL/time_all.py --compile > $OUT/compile.txt 2>&1 &
timeout 105 python $TRIAL/check.py > $OUT/check_all.txt 2>&1 &
timeout 105 python -m pytest -q -p no:cacheprovider packages/tokenspeed-kernel/tests/test_kernels.py -k "triton_sample_top_k_top_p" -m nvidia > $OUT/cases.txt 2>&1 &
timeout 105 python -m pytest -q -p no:cacheprovider packages/tokenspeed-kernel/tests/triton/test_sampling.py > $OUT/tests.txt 2>&1 &
wait
tail -3 $OUT/compile.txt $OUT/cases.txt $OUT/tests.txt
grep -v "^ok" $OUT/check_all.txt | tail -20; grep -c "^ok" $OUT/check_all.txt
