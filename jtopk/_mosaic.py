"""Placeholder."""
def unsupported(dtype): return "x"
def top_k(*a, **k): raise NotImplementedError
