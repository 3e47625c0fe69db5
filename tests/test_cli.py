import subprocess
import sys
import time

import pytest

import subcaps
from subcaps import cli


def in_a_child(*arguments):
    script = "import sys; from subcaps.cli import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    before = time.perf_counter()
    child = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return child.stdout, time.perf_counter() - before


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_answers_within_a_second_and_without_torch(flag):
    answers = [in_a_child(flag) for _ in range(2)]
    assert min(seconds for _, seconds in answers) < 1
    assert "subcaps" in answers[0][0]


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"subcaps {subcaps.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["bench"]])
def test_without_a_command_the_help_is_shown(arguments, capsys):
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.startswith("usage: " + " ".join(["subcaps", *arguments]))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("benhc", "subcaps: unknown command 'benhc', did you mean bench?"),
        ("bench ploar", "subcaps bench: unknown command 'ploar', did you mean polar?"),
        ("bench polar --devcie cpu", "subcaps bench polar: unknown --devcie cpu, did you mean --device?"),
        ("bench polar --dev=cpu", "did you mean --device?"),
        ("--versoin", "did you mean --version?"),
        ("bench polar --device gpu", "invalid choice: 'gpu' (choose from"),
        ("bench polar --out", "argument --out: expected one argument"),
    ],
)
def test_a_mistyped_command_or_flag_is_answered_with_the_nearest(arguments, says, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments.split())
    error = capsys.readouterr().err
    assert says in error
    assert "--help` says what there is" in error


@pytest.fixture
def failing(monkeypatch):
    from subcaps.bench import polar

    def run(device, out, quick):
        raise ValueError(f"no {device} here")

    monkeypatch.setattr(polar, "run", run)


def test_an_error_is_one_readable_line(failing, capsys):
    assert cli.main(["bench", "polar"]) == 1
    assert capsys.readouterr().err == "subcaps: no cpu here (--traceback shows where)\n"


@pytest.mark.parametrize("place", range(3))
def test_traceback_shows_where(failing, place, capsys):
    arguments = ["bench", "polar"]
    arguments.insert(place, "--traceback")
    assert cli.main(arguments) == 1
    assert capsys.readouterr().err.startswith("Traceback")
