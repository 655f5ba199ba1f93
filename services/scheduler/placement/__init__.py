"""Where a request goes, and what that costs. Pure."""
