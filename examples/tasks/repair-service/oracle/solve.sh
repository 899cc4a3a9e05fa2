#!/bin/sh
cp /oracle/pantry.py /app/pantry.py
