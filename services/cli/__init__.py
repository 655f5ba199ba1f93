"""The `kvmesh` command: arguments, and output on a terminal.

Modules that are slow to import (torch, Litestar, matplotlib) are imported by the functions that need them.
"""
