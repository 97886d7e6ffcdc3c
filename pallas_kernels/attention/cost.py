def online_seconds(*a):
    return 1.0


def naive_seconds(*a):
    return 1.0


def cudnn_seconds(*a):
    return 1.0


def naive_temp_bytes(*a):
    return 0


def rows_seconds(*a):
    return 1.0


def tpu_flash_seconds(*a):
    return 0.5
