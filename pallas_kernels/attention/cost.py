def online_seconds(*a): return 1.0
