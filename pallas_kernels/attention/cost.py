def online_seconds(*a):
    return 1.0


def naive_seconds(*a):
    return 1.0


def cudnn_seconds(*a):
    return 1.0


def naive_temp_bytes(*a):
    return 0
