#!/bin/bash
# Needs about 35 s.
LIMIT=46 timeout 54 python $TRIAL/time_all.py 2>&1 | tail -40
