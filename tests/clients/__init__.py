"""Clients as people use them, unmodified, on a real mesh: `make clients` runs all, `make test` two of them."""
