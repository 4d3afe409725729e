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
    for line, its_line in zip(before, after, strict=True):
        name, step, loss, *_ = line.split()
        its_name, its_step, its_loss, *_ = its_line.split()
        assert (name, step) == (its_name, its_step) and float(its_loss) == pytest.approx(float(loss), rel=0.01)


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
UNSCALED = "    scaler.unscale_(optimizer)\n    norm = optimizer.clip_grad_norm_(MAX_NORM)\n"
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


def assert_all_end_and_show(ranks, pattern):
    """All ranks end with code 1 before they print a loss, and the first of them that ends shows the error.

    Each rank meets the mistake by itself. One that is still in its backward pass when the first one ends may lose the
    connection to it before it gets there.
    """
    assert [ended.code for ended in ranks] == [1] * len(ranks), ranks
    assert any(re.search(pattern, ended.stderr) for ended in ranks), ranks
    for ended in ranks:
        assert re.search(f"{pattern}|onnection", ended.stderr), ended.stderr
        assert "loss" not in ended.stdout


@pytest.mark.parametrize("number", ERRORS)
def test_a_mistake_ends_the_first_step_with_the_error_of_the_page(folder, number):
    assert_all_end_and_show(run_in(folder, edited(AFTER, *ERRORS[number])), error_below(number))


def test_unscale_is_refused_and_a_clip_that_forgets_the_scale_is_not(folder):
    refusal = re.escape("GradScaler.unscale_() looks into param.grad")
    assert_all_end_and_show(run_in(folder, edited(AFTER, (CLIP, UNSCALED))), refusal)
    forgotten = edited(AFTER, (CLIP, "    norm = optimizer.clip_grad_norm_(MAX_NORM)\n"))
    norms = [float(printed(folder, up_to(1, code))[0].split()[-1]) for code in (AFTER, forgotten)]
    assert norms[1] == pytest.approx(1024 * norms[0], rel=1e-3)


def test_zero_grad_of_the_whole_model_changes_nothing(folder, straight):
    whole = edited(FREE_AFTER, ("    optimizer.zero_grad()\n", "    model.zero_grad()\n"))
    assert printed(folder, whole) == straight


SAVE = '        save(f"runs/stage4/step-{step + 1:08}", model, optimizer, extra)\n'


def test_a_save_on_rank_0_alone_ends_at_the_time_out(folder):
    alone = edited(AFTER, (SAVE, f"        if dist.get_rank() == 0:\n    {SAVE}"), ("= connect()", "= connect(20)"))
    ranks = run_in(folder, alone)
    assert [ended.code for ended in ranks] == [1, 1], ranks
    # Who waits longest may see the connection of the other one end first.
    assert any("Timed out waiting 20000ms" in ended.stderr for ended in ranks), ranks


def test_the_state_of_rank_0_alone_is_refused_when_it_is_loaded(folder):
    saves = '        if dist.get_rank() == 0:\n            torch.save(optimizer.state_dict(), "runs/rank0.pt")\n'
    printed(folder, edited(up_to(50, AFTER), (SAVE, saves)))
    loads = 'optimizer.load_state_dict(torch.load("runs/rank0.pt", weights_only=False))\n'
    for ended in run_in(folder, edited(AFTER, ("data = list", f"{loads}data = list"))):
        assert ended.code == 1 and re.search(error_below("4."), ended.stderr), ended.stderr


# A network so slow that a message arrives only when somebody waits for it.
LATE = """
from stage4_overlap.transport import GlooTransport
sent_at_once = GlooTransport.all_gather


class Late:
    def __init__(self, *message):
        self.message = message

    def wait(self):
        for work in sent_at_once(*self.message):
            work.wait()


GlooTransport.all_gather = lambda transport, shards: [Late(transport, shards)]
"""


LOOK = """    early = [view.clone() for view in kept]
    finished = [param.detach().clone() for param in model.parameters()]
    show("old", step, torch.tensor(float(not all(map(torch.equal, early, finished)))))
"""


@pytest.mark.parametrize("waits", [False, True])
def test_what_was_taken_out_of_a_parameter_before_is_old_until_somebody_waits(folder, waits):
    look = f"    optimizer.finish_param_sync()\n{LOOK}" if waits else LOOK
    average = "    ema.update_parameters(model)\n"
    code = edited(up_to(50, AFTER), ("ACCUMULATE, MAX_NORM", f"{LATE}\nACCUMULATE, MAX_NORM"),
                  ("data = list", "kept = [param.data for param in model.parameters()]\ndata = list"),
                  (average, look + average))
    is_old = {line.split()[2] for line in printed(folder, code) if line.startswith("old")}
    assert is_old == {"0.000000" if waits else "1.000000"}
