def measure(mib, num_rounds):
    return None
