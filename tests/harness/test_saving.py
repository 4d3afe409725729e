"""make bench WHAT=saving: what it measures is there, and can be shown."""

import pytest

from harness import results
from harness.results import SavingResult
from tests.ranks import run_module


@pytest.mark.waits
def test_saving_is_measured_beside_the_disk(tmp_path):
    """The bytes are those that the checkpoint has, and every row has its rate; how large it is says nothing here."""
    run = run_module("harness.saving", "--gigabytes", "0.01", "--rounds", "1", "--folder", tmp_path,
                     "--json", tmp_path / "saving.json")
    assert run.code == 0, run.stderr
    result = results.from_json(SavingResult, (tmp_path / "saving.json").read_text())
    assert "Saving and loading 0.0 GB on 2 ranks" in run.stdout
    assert result.conditions.bytes == 2 * 12 * 1024**2  # two layers: a parameter and two moments each
    assert {row.name for row in result.rows if row.median_s > 0} == {
        "disk, write", "torch.save", "checkpoint.save", "checkpoint.save, asynchronous", "disk, read", "torch.load",
        "checkpoint.load"}
    assert [path.name for path in tmp_path.iterdir()] == ["saving.json"]  # nothing is left on the disk
