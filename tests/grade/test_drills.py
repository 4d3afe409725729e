"""Drills: eight faults that are told by hints, until they are mended. Exercise 0: a ring."""

import re

import pytest

from grade import exercises
from grade.collective import HINT
from grade.grader import Grader
from grade.report import grade_drill, passes, what_next
from harness.publishing.stages import write_package
from tests.grade.graded import changed
from tests.ranks import ROOT

DRILLS = exercises.drills()


@pytest.mark.parametrize("number", DRILLS)
def test_a_drill_is_a_small_edit_of_the_stages_own_text(number):
    drill, files = DRILLS[number], exercises.files_of_drill(number)
    before, after = drill.before.splitlines(), drill.after.splitlines()
    assert len([line for line in before + after if not (line in before and line in after)]) <= 15
    for name, text in files.items():
        if name.endswith(".py"):
            compile(text, name, "exec")
    assert files["REPORT.md"] == f"# Drill {number}: {drill.title}\n\n{drill.report}\n"
    assert not any(drill.answer in text or drill.state in text for text in files.values())


def test_there_are_eight_drills_and_the_pages_list_them():
    incidents, exercise = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("incidents", "exercise"))
    assert list(DRILLS) == list(range(1, 9))
    for number, drill in DRILLS.items():
        assert f"{number}. {drill.title} (stage {drill.stage[5]}" in exercise
        row = next(row for row in incidents.splitlines() if f"| drill {number}" in row)
        assert all(report in row for report in re.findall(r"#\d+", drill.answer)[:1])


def test_a_drill_whose_stage_has_changed_and_one_that_is_not_there_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="STAGE=drill9: there are drills 1 to 8"):
        exercises.files_of_drill(9)
    monkeypatch.setattr(exercises, "drills", lambda: {1: DRILLS[1]._replace(before="another line\n")})
    with pytest.raises(ValueError, match="drill 1: optimizer.py of stage1_naive_broadcast has changed"):
        exercises.files_of_drill(1)


@pytest.mark.waits
@pytest.mark.parametrize("number", DRILLS)
def test_a_drill_is_hinted_at_until_it_is_mended(capsys, workers, tmp_path, monkeypatch, number):
    """The check that fails is the one that drills.md names; no hint has a line. Mended, it passes every level."""
    monkeypatch.syspath_prepend(str(tmp_path))
    drill, broken, right = DRILLS[number], f"broken_{number}", f"mended_{number}"
    exercises.write(f"drill{number}", tmp_path / broken)
    assert exercises.number_of_drill(broken) == number
    verdicts, printed = zip(*((grade_drill(number, Grader(broken, workers), hint), capsys.readouterr().out)
                              for hint in (1, 2, 3)))
    assert not any(verdicts)
    assert all(f"  report    {drill.report}\n" in text for text in printed)
    assert [f"  check     {drill.check}\n" in text for text in printed] == [False, True, True]
    assert [f"  state     {drill.state}\n" in text for text in printed] == [False, False, True]
    assert not any("cause" in text or ".py:" in text for text in printed)
    assert drill.answer in exercises.answer(number) and drill.before in exercises.answer(number)

    files = exercises.files_of_drill(number)
    files[drill.file] = changed(files[drill.file], {drill.after: drill.before})
    write_package(tmp_path / right, files)
    assert grade_drill(number, grader := Grader(right, workers), 1)
    assert capsys.readouterr().out.endswith("  The report …\n  Level 1: It trains …\n  Level 2: It is an optimizer …\n"
                                            f"ok drill {number}: mended\n\n{drill.answer}\n")
    assert what_next(grader).endswith(f"drill{number + 1} TO={right}" if number < 8 else "and further ones")


@pytest.mark.waits
def test_another_fault_in_a_drill_is_told_as_in_a_package(capsys, workers, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    text = exercises.files_of_drill(1)["optimizer.py"]
    other = changed(text, {"        copy_all(tensors, cut_like(flat, tensors))\n": "        pass\n",
                           DRILLS[1].after: DRILLS[1].before})
    write_package(tmp_path / "other", {**exercises.files_of_drill(1), "optimizer.py": other})
    assert not grade_drill(1, Grader("other", workers), 1)
    printed = capsys.readouterr().out
    assert "cause     each rank steps with its own gradients" in printed, printed


RINGS = {"right": ({}, "what a rank sends", "96 of 128 bytes: (d-1)/d, d = 4"),
         "another part": ({"parts[(rank - 1 - turn) % d]": "parts[rank]"}, "both by hand, 3 ranks", HINT),
         "all at once": ({"    return gathered\n": "    dist.all_reduce(gathered.clone())\n    return gathered\n"},
                         "what a rank sends", "224 of 128, in 4 messages of all_reduce, send"),
         "not written": (None, "both by hand", "fill in reduce_scatter")}


@pytest.mark.waits
@pytest.mark.parametrize("what", RINGS)
def test_a_ring_is_graded_by_hand_values_and_by_its_bytes(capsys, workers, tmp_path, monkeypatch, what):
    monkeypatch.syspath_prepend(str(tmp_path))
    lines, check, printed = RINGS[what]
    folder = f"ring_{what.replace(' ', '_')}"
    exercises.write("0", tmp_path / folder)
    if lines is not None:
        (tmp_path / folder / "ring.py").write_text(changed((ROOT / "grade" / "ring.py").read_text(), lines))
    is_right = passes("ring", Grader(f"{folder}.ring", workers))
    out = capsys.readouterr().out
    assert is_right == (what == "right") and f"{'ok    ' if is_right else 'FAILED'}    {check}" in out, out
    assert printed in out, out
