"""Protocols and frozen data types that the planes and the kernel share.

This package imports nothing else from ``benchflow``. Import the module that
holds what you need; the package itself is empty so that importing it is free.
"""
