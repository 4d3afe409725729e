"""Both loops of docs/migrate.md print the same, a run goes over and back, and each mistake shows what the page says."""

import re

import pytest

from tests.common import STAGES
from tests.pages import Page
from tests.pages.test_samples import fill, run_in

pytestmark = pytest.mark.waits

PAGE = Page("docs/migrate.md")
(DIFF,) = PAGE.code("diff")
OVER, BACK = PAGE.code()


def program(kind):
    """Return one side of the page's diff: "-" for DDP, "+" for stage 4."""
    lines = [line for line in DIFF.splitlines() if line[:1] in ("", " ", kind)]
    return "".join(line[1:] + "\n" for line in lines)


def edited(code, *edits):
    for old, new in edits:
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    return code


def without_clip(code):
    return edited(code, ("MAX_NORM = 4, 0.5", "MAX_NORM = 4, 1e9"))


def up_to(n_steps, code):
    return edited(code, ("range(first, 100)", f"range(first, {n_steps})"))


BEFORE, AFTER = program("-"), program("+")
FREE_BEFORE, FREE_AFTER = without_clip(BEFORE), without_clip(AFTER)


@pytest.fixture
def folder(tmp_path):
    fill(tmp_path)
    (tmp_path / "runs").mkdir()
    return tmp_path


def printed(folder, code):
    """Run `code` on two ranks, and return the lines that rank 0 prints."""
    ranks = run_in(folder, code)
    assert all(ended.code == 0 for ended in ranks), [ended.stderr[-3000:] for ended in ranks]
    return ranks[0].stdout.splitlines()


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Give what DDP prints in 100 steps of which none is clipped."""
    home = tmp_path_factory.mktemp("straight")
    fill(home)
    (home / "runs").mkdir()
    lines = printed(home, FREE_BEFORE)
    assert len(lines) == 104
    return lines


def test_without_a_clip_both_loops_print_the_same_to_the_last_digit(folder, straight):
    assert printed(folder, FREE_AFTER) == straight


@pytest.mark.parametrize("stage", STAGES[:3])
def test_another_stage_needs_another_import_and_no_prefetch(folder, straight, stage):
    code = edited(FREE_AFTER, ("stage4_overlap import", f"{stage} import"), ("optimizer.prefetch_params(model)\n", ""))
    assert printed(folder, code) == straight


def test_with_a_clip_the_losses_part_in_the_last_digits_only(folder, straight):
    before = printed(folder, BEFORE)
    after = printed(folder, AFTER)
    assert before[:10] == after[:10] and before != straight  # a clip that changed nothing would show nothing
    for ddp_line, line in zip(before, after, strict=True):
        *ddp_step, ddp_loss = ddp_line.split()[:3]
        *step, loss = line.split()[:3]
        assert step == ddp_step
        assert float(loss) == pytest.approx(float(ddp_loss), rel=0.01)


def test_a_run_of_ddp_goes_on_in_stage_4(folder, straight):
    begun = printed(folder, up_to(50, FREE_BEFORE))
    printed(folder, OVER)
    assert begun + printed(folder, FREE_AFTER) == straight


def test_a_run_of_stage_4_goes_on_in_ddp(folder, straight):
    begun = printed(folder, up_to(50, FREE_AFTER))
    printed(folder, BACK)
    assert begun + printed(folder, FREE_BEFORE) == straight


# Edits of the loop, by the heading of the mistake.
CLIP = """    scale = scaler.get_scale()
    norm = optimizer.clip_grad_norm_(MAX_NORM * scale) / scale
"""
WITH_DDP = [("optimizer.prefetch_params(model)\n",
             "optimizer.prefetch_params(model)\nddp = nn.parallel.DistributedDataParallel(model)\n"),
            ("mean_square(model, x, y) / ACC", "mean_square(ddp, x, y) / ACC")]
ERRORS = {
    "1.": [(CLIP, f"    model[0].zero_grad()\n{CLIP}")],
    "2.": WITH_DDP,
    "3.": [(CLIP, "    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)\n")],
}


def error_below(number):
    """Return a pattern of the error that the page shows below the heading of this number."""
    (section,) = re.findall(rf"^### {re.escape(number)} .*?(?=^##)", PAGE.text, re.MULTILINE | re.DOTALL)
    (error,) = re.findall(r"^    (.+)$", section, re.MULTILINE)
    return ".+".join(map(re.escape, error.split("…")))


@pytest.mark.parametrize("number", ERRORS)
def test_a_mistake_ends_the_first_step_with_the_error_of_the_page(folder, number):
    """Train with the mistake: every rank ends before it prints a loss, and one at least shows the error of the page.

    Each rank meets the mistake by itself. A rank that is still in its backward pass when the first rank ends may lose
    the connection before.
    """
    pattern = error_below(number)
    ranks = run_in(folder, edited(AFTER, *ERRORS[number]))
    assert any(re.search(pattern, ended.stderr) for ended in ranks), ranks
    for ended in ranks:
        assert ended.code == 1 and "loss" not in ended.stdout
        assert re.search(f"{pattern}|onnection", ended.stderr), ended.stderr


SAVE = '        save(f"runs/stage4/step-{step + 1:08}", model, optimizer, extra)\n'


def test_the_state_of_rank_0_alone_is_refused_when_it_is_loaded(folder):
    saves = '        if dist.get_rank() == 0:\n            torch.save(optimizer.state_dict(), "runs/rank0.pt")\n'
    printed(folder, edited(up_to(50, AFTER), (SAVE, saves)))
    loads = 'optimizer.load_state_dict(torch.load("runs/rank0.pt", weights_only=False))\n'
    for ended in run_in(folder, edited(AFTER, ("data = list", f"{loads}data = list"))):
        assert ended.code == 1 and re.search(error_below("4."), ended.stderr), ended.stderr
