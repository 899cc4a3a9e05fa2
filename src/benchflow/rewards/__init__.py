"""Scoring a state: the script verifier, its reward files, and the hardening before it."""
