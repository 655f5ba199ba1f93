"""Cards that are not there, for tests and for machines without one."""
