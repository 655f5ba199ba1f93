"""KV on graphics cards, by CuPy. Optional: nothing outside knows more of it than `make_card_arena` in `factory.py`."""
