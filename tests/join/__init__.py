"""Machines that join a mesh."""
