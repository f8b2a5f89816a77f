#!/bin/bash
# About 40 s.
cd "$(dirname "$0")" && PYTHONPATH="$PYTHONPATH:$PWD" python time_all.py
