"""A file gets its new text when all of it is written: on a full disk the old text stays."""

import os


def write(option, path, text, fail):
    """Puts `text` in the place of what `path` holds when all of it is written: on a full disk the old text stays."""
    is_file = path.is_file() or not path.exists()  # or else /dev/stdout
    path = path.resolve() if is_file else path  # a link stays one
    is_aside = is_file and os.access(path.parent, os.W_OK)
    beside = path.with_name(f"{path.name}.partial") if is_aside else path
    try:
        beside.write_text(text, encoding="utf-8")
        if is_aside:
            beside.replace(path)
    except OSError as error:
        if is_aside:
            beside.unlink(missing_ok=True)
        fail(f"{option} {path}: not written: {error.strerror}")
