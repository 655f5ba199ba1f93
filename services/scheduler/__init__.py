"""Owns the view of the fleet: which worker computes a prompt, which one decodes it."""
