"""Sentences as lines of a page."""

import textwrap


def fill(text):
    return textwrap.fill(text, 100)


def bullets(sentences):
    return "\n".join(textwrap.fill(text, 118, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
                     for text in sentences)
