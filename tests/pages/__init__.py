"""Makes the generated parts of the pages, and the pictures of the README.

`tables` works from the code, `listening` and `shots` from a real mesh (`scene`).
"""
