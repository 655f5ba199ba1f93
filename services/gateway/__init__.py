"""Owns a request from its HTTP body to its last token: places it, retries it, merges its tokens, answers the client."""
