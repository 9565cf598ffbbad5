"""What follows each end of a child: worked out from the rules, with children that never run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from train_workspace import environment

from stages.core.errors import RunFailed
from stages.core.memory.plan import Plan
from stages.core.memory.recovery import Death, Marker
from stages.train.recovery import ledger as ledgers
from stages.train.recovery import supervisor
from stages.train.recovery.ledger import HandOver, Ledger
from stages.train.recovery.relay import Relay
from stages.train.recovery.restarts import MOST_SAME, Ended, Restarts

PLAN = Plan(4, 256, (64,), loss_chunk=16)
MACHINE = {"threads": 2, "device": "cpu", "memory": {}}
GB = 10**9
METAL = "[METAL] Command buffer execution failed: Insufficient Memory"


def begun(folder, plan=PLAN):
    Ledger(folder).begin(plan, plan, MACHINE)
    return folder


def note(folder, update=3, rows=4, width=64, needed=9 * GB):
    marker = Marker(update, rows, width, needed, 10 * GB)
    (folder / ledgers.STEP).write_text(str(marker.record()).replace("'", '"'))
    return marker


def handed(folder, kind, retry):
    error = HandOver(Death(kind, f"{kind}!", retry), Marker(3, 4, 64, GB, 10 * GB))
    ledgers.hand_over(folder, error)
    return Ended(ledgers.STATUS)


def run(folder, *children):
    """Children by function; each is called with the folder and gives how it ended."""
    left = list(children)
    return Restarts(folder, lambda: left.pop(0)(folder), 5.0).run()


def ends(status, **more):
    return lambda folder: Ended(status, **more)


def dies_in_step(number, **more):
    def child(folder):
        note(folder)
        return Ended(-number, **more)

    return child


@pytest.mark.parametrize(
    ("asked", "status", "expected"),
    [
        (None, 0, 0),
        (None, 2, 2),
        (None, 1, 1),
        (None, 143, 143),
        (signal.SIGINT, 130, 130),
        (signal.SIGINT, 1, 130),
        (signal.SIGTERM, -signal.SIGTERM, 143),
        (signal.SIGTERM, 0, 0),
        (signal.SIGTERM, ledgers.STATUS, 143),
    ],
)
def test_the_childs_status_is_the_stages(tmp_path, asked, status, expected):
    assert run(begun(tmp_path), ends(status, asked=asked)) == expected


@pytest.mark.parametrize(
    ("child", "kind", "rows"),
    [
        (dies_in_step(signal.SIGKILL), "memory", 2),
        (dies_in_step(signal.SIGSEGV), "memory", 2),
        (dies_in_step(signal.SIGABRT, said=METAL), "memory", 2),
        (ends(-signal.SIGABRT, said=METAL), "memory", 2),
        (lambda folder: handed(folder, "memory", "smaller"), "memory", 2),
        (ends(-signal.SIGKILL), "killed", 4),
        (lambda folder: handed(folder, "handles", "same"), "handles", 4),
        (ends(-signal.SIGTERM, hung=True), "hang", 4),
    ],
    ids=["kill", "segv", "abort", "between", "handed", "person", "handles", "hang"],
)
def test_a_death_is_recorded_and_the_next_child_finds_its_plan(tmp_path, child, kind, rows):
    assert run(begun(tmp_path), child, ends(0)) == 0
    found = Ledger(tmp_path)
    assert [event["kind"] for event in found.events] == [kind]
    assert found.plan.batch_size == rows
    assert found.plan_for(MACHINE) == (found.plan if rows < 4 else None)
    assert found.plan_for({**MACHINE, "threads": 1}) == found.plan_for(MACHINE)
    assert found.plan_for({**MACHINE, "memory": {"budget_gb": 3}}) is None
    assert not (tmp_path / ledgers.STEP).exists()
    assert not (tmp_path / ledgers.HANDED_OVER).exists()


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGTERM, signal.SIGILL])
def test_other_deaths_are_reported_as_what_they_are(tmp_path, number):
    with pytest.raises(RunFailed) as caught:
        run(begun(tmp_path), ends(-number))
    assert caught.value.status == 1
    assert signal.Signals(number).name in caught.value.what
    assert "between steps" in caught.value.found
    assert Ledger(tmp_path).events == []


def test_smaller_plans_come_to_an_end_with_numbers(tmp_path):
    kills = [dies_in_step(signal.SIGKILL)] * 30
    with pytest.raises(RunFailed) as caught:
        run(begun(tmp_path), *kills)
    assert caught.value.status == 1
    assert "9.00 GB" in caught.value.found
    assert "10.00 GB" in caught.value.expected
    found = Ledger(tmp_path)
    assert found.plan.recompute == 1
    assert found.plan.batch_size == 2  # of rows as the notes say: never fewer than half of 4
    assert len(found.events) == len({str(plan) for plan in found.failed})


def saves(folder, update):
    (folder / f"{update:08d}").mkdir()


def test_the_smallest_plan_goes_on_while_checkpoints_come(tmp_path):
    smallest = Plan(1, 64, (64,), recompute=1, attention_block=32, loss_chunk=16)

    def child(update):
        def dies(folder):
            saves(folder, update)
            note(folder, rows=1)
            return Ended(-signal.SIGKILL)

        return dies

    assert run(begun(tmp_path, smallest), child(1), child(2), child(3), ends(0)) == 0
    assert [event["changed"] for event in Ledger(tmp_path).events] == [{}, {}, {}]
    with pytest.raises(RunFailed, match="no smaller plan"):
        run(tmp_path, dies_in_step(signal.SIGKILL), dies_in_step(signal.SIGKILL))


def test_the_same_plan_is_not_tried_for_ever(tmp_path):
    started = []

    def child(folder):
        started.append(1)
        return Ended(-signal.SIGKILL)

    with pytest.raises(RunFailed, match="again and again"):
        run(begun(tmp_path), *[child] * 9)
    assert len(started) == 1 + MOST_SAME

    def saving(folder):
        saves(folder, len(started) + 100)
        return child(folder)

    assert run(tmp_path, *[saving] * 7, ends(0)) == 0


def test_a_step_that_hangs_twice_is_the_end(tmp_path):
    hangs = ends(-signal.SIGTERM, hung=True)
    with pytest.raises(RunFailed, match="again and again") as caught:
        run(begun(tmp_path), hangs, hangs, ends(0))
    assert "run.step_timeout_s=5" in caught.value.found


def test_dying_before_any_plan_is_said_so(tmp_path):
    with pytest.raises(RunFailed, match="before its first step"):
        run(tmp_path, lambda folder: handed(folder, "memory", "smaller"))


def test_a_setting_that_its_check_switched_off_is_not_asked_for_again(tmp_path):
    asked = Plan(1, 64, (64,), loss_chunk=16)
    ledger = Ledger(begun(tmp_path, asked))
    smaller = ledger.next(1, 64)
    assert smaller.recompute == 2
    ledger.add(Death("memory", "x", "smaller"), 1, smaller)
    ledger = Ledger(tmp_path)
    ledger.begin(smaller, asked, MACHINE)  # the check switched recomputation off
    assert ledger.next(1, 64).attention_block == 32


def popen(code, limit_s=None, step=Path("none")):
    made = supervisor.Supervisor([sys.executable, "-c", code], step, limit_s)
    return made.run()


@pytest.fixture(autouse=True)
def signals():
    """The supervisor takes signals for itself."""
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    for number, handler in before:
        signal.signal(number, handler)


def test_the_end_of_stderr_is_kept_and_shown(capfd):
    code = (
        "import os, sys; sys.stderr.write('x' * 99999 + '\\nwarning: out of memory\\n');"
        f"sys.stderr.write({METAL!r}); sys.stderr.flush(); os.abort()"
    )
    ended = popen(code)
    assert ended.status == -signal.SIGABRT
    assert ended.said.endswith(METAL)
    assert "warning" not in ended.said
    assert len(ended.said) < 20_000
    shown = capfd.readouterr().err
    assert shown.count("x") >= 99999
    assert "warning: out of memory" in shown


def test_on_a_terminal_the_child_has_one_too():
    outer, inner = os.openpty()
    relay = Relay(to=inner)
    code = "import sys; sys.stderr.write('tty' if sys.stderr.isatty() else 'none')"
    child = subprocess.Popen([sys.executable, "-c", code], stderr=relay.child_end)
    relay.start()
    assert child.wait() == 0
    assert relay.said() == "tty"
    assert os.read(outer, 100) == b"tty"
    os.close(outer)
    os.close(inner)


def test_a_step_without_a_sign_of_life_is_ended(tmp_path):
    step = tmp_path / "step"
    code = f"import pathlib, time; pathlib.Path({str(step)!r}).write_text('x'); time.sleep(60)"
    started = time.monotonic()
    ended = popen(code, limit_s=1.0, step=step)
    assert ended.hung
    assert ended.status == -signal.SIGTERM
    assert time.monotonic() - started < 30


def test_steps_that_go_on_are_left_alone(tmp_path):
    step = tmp_path / "step"
    code = (
        "import pathlib, time\n"
        f"step = pathlib.Path({str(step)!r})\n"
        "for i in range(20):\n"
        "    step.write_text(str(i)); time.sleep(0.1)\n"
        "step.unlink(); time.sleep(1.5)\n"  # between steps nothing is timed
    )
    ended = popen(code, limit_s=1.2, step=step)
    assert (ended.status, ended.hung) == (0, False)


def test_it_imports_no_mlx():
    code = "import sys, stages.train.recovery.restarts; print('mlx' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
