"""Machines that join a mesh in one line: what the head answers at its join port, and what a machine asks there.

A machine shows a token once. It makes its keys itself and sends the public halves; the head signs them. Later it is
known by a key of its own: with it it has its members' keys signed again, and learns of new secrets.
"""
