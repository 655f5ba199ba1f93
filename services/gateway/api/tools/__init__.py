"""Tools: what a request asks of them, calls as models of several families write them, and grammars that hold these."""
