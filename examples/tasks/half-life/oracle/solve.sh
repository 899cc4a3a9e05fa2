#!/bin/sh
exec python3 /oracle/fit.py
