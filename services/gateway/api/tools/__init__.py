"""Tools: what a request says of them, calls as models of several families write them, and grammars that hold these."""
