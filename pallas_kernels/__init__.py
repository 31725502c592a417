"""Device code."""
def unavailable(): return "not yet"
