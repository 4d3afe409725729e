"""Which row: its name in the catalogue, and the size of its buckets. What is shown of both is never read again."""

from typing import NamedTuple

# What the variants are compared with: --rows variants measures these, too.
BESIDE_VARIANTS = "stage 3 grad buffer", "stage 4 overlap", "stage 4 overlap bf16", "ddp summed in bf16"
ONE_PARAMETER = 1e-6  # MiB: a bucket is closed by the first parameter in it


def is_asked(text, name):
    """Whether --rows `text` means the row of that name."""
    return text in name or text == "variants" and name in BESIDE_VARIANTS


class Choice(NamedTuple):
    """A row of the catalogue, with buckets of `bucket_mb` MiB; None: of its default size."""
    base: str
    bucket_mb: float | None = None

    @property
    def name(self):
        """To be shown, and never read: "ddp, 2 MB buckets"."""
        return self.base if self.bucket_mb is None else f"{self.base}, {self.size} buckets"

    @property
    def size(self):
        """To be shown: "2 MB"."""
        if self.bucket_mb is None:
            return "default"
        return "one-parameter" if self.bucket_mb == ONE_PARAMETER else f"{self.bucket_mb:g} MB"


class OfChoice:
    """For what has the two fields of a Choice, and its names."""

    @property
    def choice(self):
        return Choice(self.base, self.bucket_mb)

    @property
    def name(self):
        return self.choice.name

    @property
    def size(self):
        return self.choice.size
