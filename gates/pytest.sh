#!/usr/bin/env bash
# pytest.sh: the NVIDIA wheel's tests that want a GPU, in 8 processes, in at most 200 s; prints a summary of failures. Start it at the
# root of a checkout or copy, without the emulator of sm_90 on PYTHONPATH (it stands in for CuteDSL's runtime).
out=${OUT:-/tmp/gates_out}
mkdir -p "$out"
PYTHONPATH=$(ls -d "$PWD"/packages/*/src | paste -sd:)
export PYTHONPATH OMP_NUM_THREADS=1
timeout -k 3 -s INT "${LIMIT:-195}" python3 -m pytest packages/tokenspeed-kernel-nvidia/tests -m "nvidia and not slow" -n "${JOBS:-8}" \
  --dist worksteal -q -p no:cacheprovider --tb=short --maxfail=40 --junitxml="$out/pytest.xml" "$@" >"$out/pytest.log" 2>&1
echo "exit status $? (124: no more time)"
grep -aE '^(FAILED|ERROR) ' "$out/pytest.log" | cut -c1-220 | head -30
tail -n 3 "$out/pytest.log"
