#!/bin/bash
# About 60 s.
cd "$(dirname "$0")" && PYTHONPATH="$PYTHONPATH:$PWD" python check.py
