#!/bin/sh
exec python3 -I /verifier/check.py
